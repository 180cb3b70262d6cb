// Variants of the logit as extra columns of q and k. The block contract does not change.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron_sb/attention.h"

namespace megatron_sb::ops {

// Checks the variants of `options` for q (.., h, d) and k (.., h_kv, d) as the caller gave them. Raises ValueError or
// TypeError.
void check_variants(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& options);

struct Extended {
    at::Tensor q;  // (.., h, d')
    at::Tensor k;  // (.., h_kv, d'), plus kGateColumns with a forget gate
};

// Returns q and k with extra columns, so that their dot products are the logits that `options` asks for. With a forget
// gate, the last columns of k hold the gates (core/params.h). Differentiable.
Extended with_variant_columns(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& options);

}  // namespace megatron_sb::ops
