// From scores to weights in the registers of one thread: rows r = 0 and 1 of a tile, 32 neighbouring keys of each.
//
//   e = 2^(scale log2(e) q . k)      A_k = e_k * (mass after key k)      mass after k = mass before k / (1 + e_k)
//
// One reciprocal serves a thread's keys of a row. With t the product of their (1 + e) and P the mass at their newer
// edge, m = P/t is the mass at their older edge, and going to newer keys A = e m, m += A (always e * m: differences of
// masses lose the small weights). The 1/t of a quad of threads, which share a row, are joined by two shuffles.
#pragma once

#include <cstdint>

#include "kernels/common/scalars.h"
#include "kernels/hopper/ptx.cuh"

namespace megatron_sb::hopper {

using portable::kLargestE;

constexpr int kKeysPerThread = 32;         // of one row in a tile of 128 keys
constexpr float kLeastProduct = 0x1p-96f;  // below, 1/t and P/t may leave the normal numbers: key by key then

// The accumulator register of key k (0 the oldest) of row r.
__device__ __forceinline__ constexpr int at(int r, int k) {
    return 4 * (k / 2) + 2 * r + k % 2;
}

struct RowPair {
    float mass[2];          // at the newer edge of the next tile
    float restart_mass[2];  // at the newer edge of this thread's keys, in the last tile where that was not too small
    int restart_tile[2];    // that tile; -1: none
};

class Scan {
  public:
    __device__ __forceinline__ Scan(float (&scores)[64], float scale_log2, int thread_in_quad, float floor, int tile,
                                    RowPair& rows)
        : s_(scores), scale_log2_(scale_log2), t_(thread_in_quad), floor_(floor), tile_(tile), rows_(rows) {}

    // Scores become weights; the mass moves on to the tile's older edge. Row 1's exponentials stand beside row 0's
    // multiplications, so that both pipes have work.
    __device__ __forceinline__ void run() {
        float t = 1.f;
#pragma unroll
        for (int k = 0; k < kKeysPerThread; ++k) exponential(0, k, t);
        float inverse = reciprocal(t);
        t = 1.f;
        if (saturated(inverse)) {
            key_by_key(0);
#pragma unroll
            for (int k = 0; k < kKeysPerThread; ++k) exponential(1, k, t);
        } else {
            float m = mass_at_newer_edge(0, inverse) * inverse;
#pragma unroll
            for (int k = 0; k < kKeysPerThread; ++k) {
                exponential(1, k, t);
                weight(0, k, m);
            }
        }
        inverse = reciprocal(t);
        if (saturated(inverse)) {
            key_by_key(1);
        } else {
            float m = mass_at_newer_edge(1, inverse) * inverse;
#pragma unroll
            for (int k = 0; k < kKeysPerThread; ++k) weight(1, k, m);
        }
    }

  private:
    // A score becomes e; t is the product of 1 + e over the keys so far, the oldest first.
    __device__ __forceinline__ void exponential(int r, int k, float& t) {
        const float e = exp2_approximate(s_[at(r, k)] * scale_log2_);
        s_[at(r, k)] = e;
        t = fmaf(t, e, t);
    }
    // An e becomes A; m goes from the mass after this key to that before it.
    __device__ __forceinline__ void weight(int r, int k, float& m) {
        const float e = s_[at(r, k)];
        s_[at(r, k)] = e * m;
        m = fmaf(m, e, m);
    }

    // True for the whole warp where some thread's product of 1 - beta is too small to go up from, or NaN.
    __device__ __forceinline__ static bool saturated(float product) {
        return __any_sync(~0u, !(product > kLeastProduct));
    }

    // e are here already. No clamp but that of kLargestE: the mass of a restart has to come from the same e as the
    // masses of the backward.
    __device__ __forceinline__ void key_by_key(int r) {
        float product = 1.f;
#pragma unroll
        for (int k = kKeysPerThread - 1; k >= 0; --k) {
            const float e = min_nan(s_[at(r, k)], kLargestE), inverse = reciprocal(1.f + e);
            s_[at(r, k)] = product * (e * inverse);
            product *= inverse;
        }
        const float p = mass_at_newer_edge(r, product);
#pragma unroll
        for (int k = 0; k < kKeysPerThread; ++k) s_[at(r, k)] *= p;
    }

    // P for this thread's newest key, given the product over its keys; notes a restart; moves the row's mass on.
    __device__ __forceinline__ float mass_at_newer_edge(int r, float product) {
        const float beside = __shfl_xor_sync(~0u, product, 1), pair = product * beside;
        const float other_pair = __shfl_xor_sync(~0u, pair, 2);
        const float p = rows_.mass[r] * ((t_ & 1) ? 1.f : beside) * ((t_ & 2) ? 1.f : other_pair);
        rows_.mass[r] *= pair * other_pair;
        const bool live = p >= floor_;
        rows_.restart_mass[r] = live ? p : rows_.restart_mass[r];
        rows_.restart_tile[r] = live ? tile_ : rows_.restart_tile[r];
        return p;
    }

    float (&s_)[64];
    const float scale_log2_;
    const int t_;
    const float floor_;
    const int tile_;
    RowPair& rows_;
};

}  // namespace megatron_sb::hopper
