// A call from local rows to local rows: heads are exchanged or not, then they attend (driver.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "distributed/driver.h"
#include "megatron_sb/context_parallel.h"

namespace megatron_sb::distributed {

// By name: the ranks that exchange heads, and those that keys come from; each may be none, "".
struct RouteNames {
    std::string heads;
    std::string keys;
    Comm comm;
};

struct Route {
    std::unique_ptr<Transport> heads, keys;  // none: nullptr
    Comm comm;
    std::shared_ptr<const RankPlan> plan;
};

// What comm = "auto" stands for, by local tensors (.., s_local, heads, head_dim): "a2a" where the heads can be
// exchanged and leave a rank enough work, else "all_gather" while its memory is small, else "p2p".
const char* choose_comm(int ranks, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

Route make_route(const ContextParallelPlan& plan, const RouteNames& names, c10::Device device);

// What the backward needs.
struct Record {
    at::Tensor q, k, v, mass;         // as they attended
    std::vector<GroupRecord> groups;  // of KV heads
};

struct Routed {
    at::Tensor o;     // (b, s_local, h, d_v), q's dtype
    at::Tensor mass;  // (b, h, s_local), accumulation type
    Record record;    // without `groups` unless asked for
};

// q (b, s_local, h, d), k (b, s_local, h_kv, d), v (b, s_local, h_kv, d_v) with a unit last stride. All ranks call it.
// Without `with_mass` no mass travels, and the result's may be undefined.
Routed route_forward(const Route& route, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const ops::BlockOptions& options, bool keep_record, bool with_mass);

// d_o (b, s_local, h, d_v) with a unit last stride; d_mass (b, h, s_local), or undefined: 0. Gradients come in q's
// dtype. `with_mass` is the forward's: whether a d_mass travels may not depend on the loss of one rank.
Gradients route_backward(const Route& route, const at::Tensor& d_o, const at::Tensor& d_mass, int64_t num_kv_heads,
                         const Record& record, const ops::BlockOptions& options, bool with_mass);

// A record as one list of tensors for autograd to keep, and back.
std::vector<at::Tensor> flatten(const Record& record);
Record unflatten(const Route& route, const std::vector<at::Tensor>& tensors);

}  // namespace megatron_sb::distributed
