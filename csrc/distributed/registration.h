// The functions behind the operators of context parallelism, with the signatures of their schemas.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "megatron_sb/context_parallel.h"

namespace megatron_sb::distributed {

using PlanPointer = c10::intrusive_ptr<ContextParallelPlan>;

// attention.cpp
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const PlanPointer& plan, const std::string& comm,
                                             const std::string& heads_group, const std::string& keys_group,
                                             std::optional<double> scale, bool attend_current, double mass_threshold,
                                             bool return_mass, const std::optional<at::Tensor>& forget_gate,
                                             bool euclidean);

// sharding.cpp
at::Tensor shard(const at::Tensor& x, const std::string& group_name, int64_t dim, const std::string& layout,
                 const std::optional<std::vector<int64_t>>& cu_seqlens, const std::string& packing);
at::Tensor unshard(const at::Tensor& x_local, const std::string& group_name, int64_t dim, const std::string& layout,
                   const std::optional<std::vector<int64_t>>& cu_seqlens, const std::string& packing);

}  // namespace megatron_sb::distributed
