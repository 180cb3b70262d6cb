// Stick-breaking attention (Tan et al., arXiv 2410.17980) for C++ programs, without Python. Link megatron_sb::ops.
//
//   z_ij = scale * q_j . k_i,   beta = sigmoid(z),   A_ij = beta_ij * prod_{i<k<j} (1 - beta_kj)        (eq. 1)
//   o_j = sum_i A_ij v_i,   mass_j = 1 - sum_i A_ij, the part of the stick that is left
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace megatron_sb {

struct AttentionOptions {
    std::optional<double> scale = std::nullopt;  // default: 1 / sqrt(head_dim), or 1 with euclidean
    bool attend_current = false;                 // a query sees keys i <= j instead of i < j
    double mass_threshold = 0x1p-24;  // in [0, 1): older tiles are skipped below this mass; 0 disables skipping
    // f in (0, 1] for each key and KV head, (b, s_k, h_kv) or packed (t_k, h_kv): beta = f * sigmoid(z). In q's dtype
    // or fp32 (fp64 for fp64).
    std::optional<at::Tensor> forget_gate = std::nullopt;
    bool euclidean = false;  // z_ij = -scale * |q_j - k_i|^2 (NU-CS-2024-15); head_dim at most 248
};

// q (b, s, h, d), k (b, s_k, h_kv, d), v (b, s_k, h_kv, d_v), s <= s_k: the queries are the last s positions.
// Returns o (b, s, h, d_v) in q's dtype and mass (b, h, s) in fp32 (fp64 for fp64). Both are differentiable once.
// Throws c10::ValueError or c10::TypeError for an invalid argument.
std::tuple<at::Tensor, at::Tensor> stickbreaking_attention(const at::Tensor& q, const at::Tensor& k,
                                                           const at::Tensor& v, const AttentionOptions& options = {});

// Packed documents: q (t, h, d), k (t_k, h_kv, d), v (t_k, h_kv, d_v). cu_seqlens: int32 (n + 1,), starts at 0;
// cu_seqlens_k: the same for the keys, by default cu_seqlens. Returns o (t, h, d_v) and mass (h, t). Rows of no
// document get o = 0 and mass = 1.
std::tuple<at::Tensor, at::Tensor> stickbreaking_attention_varlen(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
    const std::optional<at::Tensor>& cu_seqlens_k = std::nullopt, const AttentionOptions& options = {});

}  // namespace megatron_sb
