// The columns that variants of the logit append to q and k: kernels/extend for 16-bit tensors on a GPU, else tensor
// operations. variants.h says what the columns are for.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/extend/extend.h"

namespace megatron_sb::ops {

using extend::Side;

static_assert(2 * kGateParts <= kBiasColumns && kGateParts <= kGateColumns);

// The columns of a number and ones (kernels/extend/extend.h).
struct Columns {
    Side side = Side::kNone;
    bool norms = false;  // Euclidean logits. Requires a side.
    double scale = 1;    // of the logits

    int64_t count() const { return side == Side::kNone ? 0 : int64_t(kBiasColumns); }
    // The first column of the number, after the channels.
    int64_t number() const { return side == Side::kQuery ? 0 : kGateParts; }
};

// The columns of a number hold the number divided by this unit, which the ones hold: bias_unit().
double number_unit(at::ScalarType type);

// Returns x (batch, rows, heads, head_dim) with its extra columns. bias, gate: (batch, rows, heads) in the accumulation
// type.
at::Tensor extend_forward(const at::Tensor& x, const std::optional<at::Tensor>& bias,
                          const std::optional<at::Tensor>& gate, const Columns& columns);

// Returns the gradient of x, of `head_dim` columns, from that of the result `extended`, with norms.
at::Tensor extend_backward(const at::Tensor& d_extended, const at::Tensor& extended, Side side,
                           const c10::SymInt& head_dim);

}  // namespace megatron_sb::ops
