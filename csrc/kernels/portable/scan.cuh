// Along the keys of a tile, in registers: from logits to weights, and from those to the gradient of the logits.
//
// A thread holds rows 0, 1 (g and g + 8) of kTiles blocks of 16 rows, and of each row kKeys = 2 kBlocks neighbouring
// keys, oldest first; the quad of lanes 4g .. 4g + 3 holds a row's keys, lane t = 0 the oldest. Key k of row r is
// x[m][k / 2][2 r + k % 2]. With e = exp(z), for neighbouring keys, P the mass:
//
//     A_k = e_k P_k,   P_(k+1) = P_k + A_k        P_k: mass at the older side of key k; upwards there is no division
//
// A row's mass at the older side of a thread's keys is the mass at the newer edge of the tile over prod (1 + e). That
// product is kept less 1, as a `rise`, and what a tile takes from the mass is P rise / (1 + rise): numbers next to 1,
// and their reciprocals, lie on a coarse grid, and errors there add up over the tiles.
#pragma once

#include "kernels/portable/ptx.cuh"
#include "kernels/portable/scalars.h"

namespace megatron_sb::portable {

// Above this a thread's rise goes key by key (also where it is NaN); the rise of a quad of lanes is then finite.
inline constexpr float kLargestRise = 0x1p30f;

template <int kBlocks>
__device__ inline float& at(float (&x)[kBlocks][4], int row, int key) {
    return x[key / 2][2 * row + key % 2];
}

// prod (1 + e) - 1 of two runs together.
__device__ inline float join(float a, float b) {
    return fmaf(a, b, a + b);
}

// Of all lanes of a quad of lanes; the same bits in each.
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
}
__device__ inline float quad_join(float rise) {
    rise = join(rise, __shfl_xor_sync(kAllLanes, rise, 1));
    return join(rise, __shfl_xor_sync(kAllLanes, rise, 2));
}

// How many of this thread's keys each of its rows sees.
template <int kTiles>
using Limits = int[kTiles][2];

template <int kTiles, int kBlocks>
__device__ inline void fill_hidden(float (&x)[kTiles][kBlocks][4], const Limits<kTiles>& limit, float value) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int k = 0; k < 2 * kBlocks; ++k)
                if (k >= limit[m][r]) at(x[m], r, k) = value;
}

template <int kTiles, int kBlocks>
struct Rises {
    float before[kTiles][2][kBlocks / 2];  // over this thread's keys older than each of its quads of keys
    float all[kTiles][2];                  // over this thread's keys
};

// z -> e, with the rises.
template <int kTiles, int kBlocks>
__device__ inline void exponentials(float (&x)[kTiles][kBlocks][4], float scale_log2e, Rises<kTiles, kBlocks>& rises) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float all = 0.f;
#pragma unroll
            for (int quad = 0; quad < kBlocks / 2; ++quad) {
                float e[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    float& z = at(x[m], r, 4 * quad + k);
                    e[k] = z = exp2_approximate(z * scale_log2e);
                }
                const float rise = join(join(e[0], e[1]), join(e[2], e[3]));
                rises.before[m][r][quad] = all;
                all = quad == 0 ? rise : join(all, rise);
            }
            rises.all[m][r] = all;
        }
}

// For rows whose e may be anything: one reciprocal a key, from the newest on.
template <int kTiles, int kBlocks, class Sink>
__device__ inline void weights_key_by_key(float (&e)[kTiles][kBlocks][4], float (&mass)[kTiles][2], Sink sink) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float product = 1.f;
#pragma unroll
            for (int k = 2 * kBlocks - 1; k >= 0; --k) {
                at(e[m], r, k) = min_nan(at(e[m], r, k), kLargestE);
                product *= reciprocal(1.f + at(e[m], r, k));
            }
            const float other = __shfl_xor_sync(kAllLanes, product, 1), two = product * other;
            const float others = __shfl_xor_sync(kAllLanes, two, 2);
            float p = mass[m][r] * (t & 1 ? 1.f : other) * (t & 2 ? 1.f : others);
            mass[m][r] *= two * others;
#pragma unroll
            for (int n = kBlocks - 1; n >= 0; --n) {
                float a[2];
#pragma unroll
                for (int c = 1; c >= 0; --c) {
                    const float e_k = at(e[m], r, 2 * n + c), one_minus_beta = reciprocal(1.f + e_k);
                    a[c] = p * (e_k * one_minus_beta);
                    p *= one_minus_beta;
                }
                sink(m, r, n, a[0], a[1]);
            }
        }
}

// Calls sink(m, r, n, A of key 2n, A of key 2n + 1) for all keys. `mass` goes from the newer edge of the tile to the
// older one. True where keys went one by one; e is then at most kLargestE.
template <int kTiles, int kBlocks, class Sink>
__device__ inline bool weights(float (&e)[kTiles][kBlocks][4], const Rises<kTiles, kBlocks>& rises,
                               float (&mass)[kTiles][2], Sink sink) {
    const int t = threadIdx.x % 4;
    bool saturated = false;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) saturated |= !(rises.all[m][r] <= kLargestRise);
    if (__any_sync(kAllLanes, saturated)) {
        weights_key_by_key(e, mass, sink);
        return true;
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float one = rises.all[m][r], two = join(one, __shfl_xor_sync(kAllLanes, one, 1));
            const float others = __shfl_xor_sync(kAllLanes, two, 2), four = join(two, others);
            const float newer = t & 1 ? one : two;  // over this thread's keys and all newer ones
            const float oldest = mass[m][r] * reciprocal(1.f + (t & 2 ? newer : join(newer, others)));
            const float keep = reciprocal(1.f + four);
            mass[m][r] = four < 1.f ? fmaf(-mass[m][r], four * keep, mass[m][r]) : mass[m][r] * keep;
#pragma unroll
            for (int quad = 0; quad < kBlocks / 2; ++quad) {
                float p = quad == 0 ? oldest : fmaf(oldest, rises.before[m][r][quad], oldest);
                float a[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    a[k] = at(e[m], r, 4 * quad + k) * p;
                    p += a[k];
                }
                sink(m, r, 2 * quad, a[0], a[1]);
                sink(m, r, 2 * quad + 1, a[2], a[3]);
            }
        }
    return false;
}

// g -> dz = (1 - beta) g - beta b in place. `prefix`, the sum of g over older keys, goes from the older edge of the
// tile to the newer one. `key_by_key` where weights() went key by key.
template <int kTiles, int kBlocks>
__device__ inline void logit_gradients(const float (&e)[kTiles][kBlocks][4], float (&g)[kTiles][kBlocks][4],
                                       float (&prefix)[kTiles][2], bool key_by_key) {
    constexpr int kQuads = kBlocks / 2;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float b[kQuads], sum = 0.f;  // b: at the older side of each quad of keys
#pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) {
                b[quad] = sum;
                sum += (g[m][2 * quad][2 * r] + g[m][2 * quad][2 * r + 1]) +
                       (g[m][2 * quad + 1][2 * r] + g[m][2 * quad + 1][2 * r + 1]);
            }
            const float other = __shfl_xor_sync(kAllLanes, sum, 1), two = sum + other;
            const float others = __shfl_xor_sync(kAllLanes, two, 2);
            const float oldest = prefix[m][r] + ((t & 1 ? other : 0.f) + (t & 2 ? others : 0.f));
            prefix[m][r] += two + others;
#pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) b[quad] += oldest;
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) {
                float& b_n = b[n / 2];
                const float e0 = e[m][n][2 * r], e1 = e[m][n][2 * r + 1];
                float &g0 = g[m][n][2 * r], &g1 = g[m][n][2 * r + 1];
                const float b0 = b_n, b1 = b0 + g0;
                b_n = b1 + g1;
                if (key_by_key) {
                    const float keep0 = reciprocal(1.f + e0), keep1 = reciprocal(1.f + e1);
                    g0 = keep0 * g0 - (e0 * keep0) * b0;
                    g1 = keep1 * g1 - (e1 * keep1) * b1;
                } else {  // one reciprocal for two keys: 1 - beta_0 = (1 + e1) / ((1 + e0)(1 + e1))
                    const float keep = reciprocal(fmaf(1.f + e0, e1, 1.f + e0));
                    const float u0 = fmaf(-e0, b0, g0) * keep, u1 = fmaf(-e1, b1, g1) * keep;
                    g0 = fmaf(u0, e1, u0);
                    g1 = fmaf(u1, e0, u1);
                }
            }
        }
}

}  // namespace megatron_sb::portable
