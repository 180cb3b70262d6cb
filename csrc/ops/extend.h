// The columns that variants of the logit append to q and k: kernels/extend for 16-bit tensors on a GPU, else tensor
// operations. variants.h says what the columns are for.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/extend/extend.h"

namespace megatron_sb::ops {

using extend::Norm;

inline constexpr int64_t kNormColumns = 8;  // columns of norms and ones: 2 * kGateParts, padded to a multiple of 8
static_assert(2 * kGateParts <= kNormColumns && kGateParts <= kGateColumns);

// Returns x (batch, rows, heads, head_dim) with its extra columns. gate: (batch, rows, heads) in the accumulation type.
at::Tensor extend_forward(const at::Tensor& x, const std::optional<at::Tensor>& gate, Norm norm);

// Returns the gradient of x, of `head_dim` columns, from that of the result `extended`. norm: not kNone.
at::Tensor extend_backward(const at::Tensor& d_extended, const at::Tensor& extended, Norm norm,
                           const c10::SymInt& head_dim);

}  // namespace megatron_sb::ops
