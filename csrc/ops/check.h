// Checks of arguments, before anything is launched. They raise ValueError or TypeError with the argument, the expected
// value and the actual one, and work on symbolic sizes too.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/error.h"
#include "core/params.h"

namespace megatron_sb::ops {

// Returns f(), which operators call. Throws torch's ValueError for an InvalidArgument: Python would get a RuntimeError
// from torch 2.15 and later.
template <class F>
decltype(auto) with_value_errors(const F& f) {
    try {
        return f();
    } catch (const InvalidArgument& error) {
        TORCH_CHECK_VALUE(false, error.what());
    }
}

// x is a tensor. Callers from C++ can pass an undefined one, also as an optional tensor.
void check_defined(const char* name, const at::Tensor& x);
// x has `rank` dimensions; `shape` names them.
void check_rank(const char* name, const at::Tensor& x, int64_t rank, const char* shape);
void check_dtype(const char* name, const at::Tensor& x);
// x holds its elements. A wrapper of Python, for example DTensor or FakeTensor, holds none. Operators that the
// dispatcher calls for a device never get one. A composite operator gets one, and must check it before it calls kernels
// directly.
void check_elements(const char* name, const at::Tensor& x);
void check_same_dtype(const char* name, const at::Tensor& x, const at::Tensor& like, const char* like_name);
void check_device(const char* name, const at::Tensor& x, const at::Tensor& like, const char* like_name);
// q and k (b, rows, heads, head_dim): the number of query heads is a positive multiple of the number of KV heads.
void check_head_counts(const at::Tensor& q, const at::Tensor& k, const char* k_name);
void check_head_dim(const char* name, const c10::SymInt& head_dim);
void check_size(const char* name, const char* what, const c10::SymInt& size, const char* like_name,
                const c10::SymInt& like);
// `size` is at most `limit`. `what` names the size, for example "number of rows".
void check_at_most(const char* name, const char* what, const c10::SymInt& size, int64_t limit);
// x (batch, rows, heads, head_dim): the numbers of rows and of heads fit the kernels.
void check_counts(const char* name, const at::Tensor& x);

// Devices, dtypes, sizes and head counts of q (b, s, h, d), k (b, s_k, h_kv, d) and v (b, s_k, h_kv, d_v). With `gates`
// the rows of k are wider by kGateColumns (core/params.h).
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool gates = false);

// Dense operators: the queries are the last s of the s_k positions, so s <= s_k.
void check_lengths(const at::Tensor& q, const at::Tensor& k);

void check_options(const Options& options);

// cu_seqlens is int32 (documents + 1,) on the device of `like`. Reads no values.
void check_cu_seqlens_form(const char* name, const at::Tensor& cu_seqlens, const at::Tensor& like,
                           const char* like_name);

// CPU only: the values start at 0, never decrease and end within `rows`.
void check_cu_seqlens_values(const char* name, const at::Tensor& cu_seqlens, int64_t rows);

// One value of `dtype` for each head and row of `x` (b, s, h, d) or packed (t, h, d): shape (b, h, s) or (h, t), on the
// device of x.
void check_row_values(const char* name, const at::Tensor& values, const at::Tensor& x, const char* x_name,
                      at::ScalarType dtype);

}  // namespace megatron_sb::ops
