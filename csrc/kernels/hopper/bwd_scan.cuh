// The scans of the backward: from scores to weights A and logit gradients dz, in the registers of one thread. A thread
// holds rows r = 0 and 1 of a step and 16 neighbouring keys of each; a quad of threads holds the 64 keys of a half
// tile.
//
//     e = 2^(scale log2(e) q . k)   A = e m   g = A (dO . v)   dz = (g - e b) / (1 + e)   m' = m (1 + e)   b' = b + g
//
// m is the mass at the older edge of a key, and b the prefix there (the sum of g over all older keys, plus P dP). m'
// and b' are the values at its newer edge.
//
// FastScan needs rows that have started in older keys. It computes masses from the older edge of the half tile to the
// newer one. No product of (1 + e) exceeds 2^64, because the mass rises from at least 2^-64 to at most 1.
// SlowScan also serves rows that start in this half tile, in newer keys, or never. It computes masses key by key from
// the newer edge, with e up to 2^126.
// Call the functions in this order: exponentials, start, weights, prefixes, logit_gradients.
#pragma once

#include "kernels/common/scalars.h"
#include "kernels/hopper/bwd_traits.h"
#include "kernels/hopper/ptx.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

constexpr int kChains = 4;  // a thread scans its keys as independent chains of four neighbouring keys

// Product or sum of one value x of each thread of a quad: over the threads with older keys, over those with newer keys,
// and over all four. Thread t = 0 has the oldest keys. add_over_quad does not compute `newer`.
struct QuadScan {
    float older, newer, all;
};
template <class Multiply>
__device__ __forceinline__ QuadScan multiply_over_quad(float x, int t, const Multiply& multiply) {
    const float neighbour = __shfl_xor_sync(~0u, x, 1), pair = multiply(x, neighbour);
    const float other = __shfl_xor_sync(~0u, pair, 2);
    return {multiply((t & 1) ? neighbour : 1.f, (t & 2) ? other : 1.f),
            multiply((t & 1) ? 1.f : neighbour, (t & 2) ? 1.f : other), multiply(pair, other)};
}
__device__ __forceinline__ QuadScan add_over_quad(float x, int t) {
    const float neighbour = __shfl_xor_sync(~0u, x, 1), pair = x + neighbour, other = __shfl_xor_sync(~0u, pair, 2);
    return {((t & 1) ? neighbour : 0.f) + ((t & 2) ? other : 0.f), 0.f, pair + other};
}

// Products of two numbers from 1 to 2, rounded without bias. With ordinary rounding, the mass would drift over many
// keys: (1 + a)(1 + b) with a and b on the grid of 2^-23 loses a b, always, if that is below half the grid. Here an
// offset from [0, 2^-23) is added before the result is rounded down. If the offsets of the key tiles fill this interval
// evenly, the mean of the rounded products is the exact product. A product by exactly 1 changes nothing. The offset
// depends only on the place of the key, so that results are repeatable.
class UnbiasedProduct {
  public:
    // Multiples of 2^32 / golden ratio, modulo 2^32, fill the interval evenly.
    __device__ __forceinline__ static float offset_of(int number) {
        const uint32_t fraction = uint32_t(number) * 0x9e3779b1u;
        return __uint_as_float(__float_as_uint(0x1p-23f) | fraction >> 9) - 0x1p-23f;
    }
    __device__ __forceinline__ explicit UnbiasedProduct(float offset) : offset_(offset) {}
    __device__ __forceinline__ float operator()(float x, float y) const { return __fmaf_rd(x, y, offset_); }

  private:
    const float offset_;
};

class FastScan {
  public:
    __device__ __forceinline__ explicit FastScan(float product_offset) : multiply_(product_offset) {}

    // Replaces scores by e. Runs before the carries are known.
    __device__ __forceinline__ void exponentials(float (&s)[32], float scale_log2, int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k)
                s[accumulator_register(r, k)] = exp2_approximate(s[accumulator_register(r, k)] * scale_log2);
            const auto e = [&](int c, int k) { return s[accumulator_register(r, 4 * c + k)]; };
            float x[kChains], y[kChains];
#pragma unroll
            for (int c = 0; c < kChains; ++c) x[c] = 1.f + e(c, 0), y[c] = 1.f + e(c, 2);
#pragma unroll
            for (int c = 0; c < kChains; ++c) x[c] = fmaf(x[c], e(c, 1), x[c]), y[c] = fmaf(y[c], e(c, 3), y[c]);
#pragma unroll
            for (int c = 0; c < kChains; ++c) product_[r][c] = multiply_(x[c], y[c]);
            float(&p)[kChains] = product_[r];
            p[1] = multiply_(p[1], p[0]), p[3] = multiply_(p[3], p[2]);
            p[2] = multiply_(p[2], p[1]), p[3] = multiply_(p[3], p[1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuadScan over = multiply_over_quad(product_[r][kChains - 1], t, multiply_);
            mass_[r] = over.older;
            newer_mass[r] = over.all;
        }
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
        float m[kChains], a[2][kChains];
        m[0] = mass_[r];
#pragma unroll
        for (int c = 1; c < kChains; ++c) m[c] = mass_[r] * product_[r][c - 1];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int c = 0; c < kChains; ++c) {
                const int i = accumulator_register(r, 4 * c + k);
                a[k % 2][c] = s[i] * m[c];
                if (k < 3) m[c] = fmaf(s[i], m[c], m[c]);
                dp[i] *= a[k % 2][c];
            }
            if (k % 2 == 0) continue;
#pragma unroll
            for (int c = 0; c < kChains; ++c) {
                packed[2 * c + k / 2] = pack<Element>(kScale * a[0][c], kScale * a[1][c]);
                const float sum = dp[accumulator_register(r, 4 * c + k - 1)] + dp[accumulator_register(r, 4 * c + k)];
                sum_[r][c] = k == 1 ? sum : sum_[r][c] + sum;
            }
        }
        sum_[r][1] += sum_[r][0], sum_[r][3] += sum_[r][2], sum_[r][2] += sum_[r][1], sum_[r][3] += sum_[r][1];
    }
    __device__ __forceinline__ void prefixes(int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuadScan over = add_over_quad(sum_[r][kChains - 1], t);
            newer_prefix[r] = prefix_[r] + over.all;
            prefix_[r] += over.older;
        }
    }

    // Packs dz of row r. One reciprocal serves two keys.
    template <class Element>
    __device__ __forceinline__ void logit_gradients(int r, const float (&s)[32], const float (&g)[32],
                                                    uint32_t (&packed)[8]) const {
        float b[kChains];
        b[0] = prefix_[r];
#pragma unroll
        for (int c = 1; c < kChains; ++c) b[c] = prefix_[r] + sum_[r][c - 1];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair)
#pragma unroll
            for (int c = 0; c < kChains; ++c) {
                const int i = accumulator_register(r, 4 * c + 2 * pair),
                          j = accumulator_register(r, 4 * c + 2 * pair + 1);
                const float one = 1.f + s[i], inverse = reciprocal(fmaf(one, s[j], one));
                const float older = fmaf(-s[i], b[c], g[i]) * inverse;
                b[c] += g[i];
                const float newer = fmaf(-s[j], b[c], g[j]) * inverse;
                b[c] += g[j];
                packed[2 * c + pair] = pack<Element>(fmaf(older, s[j], older), fmaf(newer, s[i], newer));
            }
    }

    float newer_mass[2], newer_prefix[2];  // at the newer edge of the half tile

  private:
    const UnbiasedProduct multiply_;
    float product_[2][kChains];  // products of 1 + e, from the oldest key of this thread to the end of each chain
    float sum_[2][kChains];      // sums of g over the same keys
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
            const QuadScan over = multiply_over_quad(product[r], t, [](float x, float y) { return x * y; });
            mass_[r] = over.newer;
            newer_mass[r] = over.all;  // the product of 1 - beta; start() turns it into the mass
        }
    }
    // Whether row r starts only in newer keys and has a NaN score in this half.
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
        if (!started_[r]) {  // the row starts in newer keys: A and g are 0, even if its scores or dP are NaN
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
    // Makes the compiler compute the reciprocals again instead of keeping them: there are not enough registers.
    __device__ __forceinline__ static void prevent_reuse(float (&s)[32]) {
#pragma unroll
        for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(s[i]));
    }

    const int half_;
    float mass_[2], prefix_[2], sum_[2];
    bool started_[2], unstarted_nan_[2];
};

}  // namespace megatron_sb::hopper
