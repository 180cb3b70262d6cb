// Context-parallel attention on one rank: one driver over a plan for every mode, layout and packing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "distributed/rank_call.h"

namespace megatron_sb::distributed {

RankOutput attend_forward(const RankCall& call, bool keep_records);

// d_o has the shape of o and a unit last stride. d_mass has the shape of mass; undefined means 0. `mass` and `records`
// are results of the forward. Gradients have the dtype `type`: q's dtype or the accumulation type.
Gradients attend_backward(const RankCall& call, const at::Tensor& d_o, const at::Tensor& d_mass, const at::Tensor& mass,
                          const std::vector<GroupRecord>& records, at::ScalarType type);

}  // namespace megatron_sb::distributed
