// The scan of the forward: from scores to weights in the registers of one thread. A thread holds rows r = 0 and 1 of a
// tile and kKeys neighbouring keys of each: 32 of a tile of 128, or 16 of a tile of 64.
//
//     e_k = 2^(scale log2(e) q . k + offset)     P_after_k = P_before_k / (1 + e_k)     A_k = e_k P_after_k
//
// "Before" is the newer side of a key and "after" its older side. One reciprocal serves the kKeys keys of a row. Let t
// be the product of their (1 + e) and P the mass at their newer edge. The mass at their older edge is m = P / t. From
// there towards newer keys, each key takes A = e m, and then m += A. Always compute the weight as e * m: a difference
// of masses would lose small weights. The four threads of a quad share a row; two shuffles join their products 1 / t.
#pragma once

#include <cstdint>

#include "kernels/common/scalars.h"
#include "kernels/hopper/ptx.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

using common::HeadLogits;
using common::kLargestE;

// If 1 / t is below this, 1 / t or P / t may be too small for a normal number. The warp then scans key by key.
constexpr float kMinProduct = 0x1p-96f;

struct RowState {
    float mass[2];          // mass at the newer edge of the next tile
    float restart_mass[2];  // mass at the newer edge of this thread's keys in tile restart_tile[r]
    int restart_tile[2];    // oldest tile so far in which that mass was at least restart_floor; -1 if none
};

template <int kKeys>
class ForwardScan {
  public:
    __device__ __forceinline__ ForwardScan(float (&scores)[2 * kKeys], const HeadLogits& logits, int thread_in_quad,
                                           float floor, int tile, RowState& rows)
        : s_(scores), logits_(logits), thread_(thread_in_quad), restart_floor_(floor), tile_(tile), rows_(rows) {}

    // Replaces scores by weights and moves the mass to the older edge of the tile. The exponentials of row 1 are
    // interleaved with the multiplications of row 0, so that the MUFU and FMA pipes both have work.
    __device__ __forceinline__ void run() {
        float t = 1.f;
#pragma unroll
        for (int k = 0; k < kKeys; ++k) exponential(0, k, t);
        float inverse = reciprocal(t);
        t = 1.f;
        if (saturated(inverse)) {
            scan_key_by_key(0);
#pragma unroll
            for (int k = 0; k < kKeys; ++k) exponential(1, k, t);
        } else {
            float m = mass_at_newer_edge(0, inverse) * inverse;
#pragma unroll
            for (int k = 0; k < kKeys; ++k) {
                exponential(1, k, t);
                weight(0, k, m);
            }
        }
        inverse = reciprocal(t);
        if (saturated(inverse)) return scan_key_by_key(1);
        float m = mass_at_newer_edge(1, inverse) * inverse;
#pragma unroll
        for (int k = 0; k < kKeys; ++k) weight(1, k, m);
    }

  private:
    // Replaces e by A, and m, the mass after this key, by the mass before it.
    __device__ __forceinline__ void weight(int r, int k, float& m) {
        const float e = s_[accumulator_register(r, k)];
        s_[accumulator_register(r, k)] = e * m;
        m = fmaf(m, e, m);
    }

  protected:
    // Replaces a score by e. t accumulates the product of 1 + e, from the oldest key on.
    __device__ __forceinline__ void exponential(int r, int k, float& t) {
        const float e = exp2_approximate(logits_(s_[accumulator_register(r, k)], 0, r));
        s_[accumulator_register(r, k)] = e;
        t = fmaf(t, e, t);
    }

    // Whether any thread of the warp has a product of 1 - beta that is NaN or too small for the fast scan.
    __device__ __forceinline__ static bool saturated(float product) {
        return __any_sync(~0u, !(product > kMinProduct));
    }

    // Replaces e by A, one key after another. The only clamp is kLargestE: the backward must derive its masses from the
    // same e as the mass of a restart record.
    __device__ __forceinline__ void scan_key_by_key(int r) {
        float product = 1.f;
#pragma unroll
        for (int k = kKeys - 1; k >= 0; --k) {
            const float e = min_nan(s_[accumulator_register(r, k)], kLargestE), inverse = reciprocal(1.f + e);
            s_[accumulator_register(r, k)] = product * (e * inverse);
            product *= inverse;
        }
        const float p = mass_at_newer_edge(r, product);
#pragma unroll
        for (int k = 0; k < kKeys; ++k) s_[accumulator_register(r, k)] *= p;
    }

    // Returns the mass at the newer edge of this thread's keys, given the product of 1 - beta over them. If the mass is
    // large enough, records it as the restart of the row. Moves the mass of the row to the older edge of the tile.
    __device__ __forceinline__ float mass_at_newer_edge(int r, float product) {
        const float neighbour = __shfl_xor_sync(~0u, product, 1), pair = product * neighbour;
        const float other_pair = __shfl_xor_sync(~0u, pair, 2);
        const float p = rows_.mass[r] * ((thread_ & 1) ? 1.f : neighbour) * ((thread_ & 2) ? 1.f : other_pair);
        rows_.mass[r] *= pair * other_pair;
        const bool live = p >= restart_floor_;
        rows_.restart_mass[r] = live ? p : rows_.restart_mass[r];
        rows_.restart_tile[r] = live ? tile_ : rows_.restart_tile[r];
        return p;
    }

    float (&s_)[2 * kKeys];
    const HeadLogits logits_;
    const int thread_;
    const float restart_floor_;
    const int tile_;
    RowState& rows_;
};

}  // namespace megatron_sb::hopper
