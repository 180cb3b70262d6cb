// The kernels of the operators of context parallelism, as library.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "megatron_sb/context_parallel.h"
#include "ops/arguments.h"

namespace megatron_sb::distributed {

// attention.cpp
std::tuple<at::Tensor, at::Tensor> attention(const ops::Arguments& arguments);

// sharding.cpp
at::Tensor shard_positions(int64_t ranks, int64_t seq_len, const std::string& layout,
                           const std::optional<std::vector<int64_t>>& cu_seqlens, const std::string& packing);
at::Tensor shard(const at::Tensor& x, const std::string& group_name, int64_t dim, const std::string& layout,
                 const std::optional<std::vector<int64_t>>& cu_seqlens, const std::string& packing);
at::Tensor unshard(const at::Tensor& x, const std::string& group_name, int64_t dim, const std::string& layout,
                   const std::optional<std::vector<int64_t>>& cu_seqlens, const std::string& packing);

}  // namespace megatron_sb::distributed
