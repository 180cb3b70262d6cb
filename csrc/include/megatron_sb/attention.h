// Stick-breaking attention (Tan et al., arXiv 2410.17980) for C++ programs, without Python. Link megatron_sb::ops.
//
//   const auto [o, mass] = megatron_sb::stickbreaking_attention(q, k, v);
//
//   z_ij = scale * q_j . k_i,   beta = sigmoid(z),   A_ij = beta_ij * prod_{i<k<j} (1 - beta_kj)        (eq. 1)
//   o_j = sum_i A_ij v_i,   mass_j = 1 - sum_i A_ij, the part of the stick that is left
//
// Letters of shapes:
// - b: batch elements
// - s, s_k: queries and keys of a sequence
// - t, t_k: query rows and key rows of a packed batch
// - h, h_kv: query heads and KV heads
// - d: head_dim of q and k
// - d_v: head_dim of v and o
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace megatron_sb {

struct AttentionOptions {
    // Factor of the logits, a finite number. Default: 1 / sqrt(d), or 1 with Euclidean logits.
    std::optional<double> scale = std::nullopt;
    // Whether a query also attends to the key at its own position: keys i <= j instead of i < j.
    bool attend_current = false;
    // In [0, 1). Older tiles of keys are skipped when the mass of all rows of the query tile is below it. This changes
    // o by at most mass_threshold * max |v|. 0 disables skipping.
    double mass_threshold = 0x1p-24;
    // f for beta_ij = f_i * sigmoid(z_ij): one value for each key and KV head, (b, s_k, h_kv) or packed (t_k, h_kv). In
    // q's dtype or in fp32 (fp64 if q is fp64), on q's device. Values are clamped to [0, 1]. Default: no gate.
    std::optional<at::Tensor> forget_gate = std::nullopt;
    // Euclidean logits, z_ij = -scale * |q_j - k_i|^2 (NU-CS-2024-15). d must then be at most 248.
    bool euclidean = false;
    // Biases of the logits: query_bias (b, s, h) or packed (t, h) is added to the logits of a query, and key_bias
    // (b, s_k, h_kv) or packed (t_k, h_kv) to those of a key. In q's dtype or in fp32 (fp64 if q is fp64), on q's
    // device. d must then be at most 248, and scale at least 2^-64 in magnitude. A key_bias of -infinity hides the key.
    // Default: no bias.
    std::optional<at::Tensor> query_bias = std::nullopt;
    std::optional<at::Tensor> key_bias = std::nullopt;
    // The reach a of the first and of the last head, from 1/64 to 64. The values of the other heads are evenly spaced
    // between them, rounded to multiples of 2^-18. The logits of a head get an offset: beta is 2^-a if z without the
    // offset is 0. Default: no offset.
    std::optional<std::vector<double>> reach = std::nullopt;
};

// Computes causal attention of a batch of sequences. The queries are the last s of the s_k positions, and s <= s_k.
//
// - q (b, s, h, d): fp32, bf16 or fp16, on CPU also fp64. d is a multiple of 8 and at most 256.
// - k (b, s_k, h_kv, d), in q's dtype and on q's device. h is a multiple of h_kv. Query head i reads KV head
//   i / (h / h_kv).
// - v (b, s_k, h_kv, d_v), in q's dtype and on q's device. d_v is a multiple of 8 and at most 256.
//
// Tensors can have any strides. Returns (o, mass): o (b, s, h, d_v) in q's dtype, and mass (b, h, s) in fp32 (fp64 if
// q is fp64). Both can be differentiated once. A mass below mass_threshold is not exact: the true mass is between 0
// and mass_threshold.
//
// Throws c10::TypeError for a wrong dtype, c10::ValueError for a wrong shape, device or option, and std::runtime_error
// if a kernel cannot be launched.
std::tuple<at::Tensor, at::Tensor> stickbreaking_attention(const at::Tensor& q, const at::Tensor& k,
                                                           const at::Tensor& v, const AttentionOptions& options = {});

// Computes causal attention of packed documents: each query attends to the keys of its own document.
//
// - q (t, h, d), k (t_k, h_kv, d), v (t_k, h_kv, d_v): dtypes and limits as in stickbreaking_attention.
// - cu_seqlens (n + 1,): int32, on q's device. Document i has the query rows [cu_seqlens[i], cu_seqlens[i + 1]). The
//   first value is 0, values do not decrease, and the last is at most t.
// - cu_seqlens_k (n + 1,): the same for the rows of k and v. Default: cu_seqlens, which requires t = t_k. A document
//   must have at most as many queries as keys; its queries are its last positions.
//
// Returns (o, mass): o (t, h, d_v) in q's dtype, and mass (h, t) in fp32 (fp64 if q is fp64). Both can be
// differentiated once. Rows after the last document get o = 0 and mass = 1.
//
// Throws the exceptions of stickbreaking_attention. The values of cu_seqlens are checked on a CPU only. On a GPU they
// are clamped to the rows of q and k, so that the host does not need to wait for them.
std::tuple<at::Tensor, at::Tensor> stickbreaking_attention_varlen(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
    const std::optional<at::Tensor>& cu_seqlens_k = std::nullopt, const AttentionOptions& options = {});

}  // namespace megatron_sb
