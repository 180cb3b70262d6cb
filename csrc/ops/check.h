// What callers get wrong, refused before anything runs. Works on symbolic sizes too.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace megatron_sb::ops {

// q, k, v of rank 4: (batch, rows, heads, head_dim), k with kGateColumns more where it brings `gates`. Rank, device,
// dtype, sizes and head counts. Raises ValueError or TypeError that names the argument, its value and what is allowed.
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool gates = false);

// Of a tensor by itself: a floating type that kernels know; a head_dim that they know.
void check_dtype(const char* name, const at::Tensor& x);
void check_head_dim(const char* name, const c10::SymInt& head_dim);

// Of the dense operators: the queries are the last s of s_k positions.
void check_lengths(const at::Tensor& q, const at::Tensor& k);

void check_options(double scale, double mass_threshold);

// int32, one-dimensional, contiguous, on the device of `tensor`.
void check_cu_seqlens_form(const char* name, const at::Tensor& cu_seqlens, const at::Tensor& tensor);

// Values on the CPU: start at 0, never decrease, end within `rows`.
void check_cu_seqlens_values(const char* name, const at::Tensor& cu_seqlens, int64_t rows);

// Per-row carries and records: contiguous (b, h, s) of `dtype` on q's device.
void check_row_values(const char* name, const at::Tensor& values, const at::Tensor& q, at::ScalarType dtype);

}  // namespace megatron_sb::ops
