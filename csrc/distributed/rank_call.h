// A context-parallel call on one rank, and its results.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "distributed/group_record.h"
#include "distributed/rank_plan.h"
#include "distributed/transport.h"
#include "ops/block.h"

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
    at::Tensor o;     // (b, s_local, h, d_v), q's dtype
    at::Tensor mass;  // (b, h, s_local), accumulation type
    // One for each group of KV heads, then one of the own documents (own_documents.h), if any. Empty without
    // keep_records.
    std::vector<GroupRecord> records;
};

struct Gradients {
    at::Tensor dq, dk, dv;  // of q, k, v
};

}  // namespace megatron_sb::distributed
