// Tensors as the kernels take them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "core/params.h"

namespace megatron_sb::ops {

// The type of masses, prefixes, partial outputs and partial gradients: fp64 for fp64 tensors, fp32 for all others.
at::ScalarType accumulation_type(const at::Tensor& x);

// Returns x, or nullopt if x is undefined.
inline std::optional<at::Tensor> if_defined(const at::Tensor& x) {
    return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt;
}

// Returns a contiguous x, if there is one.
std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& x);

// Returns values of rows (batch, heads, rows) as (batch, rows, heads, 1), to combine them with vectors of rows.
at::Tensor per_row(const at::Tensor& values);

// Raises TypeError for a type that no kernel supports.
Dtype dtype_of(at::ScalarType type);

// Returns x if its last stride is 1, else a contiguous copy.
at::Tensor unit_last_stride(const at::Tensor& x);

// Returns x (batch, rows, heads, head_dim) if its rows begin at multiples of 16 bytes, else a contiguous copy. GPU
// kernels load 16 bytes at a time. On a CPU the result is always x.
at::Tensor aligned(const at::Tensor& x);

// Returns an uninitialised tensor (batch, rows, heads, head_dim) whose rows begin at multiples of 32 bytes, the unit in
// which a GPU accesses memory. They are further apart than they are long, if necessary.
at::Tensor empty_in_sectors(c10::SymIntArrayRef sizes, const at::TensorOptions& options);

// Returns an uninitialised tensor of bytes on the device of `like`.
at::Tensor empty_workspace(int64_t bytes, const at::Tensor& like);

// Returns the data and the strides of x (batch, rows, heads, head_dim).
template <class Pointer>
Rows<Pointer> strided_rows(const at::Tensor& x) {
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

}  // namespace megatron_sb::ops
