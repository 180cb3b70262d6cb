// Context-parallel attention of one rank: one driver over a plan, whatever the mode, the layout and the packing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "distributed/feed.h"
#include "distributed/rank_plan.h"
#include "distributed/transport.h"
#include "ops/block.h"

namespace megatron_sb::distributed {

// What the backward needs of one group of KV heads. Values by row are (b, heads, rows of the run).
struct GroupRecord {
    std::vector<at::Tensor> restart_edge;  // by key buffer; undefined where nothing was computed
    std::vector<at::Tensor> restart_mass;
    // By run: the mass at its newer edge, 0 where a row has ended before; undefined for the newest: 1.
    std::vector<at::Tensor> mass_in;
    // By run: what all older keys gave, in the accumulation type; undefined for the oldest.
    std::vector<at::Tensor> older_o;
};

struct Attended {
    at::Tensor o;                     // (b, s_local, h, d_v), q's dtype
    at::Tensor mass;                  // (b, h, s_local), accumulation type
    std::vector<GroupRecord> record;  // empty unless asked for
};

struct Gradients {
    at::Tensor dq, dk, dv;  // of q, k, v
};

// q (b, s_local, h, d), k (b, s_local, h_kv, d), v (b, s_local, h_kv, d_v) with a unit last stride. All ranks call it.
// Where all keys are here, no transport is needed.
Attended attend_forward(Transport* transport, const RankPlan& plan, Comm comm, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const ops::BlockOptions& options, bool keep_record);

// d_o like o with a unit last stride; d_mass like mass, or undefined. Gradients come in `type`: q's dtype, or the
// accumulation type.
Gradients attend_backward(Transport* transport, const RankPlan& plan, Comm comm, const at::Tensor& d_o,
                          const at::Tensor& d_mass, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& mass, const std::vector<GroupRecord>& record,
                          const ops::BlockOptions& options, at::ScalarType type);

// A record as one list of tensors for autograd to keep, and back.
std::vector<at::Tensor> flatten(const std::vector<GroupRecord>& record);
std::vector<GroupRecord> unflatten(const RankPlan& plan, Comm comm, const std::vector<at::Tensor>& tensors);

}  // namespace megatron_sb::distributed
