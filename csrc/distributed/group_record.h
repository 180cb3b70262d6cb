// The data of one group of KV heads that the backward needs. Values of rows have the shape (b, query heads of the
// group, rows of the run).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "distributed/rank_plan.h"

namespace megatron_sb::distributed {

struct GroupRecord {
    // By key buffer: restart records. Undefined for a buffer that no query of this rank sees.
    std::vector<at::Tensor> restart_edge, restart_mass;
    // By run: the mass at its newer edge, 0 for a row that newer runs have used up. Undefined for the newest run, where
    // it is 1.
    std::vector<at::Tensor> mass_in;
    // By run: the output (b, rows, heads, d_v) of all keys older than the run, in the accumulation type. Undefined for
    // the oldest run.
    std::vector<at::Tensor> older_o;
    // The key buffer as KeyBlock has it, if the plan keeps it (RankPlan::keeps_keys). Otherwise undefined.
    at::Tensor k = {}, v = {};
};

// Convert records to one list of tensors, which autograd can save, and back.
std::vector<at::Tensor> flatten(const std::vector<GroupRecord>& records);
std::vector<GroupRecord> unflatten(const SegmentTables& tables, const std::vector<at::Tensor>& tensors);

}  // namespace megatron_sb::distributed
