// Tensors as the kernels take them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/params.h"

namespace megatron_sb::ops {

// The type of masses, prefixes, partial outputs and partial gradients: fp64 for fp64 tensors, fp32 for all others.
at::ScalarType accumulation_type(const at::Tensor& x);

// Raises TypeError for a type that no kernel supports.
Dtype dtype_of(at::ScalarType type);

// x if its last stride is 1, else a contiguous copy.
at::Tensor unit_last_stride(const at::Tensor& x);

// x (batch, rows, heads, head_dim) if its rows begin at multiples of 16 bytes, which the GPU kernels load at a time;
// else a contiguous copy. Always x on a CPU.
at::Tensor aligned(const at::Tensor& x);

// An uninitialised byte tensor on the device of `like`.
at::Tensor empty_workspace(int64_t bytes, const at::Tensor& like);

// The data and the strides of x (batch, rows, heads, head_dim).
template <class Pointer>
Rows<Pointer> strided_rows(const at::Tensor& x) {
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

}  // namespace megatron_sb::ops
