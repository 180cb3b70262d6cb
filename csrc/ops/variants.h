// Variants of the logit as extra columns of q and k. The block contract does not change.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "megatron_sb/attention.h"

namespace megatron_sb::ops {

// Checks the variants of `options` for q (.., h, d) and k (.., h_kv, d) as the caller gave them. Raises ValueError or
// TypeError.
void check_variants(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& options);

// Return q (.., h, d) and k (.., h_kv, d) with extra columns, so that the dot products of the results are Euclidean
// logits. Without Euclidean logits they add none. With a forget gate (.., h_kv), the last kGateColumns columns of the
// keys hold the gates (core/params.h). Differentiable. The arguments have passed check_variants.
at::Tensor extended_queries(const at::Tensor& q, bool euclidean);
at::Tensor extended_keys(const at::Tensor& k, const std::optional<at::Tensor>& forget_gate, bool euclidean);

}  // namespace megatron_sb::ops
