// Variants of the logit as extra columns of q and k. The block contract does not change.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "megatron_sb/attention.h"

namespace megatron_sb::ops {

// Checks the variants of `options` for q (.., h, d) and k (.., h_kv, d) as the caller gave them. `stored_biases` says
// whether the keys of a cache have bias columns. Errors name q as `q_name`. Raises ValueError or TypeError.
void check_variants(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& options,
                    bool stored_biases = false, const char* q_name = "q");

// Whether the queries and keys of a call have bias columns, and what these hold.
struct BiasColumns {
    bool exist;    // with Euclidean logits or a bias
    bool norms;    // Euclidean logits
    double scale;  // of the logits
};

// scale: that of block_options().
BiasColumns bias_columns(const AttentionOptions& options, double scale);

// Return q (.., h, d) and k (.., h_kv, d) with extra columns, so that scale times the dot products of the results are
// the logits with their biases: query_bias (.., h) and key_bias (.., h_kv), zero by default, and the norms of Euclidean
// logits. Without bias columns they add none. With a forget gate (.., h_kv), the last kGateColumns columns of the keys
// hold the gates (core/params.h). Differentiable. The arguments have passed check_variants.
at::Tensor extended_queries(const at::Tensor& q, const std::optional<at::Tensor>& query_bias,
                            const BiasColumns& columns);
at::Tensor extended_keys(const at::Tensor& k, const std::optional<at::Tensor>& key_bias,
                         const std::optional<at::Tensor>& forget_gate, const BiasColumns& columns);

}  // namespace megatron_sb::ops
