// The block contract on tensors: check -> Params -> dispatch. No autograd here.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "core/params.h"

namespace megatron_sb::ops {

struct BlockOptions {
    double scale;
    bool attend_current;
    double mass_threshold;
    bool forget_gate = false;  // k's rows are wider by kGateColumns (core/params.h)
};

struct BlockOutput {
    at::Tensor o;             // (b, s, h, d_v), o_dtype
    at::Tensor mass;          // (b, h, s), accumulation type
    at::Tensor restart_edge;  // (b, h, s), int32
    at::Tensor restart_mass;  // (b, h, s), accumulation type
};

// Gradients that are added to: in the accumulation type, with any strides with a unit last one (views of larger tensors
// too). Or in q's dtype, where narrow_gradients() says so: then all are written.
struct BlockGradients {
    at::Tensor dq;  // (b, s, h, d)
    at::Tensor dk;  // (b, s_k, h_kv, d)
    at::Tensor dv;  // (b, s_k, h_kv, d_v)
};

// fp64 for fp64 tensors, fp32 for all others: masses, prefixes, partial outputs and gradients.
at::ScalarType accumulation_type(const at::Tensor& q);

// x itself where its last stride is 1, as the kernels need it, or a contiguous copy.
at::Tensor unit_last_stride(const at::Tensor& x);

// As the kernels name it. Raises TypeError for a type that none knows.
Dtype dtype_of(at::ScalarType type);

// x (batch, rows, heads, head_dim) itself on a CPU. The GPU kernels move 16 bytes at a time: x where its rows begin on
// such addresses, else a copy.
at::Tensor aligned(const at::Tensor& x);

template <class Pointer>
Rows<Pointer> rows_of(const at::Tensor& x) {
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

// Contiguous tensors of the shapes that block_backward adds to or writes, in the accumulation type or `dtype`.
BlockGradients empty_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               std::optional<at::ScalarType> dtype = std::nullopt);
BlockGradients zero_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              std::optional<at::ScalarType> dtype = std::nullopt);

// Whether the kernels that serve q and v write gradients in q's dtype.
bool narrow_gradients(const at::Tensor& q, const at::Tensor& v, const BlockOptions& options);

// q (b, s, h, d), k (b, s_k, h_kv, d), v (b, s_k, h_kv, d_v) with a unit last stride; segments int32 (n, 5) on the same
// device, or none: one segment over all rows whose queries are the last s of the s_k positions. mass_in (b, h, s).
// o comes in the accumulation type, or in `o_dtype` (that or q's). Rows of no segment: o = 0, mass = mass_in.
BlockOutput block_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& segments, const std::optional<at::Tensor>& mass_in,
                          const BlockOptions& options, std::optional<at::ScalarType> o_dtype = std::nullopt);

// Adds this block's part to `gradients` and returns prefix_out (b, h, s). mass_in scales a restart that was made before
// its carry was known; prefix_in is the sum of g over all older keys plus mass * dmass (absent: 0).
at::Tensor block_backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& segments, const at::Tensor& restart_edge,
                          const at::Tensor& restart_mass, const std::optional<at::Tensor>& mass_in,
                          const std::optional<at::Tensor>& prefix_in, const BlockOptions& options,
                          const BlockGradients& gradients);

}  // namespace megatron_sb::ops
