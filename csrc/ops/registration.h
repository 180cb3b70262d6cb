// The operators' kernels, as library.cpp registers them. Each reads its arguments by their names in the schema.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "ops/arguments.h"

namespace megatron_sb::ops {

using NoTensor = std::tuple<>;
using OneTensor = std::tuple<at::Tensor>;
using TensorPair = std::tuple<at::Tensor, at::Tensor>;
using BlockForwardResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;   // o, mass_out, restart
using BlockBackwardResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // dq, dk, dv, prefix_out
using HeadOutputGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// attention.cpp
TensorPair attention(const Arguments& arguments);
TensorPair attention_varlen(const Arguments& arguments);

// kvcache.cpp
TensorPair attention_kvcache(const Arguments& arguments);
TensorPair kvcache_forward(const Arguments& arguments);
TensorPair kvcache_forward_fake(const Arguments& arguments);
NoTensor kvcache_append(const Arguments& arguments);
NoTensor kvcache_append_fake(const Arguments& arguments);

// variants.cpp
OneTensor queries_for_blocks(const Arguments& arguments);
OneTensor keys_for_blocks(const Arguments& arguments);

// extend.cpp
OneTensor extend_forward_op(const Arguments& arguments);
OneTensor extend_forward_fake(const Arguments& arguments);
OneTensor extend_backward_op(const Arguments& arguments);
OneTensor extend_backward_fake(const Arguments& arguments);

// head_output.cpp
OneTensor head_output(const Arguments& arguments);
OneTensor head_output_forward(const Arguments& arguments);
OneTensor head_output_forward_fake(const Arguments& arguments);
HeadOutputGradients head_output_backward(const Arguments& arguments);
HeadOutputGradients head_output_backward_fake(const Arguments& arguments);

// block_ops.cpp
OneTensor segments(const Arguments& arguments);
OneTensor segments_fake(const Arguments& arguments);
BlockForwardResults block_forward_op(const Arguments& arguments);
BlockForwardResults block_forward_fake(const Arguments& arguments);
BlockBackwardResults block_backward_op(const Arguments& arguments);
BlockBackwardResults block_backward_fake(const Arguments& arguments);
std::string describe_kernels();
std::string instruction_set();
std::string torch_version();
std::string expired_waits();

}  // namespace megatron_sb::ops
