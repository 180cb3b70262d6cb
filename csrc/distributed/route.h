// Context-parallel attention from this rank's rows of q, k, v to its rows of the output. Exchanges heads if the mode
// requires it, and calls the driver (driver.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed/driver.h"
#include "megatron_sb/context_parallel.h"
#include "plan/key_rows.h"

namespace megatron_sb::distributed {

// The names of the groups of a route; "" for a group that the route does not need.
struct RouteNames {
    std::string heads;  // the ranks that exchange heads
    std::string keys;   // the ranks that send keys
    Comm comm;
};

struct Route {
    std::unique_ptr<Transport> heads, keys;  // null if the route does not need the group
    Comm comm;
    std::shared_ptr<const RankPlan> plan;
};

// Returns the mode of comm = "auto" for local tensors (.., s_local, heads, head_dim): "all_gather" if the layout is
// balanced and ranks then receive less than by an exchange of heads; else "a2a" if the heads can be exchanged and each
// rank then has enough work; else "all_gather" if it needs little memory or if the layout has no ring; else "p2p".
// key_rows: of the partition, if they are few.
const char* choose_comm(const plan::Partition& partition, const std::optional<plan::KeyRowCounts>& key_rows,
                        const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

Route make_route(const ContextParallelPlan& plan, const RouteNames& names, c10::Device device);

// What the backward needs.
struct RouteRecord {
    at::Tensor q, k, v, mass;         // the inputs and the mass of attend_forward
    std::vector<GroupRecord> groups;  // RankOutput::records
};

struct RouteOutput {
    at::Tensor o;        // (b, s_local, h, d_v), q's dtype
    at::Tensor mass;     // (b, h, s_local), accumulation type
    RouteRecord record;  // `groups` is empty if keep_record is false
};

// q (b, s_local, h, d), k (b, s_local, h_kv, d), v (b, s_local, h_kv, d_v) with a unit last stride. All ranks call it.
// If `with_mass` is false, no mass is sent, and the mass of the result may be undefined.
RouteOutput route_forward(const Route& route, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const ops::BlockOptions& options, bool keep_record, bool with_mass);

// d_o (b, s_local, h, d_v) with a unit last stride. d_mass (b, h, s_local); undefined means 0. Gradients have q's
// dtype. `with_mass` must be that of the forward. It decides on all ranks alike whether d_mass is sent: the loss of one
// rank may use the mass and the loss of another may not.
Gradients route_backward(const Route& route, const at::Tensor& d_o, const at::Tensor& d_mass, int64_t num_kv_heads,
                         const RouteRecord& record, const ops::BlockOptions& options, bool with_mass);

// Convert a record to one list of tensors, which autograd can save, and back.
std::vector<at::Tensor> flatten(const RouteRecord& record);
RouteRecord unflatten(const Route& route, const std::vector<at::Tensor>& tensors);

}  // namespace megatron_sb::distributed
