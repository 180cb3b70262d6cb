// Context-parallel attention on one rank: one driver over a plan for every mode, layout and packing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "distributed/group_record.h"
#include "distributed/key_source.h"
#include "distributed/rank_plan.h"
#include "distributed/transport.h"
#include "ops/options.h"

namespace megatron_sb::distributed {

// A call of attend_forward or of the attend_backward that belongs to it. All ranks make the same calls.
struct RankCall {
    Transport* transport;  // between the ranks that send keys; null if comm is kLocal
    const RankPlan& plan;
    Comm comm;
    at::Tensor q, k, v;  // (b, s_local, h, d), (b, s_local, h_kv, d), (b, s_local, h_kv, d_v); unit last stride
    ops::BlockOptions options;
};

struct RankOutput {
    at::Tensor o;                      // (b, s_local, h, d_v), q's dtype
    at::Tensor mass;                   // (b, h, s_local), accumulation type
    std::vector<GroupRecord> records;  // one for each group of KV heads; empty without keep_records
};

struct Gradients {
    at::Tensor dq, dk, dv;  // of q, k, v
};

RankOutput attend_forward(const RankCall& call, bool keep_records);

// d_o has the shape of o and a unit last stride. d_mass has the shape of mass; undefined means 0. `mass` and `records`
// are results of the forward. Gradients have the dtype `type`: q's dtype or the accumulation type.
Gradients attend_backward(const RankCall& call, const at::Tensor& d_o, const at::Tensor& d_mass, const at::Tensor& mass,
                          const std::vector<GroupRecord>& records, at::ScalarType type);

}  // namespace megatron_sb::distributed
