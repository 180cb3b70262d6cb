// The columns that biases, Euclidean logits and forget gates append to q and k (ops/variants.cpp), for 16-bit types on
// every GPU from sm_80 on.
#pragma once

#include "core/params.h"

namespace megatron_sb::extend {

enum class Side : int8_t { kNone, kQuery, kKey };

// x' = [x | number, ones, 0] for queries, [x | ones, number, 0] for keys, and then [gate, 0] with forget gates. The
// number is bias / (scale * unit), and ones are `unit`. Euclidean logits add -|x|^2 / unit to the number and double the
// channels of queries. A number and a gate take kGateParts columns, each of which holds the next 8 bits.
struct Params {
    Dtype dtype;              // of x and x'; kBFloat16 or kFloat16
    Side side;                // kNone: no columns for a number and ones
    bool norms;               // Euclidean logits
    int32_t rows, num_heads;  // rows: of one batch element
    int32_t batch;
    int32_t head_dim;             // of x: a multiple of 8, at most 256
    Rows<const void*> x;          // rows begin at multiples of 16 bytes, as in all tensors here
    const float* bias = nullptr;  // (batch, rows, num_heads), contiguous; null: 0
    const float* gate = nullptr;  // as bias; null: no gates
    float least_gate;             // gates are clamped to [least_gate, 1]
    float unit;
    float largest;  // numbers are clamped to [-largest, largest]
    float scale;    // of the logits
    // Whether eight columns of padding after those of x' fill a sector of 32 bytes. They get zeros: memory takes longer
    // to write a part of a sector.
    bool padded = false;
};

// Launch on `stream`, a cudaStream_t. Throw RuntimeFailure if a launch fails. Do nothing without rows.
// Writes x'.
void forward(const Params& params, const Rows<void*>& extended, void* stream);
// Writes the gradient of x, with Euclidean logits, from x' and its gradient. Params::x is x'. Biases and gates are not
// used.
void backward(const Params& params, const Rows<const void*>& d_extended, const Rows<void*>& d_x, void* stream);

}  // namespace megatron_sb::extend
