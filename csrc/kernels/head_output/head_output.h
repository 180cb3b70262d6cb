// What follows an attention head by head, fused: the remainder bias (paper eq. 14) and a norm of each head.
//
//   x_j = o_j + P_j r                                       r = 0 without remainder_bias
//   out_j = (x_j - mean) / sqrt(var + eps) * w + c          out_j = x_j without norm_weight; c = 0 without norm_bias
//
// P is the mass; mean and var are those of the head_dim channels of a row and head, var over head_dim.
#pragma once

#include "core/params.h"

namespace megatron_sb::head_output {

// A vector for each head: (num_heads, head_dim), contiguous, of any floating type; null: absent.
template <class Pointer>
struct HeadVectors {
    Pointer data = nullptr;
    Dtype dtype = Dtype::kFloat32;
};

// What both directions read. Sums are in fp32.
struct Inputs {
    Dtype dtype;  // of o, out and their gradients; not kFloat64
    int32_t batch, rows, num_heads;
    int32_t head_dim;             // a multiple of 8 up to 256
    float eps;                    // a normal number above 0
    Rows<const void*> o;          // rows begin at multiples of 16 bytes, as in all tensors of its shape
    const float* mass = nullptr;  // (batch, num_heads, rows), contiguous; needed with remainder_bias
    HeadVectors<const void*> remainder_bias, norm_weight, norm_bias;
};

// Written where the value itself is there; d_mass with remainder_bias.
struct Gradients {
    Rows<const void*> d_out;  // read
    Rows<void*> d_o;
    float* d_mass = nullptr;
    HeadVectors<void*> d_remainder_bias, d_norm_weight, d_norm_bias;
    void* workspace = nullptr;  // backward_workspace() bytes, aligned to 16
};

int64_t backward_workspace(const Inputs& inputs);

// On `stream`, a cudaStream_t; batch * rows is from 1 to 2^31 - 1. Throws RuntimeFailure if a launch fails.
void forward(const Inputs& inputs, const Rows<void*>& out, void* stream);
void backward(const Inputs& inputs, const Gradients& gradients, void* stream);

}  // namespace megatron_sb::head_output
