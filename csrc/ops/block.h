// The block contract (core/params.h) on tensors: check -> Params -> dispatch. Without autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/options.h"

namespace megatron_sb::ops {

struct BlockOutput {
    at::Tensor o;             // (b, s, h, d_v), o_dtype
    at::Tensor mass;          // (b, h, s), accumulation type
    at::Tensor restart_edge;  // (b, h, s), int32
    at::Tensor restart_mass;  // (b, h, s), accumulation type
};

// The gradient tensors of block_backward, which overwrites every element. They have one dtype, a gradient_type(). They
// may be views of larger tensors with a unit last stride, if their rows begin at multiples of 16 bytes.
struct BlockGradients {
    at::Tensor dq;        // (b, s, h, d)
    at::Tensor dk;        // (b, s_k, h_kv, d)
    at::Tensor dv;        // (b, s_k, h_kv, d_v)
    bool add_dq = false;  // block_backward adds to dq, which has the accumulation type
};

// Returns the type in which the kernels that serve q and v compute gradients that the caller needs in `wanted`, the
// accumulation type or q's dtype. It is `wanted`, or the accumulation type if they cannot write q's dtype.
at::ScalarType gradient_type(const at::Tensor& q, const at::Tensor& v, const BlockOptions& options,
                             at::ScalarType wanted);
// Returns contiguous, uninitialised gradient tensors of this type.
BlockGradients empty_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const BlockOptions& options, at::ScalarType wanted);

// Check the arguments of the two functions below, without the values of segments. They also accept symbolic sizes.
void check_block(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const std::optional<at::Tensor>& segments, const std::optional<at::Tensor>& mass_in,
                 const BlockOptions& options);
void check_block_backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& segments, const at::Tensor& restart_edge,
                          const at::Tensor& restart_mass, const std::optional<at::Tensor>& mass_in,
                          const std::optional<at::Tensor>& prefix_in, const BlockOptions& options);
// type is the accumulation type or q's dtype.
void check_out_dtype(at::ScalarType type, const at::Tensor& q);

// q (b, s, h, d), k (b, s_k, h_kv, d), v (b, s_k, h_kv, d_v) with a unit last stride. segments: int32 (n, 5) on the
// same device. The default is one segment over all rows, in which the queries are the last s of the s_k positions.
// mass_in (b, h, s), default 1. o_dtype: the accumulation type (default) or q's dtype. Rows of no segment get o = 0 and
// mass = mass_in. add_to: an o in the accumulation type. Kernels add the output to it, and it is returned as o.
BlockOutput block_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& segments, const std::optional<at::Tensor>& mass_in,
                          const BlockOptions& options, std::optional<at::ScalarType> o_dtype = std::nullopt,
                          const std::optional<at::Tensor>& add_to = std::nullopt);

// Does the same for q (1, s, h, d) and keys in blocks: k (blocks, block_size, h_kv, d), v (blocks, block_size, h_kv,
// d_v). Row r of the keys is row r % block_size of block block_table[r / block_size]. block_table: int32, contiguous.
// The caller checks all arguments. No kernel copies the keys.
BlockOutput block_forward_paged(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& block_table, const at::Tensor& segments, const BlockOptions& options,
                                at::ScalarType o_dtype);

// Writes the gradients of this block to `gradients`, 0 where there is none. Returns prefix_out (b, h, s).
// mass_in scales a restart record that was written before the carry was known; default 1. prefix_in is the sum of g
// over all older keys plus mass * d_mass; default 0. max_seqlen_k: no segment has more keys; by default not known.
at::Tensor block_backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& segments, const at::Tensor& restart_edge,
                          const at::Tensor& restart_mass, const std::optional<at::Tensor>& mass_in,
                          const std::optional<at::Tensor>& prefix_in, const BlockOptions& options,
                          const BlockGradients& gradients, std::optional<int64_t> max_seqlen_k = std::nullopt);

}  // namespace megatron_sb::ops
