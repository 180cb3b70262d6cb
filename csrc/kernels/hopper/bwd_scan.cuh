// The scans of the backward: from scores to weights A and logit gradients dz, in the registers of one thread. A thread
// holds rows r = 0 and 1 of a step and 16 neighbouring keys of each; a quad of threads holds the 64 keys of a half
// tile.
//
//     e = 2^(scale log2(e) q . k)   A = e m   g = A (dO . v)   dz = (g - e b) / (1 + e)   m' = m (1 + e)   b' = b + g
//
// m is the mass at a key's older edge, b is the sum of g over all older keys; m' and b' are the values at its newer
// edge.
//
// FastScan starts from the mass at the older edge. All rows have started in older keys, so no product of (1 + e)
// exceeds 2^64.
// SlowScan handles rows that may start in this half tile. It runs key by key from the newer edge, with e up to 2^126.
// Both are called in this order: exponentials, start, weights, prefixes, logit_gradients.
#pragma once

#include "kernels/common/scalars.h"
#include "kernels/hopper/bwd_traits.h"
#include "kernels/hopper/ptx.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

constexpr int kBackwardKeysPerThread = 16;  // keys of one row that a thread holds
constexpr int kQuads = 4;                   // groups of four neighbouring keys, scanned as independent chains

// A scan over the threads of a quad. Thread 0 has the oldest keys. `older` and `newer` join the values of the threads
// with older and newer keys, `all` those of the whole quad.
struct QuadScan {
    float older, newer, all;
};
__device__ __forceinline__ QuadScan multiply_over_quad(float x, int t) {
    const float beside = __shfl_xor_sync(~0u, x, 1), pair = x * beside, other = __shfl_xor_sync(~0u, pair, 2);
    return {((t & 1) ? beside : 1.f) * ((t & 2) ? other : 1.f), ((t & 1) ? 1.f : beside) * ((t & 2) ? 1.f : other),
            pair * other};
}
__device__ __forceinline__ QuadScan add_over_quad(float x, int t) {
    const float beside = __shfl_xor_sync(~0u, x, 1), pair = x + beside, other = __shfl_xor_sync(~0u, pair, 2);
    return {((t & 1) ? beside : 0.f) + ((t & 2) ? other : 0.f), 0.f, pair + other};
}

class FastScan {
  public:
    // Replaces scores by e. Does not need the carries.
    __device__ __forceinline__ void exponentials(float (&s)[32], float scale_log2, int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k)
                s[accumulator_register(r, k)] = exp2_approximate(s[accumulator_register(r, k)] * scale_log2);
            const auto e = [&](int q, int k) { return s[accumulator_register(r, 4 * q + k)]; };
            float x[kQuads], y[kQuads];
#pragma unroll
            for (int q = 0; q < kQuads; ++q) x[q] = 1.f + e(q, 0), y[q] = 1.f + e(q, 2);
#pragma unroll
            for (int q = 0; q < kQuads; ++q) x[q] = fmaf(x[q], e(q, 1), x[q]), y[q] = fmaf(y[q], e(q, 3), y[q]);
#pragma unroll
            for (int q = 0; q < kQuads; ++q) product_[r][q] = x[q] * y[q];
            product_[r][1] *= product_[r][0], product_[r][3] *= product_[r][2], product_[r][2] *= product_[r][1],
                product_[r][3] *= product_[r][1];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuadScan over = multiply_over_quad(product_[r][kQuads - 1], t);
            mass_[r] = over.older;
            newer_mass[r] = over.all;
        }
    }
    // Whether row r contains a NaN here although it starts only in newer keys.
    __device__ __forceinline__ static constexpr bool has_unstarted_nan(int) {
        return false;
    }
    __device__ __forceinline__ void start(int r, const Carry& carry) {
        mass_[r] *= carry.mass;
        newer_mass[r] *= carry.mass;
        prefix_[r] = carry.prefix;
    }

    // Replaces dp by g and packs the weights of row r.
    template <class Element>
    __device__ __forceinline__ void weights(int r, const float (&s)[32], float (&dp)[32], uint32_t (&packed)[8]) {
        constexpr float kScale = common::kWeightScale<Element>;
        float m[kQuads], a[2][kQuads];
        m[0] = mass_[r];
#pragma unroll
        for (int q = 1; q < kQuads; ++q) m[q] = mass_[r] * product_[r][q - 1];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                const int i = accumulator_register(r, 4 * q + k);
                a[k % 2][q] = s[i] * m[q];
                if (k < 3) m[q] = fmaf(s[i], m[q], m[q]);
                dp[i] *= a[k % 2][q];
            }
            if (k % 2 == 0) continue;
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                packed[2 * q + k / 2] = pack<Element>(kScale * a[0][q], kScale * a[1][q]);
                const float sum = dp[accumulator_register(r, 4 * q + k - 1)] + dp[accumulator_register(r, 4 * q + k)];
                sum_[r][q] = k == 1 ? sum : sum_[r][q] + sum;
            }
        }
        sum_[r][1] += sum_[r][0], sum_[r][3] += sum_[r][2], sum_[r][2] += sum_[r][1], sum_[r][3] += sum_[r][1];
    }
    __device__ __forceinline__ void prefixes(int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuadScan over = add_over_quad(sum_[r][kQuads - 1], t);
            newer_prefix[r] = prefix_[r] + over.all;
            prefix_[r] += over.older;
        }
    }

    // Packs dz of row r. One reciprocal serves two keys.
    template <class Element>
    __device__ __forceinline__ void logit_gradients(int r, const float (&s)[32], const float (&g)[32],
                                                    uint32_t (&packed)[8]) const {
        float b[kQuads];
        b[0] = prefix_[r];
#pragma unroll
        for (int q = 1; q < kQuads; ++q) b[q] = prefix_[r] + sum_[r][q - 1];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair)
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                const int i = accumulator_register(r, 4 * q + 2 * pair),
                          j = accumulator_register(r, 4 * q + 2 * pair + 1);
                const float one = 1.f + s[i], inverse = reciprocal(fmaf(one, s[j], one));
                const float older = fmaf(-s[i], b[q], g[i]) * inverse;
                b[q] += g[i];
                const float newer = fmaf(-s[j], b[q], g[j]) * inverse;
                b[q] += g[j];
                packed[2 * q + pair] = pack<Element>(fmaf(older, s[j], older), fmaf(newer, s[i], newer));
            }
    }

    float newer_mass[2], newer_prefix[2];  // at the newer edge of the half tile

  private:
    float product_[2][kQuads];   // products of 1 + e, from this thread's oldest key to the end of each group of four
    float sum_[2][kQuads];       // sums of g, likewise
    float mass_[2], prefix_[2];  // at the older edge of this thread's keys
};

class SlowScan {
  public:
    __device__ __forceinline__ explicit SlowScan(int half) : half_(half) {}

    __device__ __forceinline__ void exponentials(float (&s)[32], float scale_log2, int t) {
        float product[2] = {1.f, 1.f};
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k) {
                float& x = s[accumulator_register(r, k)];
                x = min_nan(exp2_approximate(x * scale_log2), common::kLargestE);
                product[r] *= reciprocal(1.f + x);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuadScan over = multiply_over_quad(product[r], t);
            mass_[r] = over.newer;
            newer_mass[r] = over.all;  // the product of 1 - beta; start() turns it into the mass
        }
    }
    __device__ __forceinline__ bool has_unstarted_nan(int r) const {
        return unstarted_nan_[r];
    }
    __device__ __forceinline__ void start(int r, const Carry& carry) {
        const bool before = carry.start < half_, here = carry.start == half_;
        started_[r] = before || here;
        unstarted_nan_[r] = !started_[r] && isnan(newer_mass[r]);
        newer_mass[r] = before ? __fdividef(carry.mass, newer_mass[r]) : here ? carry.restart_mass : 0.f;
        mass_[r] *= newer_mass[r];
        prefix_[r] = carry.prefix;
    }
    template <class Element>
    __device__ __forceinline__ void weights(int r, float (&s)[32], float (&dp)[32], uint32_t (&packed)[8]) {
        constexpr float kScale = common::kWeightScale<Element>;
        prevent_reuse(s);
        float newer = 0.f;
        sum_[r] = 0.f;
        if (!started_[r]) {  // the row starts in newer keys: zeros, whatever the row and these keys hold
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k)
                s[accumulator_register(r, k)] = dp[accumulator_register(r, k)] = 0.f;
            mass_[r] = 0.f;
        }
#pragma unroll
        for (int k = kBackwardKeysPerThread - 1; k >= 0; --k) {
            const int i = accumulator_register(r, k);
            const float inverse = reciprocal(1.f + s[i]), a = mass_[r] * (s[i] * inverse);
            mass_[r] *= inverse;
            dp[i] *= a;
            sum_[r] += dp[i];
            if (k % 2 == 1)
                newer = a;
            else
                packed[k / 2] = pack<Element>(kScale * a, kScale * newer);
        }
    }
    __device__ __forceinline__ void prefixes(int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuadScan over = add_over_quad(sum_[r], t);
            newer_prefix[r] = prefix_[r] + over.all;
            prefix_[r] = started_[r] ? prefix_[r] + over.older : 0.f;
        }
    }
    template <class Element>
    __device__ __forceinline__ void logit_gradients(int r, float (&s)[32], const float (&g)[32],
                                                    uint32_t (&packed)[8]) const {
        prevent_reuse(s);
        float b = prefix_[r], older = 0.f;
#pragma unroll
        for (int k = 0; k < kBackwardKeysPerThread; ++k) {
            const int i = accumulator_register(r, k);
            const float inverse = reciprocal(1.f + s[i]), dz = inverse * g[i] - (s[i] * inverse) * b;
            b += g[i];
            if (k % 2 == 0)
                older = dz;
            else
                packed[k / 2] = pack<Element>(older, dz);
        }
    }

    float newer_mass[2], newer_prefix[2];

  private:
    // Makes the compiler compute the reciprocals again. Keeping them costs more registers than there are.
    __device__ __forceinline__ static void prevent_reuse(float (&s)[32]) {
#pragma unroll
        for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(s[i]));
    }

    const int half_;
    float mass_[2], prefix_[2], sum_[2];
    bool started_[2], unstarted_nan_[2];
};

}  // namespace megatron_sb::hopper
