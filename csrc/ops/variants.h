// The variants of the logit, brought into the form that the block contract has: more columns of q and k.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace megatron_sb::ops {

// How an attention's logits are made, beside its scale.
struct Variants {
    std::optional<at::Tensor> forget_gate;  // (b, s_k, h_kv), packed (t_k, h_kv): beta = f sigmoid(z)
    bool euclidean = false;                 // z = -scale |q - k|^2 instead of scale * q . k
};

// Of tensors as the caller gave them, q (.., h, d), k (.., h_kv, d). Raises ValueError or TypeError that names the
// argument, its value and what is allowed.
void check_variants(const at::Tensor& q, const at::Tensor& k, const Variants& variants);

// The given scale, or the variant's: 1 / sqrt(d), and 1 for Euclidean logits.
double scale_of(const std::optional<double>& scale, const at::Tensor& q, const Variants& variants);

struct Extended {
    at::Tensor q, k;  // (.., h, d'), (.., h_kv, d' + kGateColumns where there are gates)
};

// q and k with which plain logits, and gates behind the keys (core/params.h), are those of `variants`. Differentiable.
Extended extended(const at::Tensor& q, const at::Tensor& k, const Variants& variants);

}  // namespace megatron_sb::ops
