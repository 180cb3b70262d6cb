// The fused operations on the output of each head: the remainder bias (paper eq. 14) and a norm.
//
//   x_j = o_j + P_j r                                       r = 0 without remainder_bias
//   out_j = (x_j - mean) / sqrt(var + eps) * w + c          out_j = x_j without norm_weight; c = 0 without norm_bias
//
// P is the mass. mean and var are over the head_dim channels of a row and head; var divides by head_dim.
#pragma once

#include "core/params.h"

namespace megatron_sb::head_output {

// A vector for each head: (num_heads, head_dim), contiguous, of any floating type. Null: absent.
template <class Pointer>
struct HeadVectors {
    Pointer data = nullptr;
    Dtype dtype = Dtype::kFloat32;
};

// The inputs of both directions. Sums are in fp32.
struct Inputs {
    Dtype dtype;  // of o, out and their gradients; not kFloat64
    int32_t batch, rows, num_heads;
    int32_t head_dim;             // a multiple of kHeadDimMultiple, at most kMaxHeadDim
    float eps;                    // a positive normal number in fp32
    Rows<const void*> o;          // rows begin at multiples of 16 bytes, as in all tensors of this shape
    const float* mass = nullptr;  // (batch, num_heads, rows), contiguous; required with remainder_bias
    HeadVectors<const void*> remainder_bias, norm_weight, norm_bias;
};

// The gradients. The gradient of each argument that is present is written; d_mass is written with remainder_bias.
struct Gradients {
    Rows<const void*> d_out;  // input
    Rows<void*> d_o;
    float* d_mass = nullptr;
    HeadVectors<void*> d_remainder_bias, d_norm_weight, d_norm_bias;
    void* workspace = nullptr;  // backward_workspace() bytes, aligned to 16
};

// Returns the bytes of workspace that backward() needs.
int64_t backward_workspace(const Inputs& inputs);

// Launch on `stream`, a cudaStream_t. There must be at least one row and head. Throw RuntimeFailure if a launch fails.
void forward(const Inputs& inputs, const Rows<void*>& out, void* stream);
void backward(const Inputs& inputs, const Gradients& gradients, void* stream);

}  // namespace megatron_sb::head_output
