// From scores to weights in the registers of one thread: rows r = 0 and 1 of a tile, 32 neighbouring keys of each.
//
//   e = 2^(scale log2(e) q . k)      A_k = e_k * (mass after key k)      mass after k = mass before k / (1 + e_k)
//
// One reciprocal serves a thread's keys of a row. With t the product of their (1 + e) and P the mass
// accumulator_register their newer edge, m = P/t is the mass accumulator_register their older edge, and going to newer
// keys A = e m, m += A (always e * m: differences of masses lose the small weights). The 1/t of a quad of threads,
// which share a row, are joined by two shuffles.
#pragma once

#include <cstdint>

#include "kernels/common/scalars.h"
#include "kernels/hopper/ptx.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

using portable::kLargestE;

constexpr int kForwardKeysPerThread = 32;  // of one row in a tile of 128 keys
constexpr float kMinProduct = 0x1p-96f;    // below, 1/t and P/t may leave the normal numbers: key by key then

struct RowState {
    float mass[2];          // accumulator_register the newer edge of the next tile
    float restart_mass[2];  // accumulator_register the newer edge of this thread's keys, in the last tile where that
                            // was not too small
    int restart_tile[2];    // that tile; -1: none
};

class ForwardScan {
  public:
    __device__ __forceinline__ ForwardScan(float (&scores)[64], float scale_log2, int thread_in_quad, float floor,
                                           int tile, RowState& rows)
        : s_(scores), scale_log2_(scale_log2), t_(thread_in_quad), restart_floor_(floor), tile_(tile), rows_(rows) {}

    // Scores become weights; the mass moves on to the tile's older edge. Row 1's exponentials stand beside row 0's
    // multiplications, so that both pipes have work.
    __device__ __forceinline__ void run() {
        float t = 1.f;
#pragma unroll
        for (int k = 0; k < kForwardKeysPerThread; ++k) exponential(0, k, t);
        float inverse = reciprocal(t);
        t = 1.f;
        if (saturated(inverse)) {
            scan_key_by_key(0);
#pragma unroll
            for (int k = 0; k < kForwardKeysPerThread; ++k) exponential(1, k, t);
        } else {
            float m = mass_at_newer_edge(0, inverse) * inverse;
#pragma unroll
            for (int k = 0; k < kForwardKeysPerThread; ++k) {
                exponential(1, k, t);
                weight(0, k, m);
            }
        }
        inverse = reciprocal(t);
        if (saturated(inverse)) {
            scan_key_by_key(1);
        } else {
            float m = mass_at_newer_edge(1, inverse) * inverse;
#pragma unroll
            for (int k = 0; k < kForwardKeysPerThread; ++k) weight(1, k, m);
        }
    }

  private:
    // A score becomes e; t is the product of 1 + e over the keys so far, the oldest first.
    __device__ __forceinline__ void exponential(int r, int k, float& t) {
        const float e = exp2_approximate(s_[accumulator_register(r, k)] * scale_log2_);
        s_[accumulator_register(r, k)] = e;
        t = fmaf(t, e, t);
    }
    // An e becomes A; m goes from the mass after this key to that before it.
    __device__ __forceinline__ void weight(int r, int k, float& m) {
        const float e = s_[accumulator_register(r, k)];
        s_[accumulator_register(r, k)] = e * m;
        m = fmaf(m, e, m);
    }

    // True for the whole warp where some thread's product of 1 - beta is too small to go up from, or NaN.
    __device__ __forceinline__ static bool saturated(float product) {
        return __any_sync(~0u, !(product > kMinProduct));
    }

    // e are here already. No clamp but that of kLargestE: the mass of a restart has to come from the same e as the
    // masses of the backward.
    __device__ __forceinline__ void scan_key_by_key(int r) {
        float product = 1.f;
#pragma unroll
        for (int k = kForwardKeysPerThread - 1; k >= 0; --k) {
            const float e = min_nan(s_[accumulator_register(r, k)], kLargestE), inverse = reciprocal(1.f + e);
            s_[accumulator_register(r, k)] = product * (e * inverse);
            product *= inverse;
        }
        const float p = mass_at_newer_edge(r, product);
#pragma unroll
        for (int k = 0; k < kForwardKeysPerThread; ++k) s_[accumulator_register(r, k)] *= p;
    }

    // P for this thread's newest key, given the product over its keys; notes a restart; moves the row's mass on.
    __device__ __forceinline__ float mass_at_newer_edge(int r, float product) {
        const float beside = __shfl_xor_sync(~0u, product, 1), pair = product * beside;
        const float other_pair = __shfl_xor_sync(~0u, pair, 2);
        const float p = rows_.mass[r] * ((t_ & 1) ? 1.f : beside) * ((t_ & 2) ? 1.f : other_pair);
        rows_.mass[r] *= pair * other_pair;
        const bool live = p >= restart_floor_;
        rows_.restart_mass[r] = live ? p : rows_.restart_mass[r];
        rows_.restart_tile[r] = live ? tile_ : rows_.restart_tile[r];
        return p;
    }

    float (&s_)[64];
    const float scale_log2_;
    const int t_;
    const float restart_floor_;
    const int tile_;
    RowState& rows_;
};

}  // namespace megatron_sb::hopper
