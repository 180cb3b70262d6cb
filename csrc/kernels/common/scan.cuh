// The scan along the keys of a tile, in registers: from logits to weights, and from weights to the gradient of the
// logits.
//
// A thread (lane 4g + t) holds two rows, g and g + 8, of each of kTiles blocks of 16 rows; r = 0, 1 is their index. Of
// each row it holds 2 kBlocks neighbouring keys, oldest first. The four lanes 4g .. 4g + 3 hold the keys of a row; lane
// t = 0 has the oldest. Key k of row r of block m is x[m][k / 2][2 r + k % 2].
//
// With e = exp(z) and P_k the mass at the older side of key k, from older to newer keys without a division:
//
//     A_k = e_k P_k,   P_(k+1) = P_k + A_k
//
// From newer to older keys, the mass is divided by prod (1 + e). The kernels store this product minus 1, as a `rise`,
// and subtract P rise / (1 + rise) from the mass. The reason: numbers next to 1, and their reciprocals, lie on a coarse
// grid, and such errors accumulate over the tiles.
//
// With forget gates all this holds for the gated odds (gates.cuh).
#pragma once

#include "kernels/common/gates.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/scalars.h"

namespace megatron_sb::common {

// If the rise of one thread is larger than this, or NaN, its warp processes keys one by one. Below the bound, the rise
// of four lanes together is finite.
inline constexpr float kLargestRise = 0x1p30f;

template <int kBlocks>
__device__ inline float& at(float (&x)[kBlocks][4], int row, int key) {
    return x[key / 2][2 * row + key % 2];
}

// Returns the rise of two ranges of keys together, from the rise of each: (1 + a) (1 + b) - 1.
__device__ inline float join(float a, float b) {
    return fmaf(a, b, a + b);
}

// The number of this thread's keys that each of its rows sees.
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
    float before[kTiles][2][kBlocks / 2];  // for each quad of this thread's keys: of its keys older than the quad
    float all[kTiles][2];                  // of all keys of this thread
};

// Replaces q . k of four keys by e, or with kOdds by the gated odds, and adds their rise to `rises`. Call it for the
// quads of a row in order, oldest first. logits(q . k, m, r) is the logit of row r of block m, in units of log(2).
template <bool kOdds, int kTiles, int kBlocks, class Gates = NoGates, class Logits>
__device__ inline void exponentials_of_quad(int m, int r, int quad, float (&x)[kTiles][kBlocks][4],
                                            const Logits& logits, Rises<kTiles, kBlocks>& rises,
                                            const typename Gates::Quad& gates) {
    float e[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        float& z = at(x[m], r, 4 * quad + k);
        z = exp2_approximate(logits(z, m, r));
        if constexpr (Gates::kGated) z = min_nan(z, kLargestE);
        e[k] = gates.odds(z, k);
        if constexpr (kOdds) z = e[k];
    }
    const float rise = join(join(e[0], e[1]), join(e[2], e[3]));
    rises.before[m][r][quad] = quad == 0 ? 0.f : rises.all[m][r];
    rises.all[m][r] = quad == 0 ? rise : join(rises.all[m][r], rise);
}
template <bool kOdds, int kTiles, int kBlocks, class Logits, class Gates>
__device__ inline void exponentials(float (&x)[kTiles][kBlocks][4], const Logits& logits, Rises<kTiles, kBlocks>& rises,
                                    const Gates& gates) {
    constexpr int kRows = 2 * kTiles, kQuads = kBlocks / 2;
#pragma unroll
    for (int i = 0; i < kRows * kQuads; ++i) {  // reads gates once for all rows
        const int row = Gates::kGated ? i % kRows : i / kQuads, quad = Gates::kGated ? i / kRows : i % kQuads;
        exponentials_of_quad<kOdds, kTiles, kBlocks, Gates>(row / 2, row % 2, quad, x, logits, rises, gates.quad(quad));
    }
}

// Returns a function f(part) that does the same without gates, for one of kParts parts of the keys. multiply_rows calls
// it between its steps.
template <int kParts, int kTiles, int kBlocks>
__device__ inline auto exponentials_in_parts(float (&x)[kTiles][kBlocks][4], const HeadLogits& logits,
                                             Rises<kTiles, kBlocks>& rises) {
    return [&x, &rises, logits](int part) {
        constexpr int kQuads = kTiles * kBlocks;
#pragma unroll
        for (int i = part * kQuads / kParts; i < (part + 1) * kQuads / kParts; ++i)
            exponentials_of_quad<false>(i / kBlocks, i / (kBlocks / 2) % 2, i % (kBlocks / 2), x, logits, rises,
                                        NoGates::Quad{});
    };
}

// Computes weights with one reciprocal for each key, from the newest key to the oldest. Valid for every e.
template <int kTiles, int kBlocks, class Sink, class Gates>
__device__ inline void weights_key_by_key(float (&e)[kTiles][kBlocks][4], float (&mass)[kTiles][2], Sink sink,
                                          const Gates& gates) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float product = 1.f;
#pragma unroll
            for (int k = 2 * kBlocks - 1; k >= 0; --k) {
                at(e[m], r, k) = min_nan(at(e[m], r, k), kLargestE);
                product *= reciprocal(1.f + gates.quad(k / 4).odds(at(e[m], r, k), k % 4));
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
                    const float e_k = gates.quad(n / 2).odds(at(e[m], r, 2 * n + c), 2 * (n % 2) + c);
                    const float one_minus_beta = reciprocal(1.f + e_k);
                    a[c] = p * (e_k * one_minus_beta);
                    p *= one_minus_beta;
                }
                sink(m, r, n, a[0], a[1]);
            }
        }
}

// Move the mass of a row across a tile: descend() replaces the mass at the newer edge of the tile by the mass at the
// older edge, and ascend() does the reverse. `rise` is the rise of this thread's keys. Both return the mass at the
// older side of these keys.
__device__ inline float descend(float rise, float& mass) {
    const int t = threadIdx.x % 4;
    const float two = join(rise, __shfl_xor_sync(kAllLanes, rise, 1));
    const float others = __shfl_xor_sync(kAllLanes, two, 2), four = join(two, others);
    const float newer = t & 1 ? rise : two;  // over this thread's keys and all newer keys
    const float oldest = mass * reciprocal(1.f + (t & 2 ? newer : join(newer, others)));
    const float keep = reciprocal(1.f + four);
    mass = four < 1.f ? fmaf(-mass, four * keep, mass) : mass * keep;
    return oldest;
}
__device__ inline float ascend(float rise, float& mass) {
    const int t = threadIdx.x % 4;
    const float other = __shfl_xor_sync(kAllLanes, rise, 1), two = join(rise, other);
    const float others = __shfl_xor_sync(kAllLanes, two, 2);
    const float older = join(t & 1 ? other : 0.f, t & 2 ? others : 0.f);
    const float oldest = fmaf(mass, older, mass);
    mass = fmaf(mass, join(two, others), mass);
    return oldest;
}

// Returns whether this warp must process its keys one by one.
template <int kTiles, int kBlocks>
__device__ inline bool saturated(const Rises<kTiles, kBlocks>& rises) {
    bool any = false;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) any |= !(rises.all[m][r] <= kLargestRise);
    return __any_sync(kAllLanes, any);
}

// Calls sink(m, r, n, A of key 2n, A of key 2n + 1) for all keys. `oldest` is the mass at the older side of this
// thread's keys.
template <int kTiles, int kBlocks, class Sink, class Gates>
__device__ inline void weights_upwards(const float (&e)[kTiles][kBlocks][4], const Rises<kTiles, kBlocks>& rises,
                                       const float (&oldest)[kTiles][2], Sink sink, const Gates& gates) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int quad = 0; quad < kBlocks / 2; ++quad) {
                float p = quad == 0 ? oldest[m][r] : fmaf(oldest[m][r], rises.before[m][r][quad], oldest[m][r]);
                float a[4];
                const auto quad_gates = gates.quad(quad);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    a[k] = quad_gates.odds(e[m][2 * quad + k / 2][2 * r + k % 2], k) * p;
                    p += a[k];
                }
                sink(m, r, 2 * quad, a[0], a[1]);
                sink(m, r, 2 * quad + 1, a[2], a[3]);
            }
}

// Does the same, starting from `mass` at the newer edge of the tile, and replaces it by the mass at the older edge.
// Returns whether keys were processed one by one. If so, it has also clamped e to kLargestE.
template <int kTiles, int kBlocks, class Sink, class Gates = NoGates>
__device__ inline bool weights(float (&e)[kTiles][kBlocks][4], const Rises<kTiles, kBlocks>& rises,
                               float (&mass)[kTiles][2], Sink sink, const Gates& gates = {}) {
    if (saturated(rises)) {
        weights_key_by_key(e, mass, sink, gates);
        return true;
    }
    float oldest[kTiles][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) oldest[m][r] = descend(rises.all[m][r], mass[m][r]);
    weights_upwards(e, rises, oldest, sink, gates);
    return false;
}

// Replaces g by dz for one gated key (gates.cuh) and returns df. Except for 1 / f, no factor is larger than e.
__device__ inline float gated_gradient(const GateQuad& gates, int k, float e, float b, float& g) {
    const float f = gates.f[k], r = gates.r(e, k), one_minus_sigma = reciprocal(1.f + e);
    const float df = g * reciprocal(fmaxf(f, kLeastGate)) - e * r * b;
    g = one_minus_sigma * g - e * one_minus_sigma * f * r * b;
    return df;
}

// Ignores the gradients of gates.
struct NoGateGradients {
    __device__ void operator()(int, int, float) const {}
};

// Replaces g by dz = (1 - beta) g - beta b. `prefix` is the sum of g over all keys older than the tile; it is replaced
// by the prefix at the newer edge of the tile. With gates, it also calls gate_gradient(r, k, df). The block m is not
// passed, so a gate_gradient that reads its arguments requires kTiles = 1.
template <bool kKeyByKey, int kTiles, int kBlocks, class Gates, class GateGradient>
__device__ inline void logit_gradients_by(const float (&e)[kTiles][kBlocks][4], float (&g)[kTiles][kBlocks][4],
                                          float (&prefix)[kTiles][2], const Gates& gates, GateGradient gate_gradient) {
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
                if constexpr (Gates::kGated) {
                    const auto quad_gates = gates.quad(n / 2);
                    const int k = 2 * (n % 2);
                    gate_gradient(r, 2 * n, gated_gradient(quad_gates, k, e0, b0, g0));
                    gate_gradient(r, 2 * n + 1, gated_gradient(quad_gates, k + 1, e1, b1, g1));
                } else {
                    const float keep0 = reciprocal(1.f + e0), keep1 = reciprocal(1.f + e1);  // 1 - beta
                    if constexpr (kKeyByKey) {                                               // e b can overflow
                        g0 = keep0 * g0 - (e0 * keep0) * b0;
                        g1 = keep1 * g1 - (e1 * keep1) * b1;
                    } else {
                        g0 = fmaf(-e0, b0, g0) * keep0;
                        g1 = fmaf(-e1, b1, g1) * keep1;
                    }
                }
            }
        }
}

// Does the same; `key_by_key` is the result of weights(). One branch encloses everything: a branch for each pair of
// keys would leave no instructions to issue while a reciprocal is computed.
template <int kTiles, int kBlocks, class Gates = NoGates, class GateGradient = NoGateGradients>
__device__ inline void logit_gradients(const float (&e)[kTiles][kBlocks][4], float (&g)[kTiles][kBlocks][4],
                                       float (&prefix)[kTiles][2], bool key_by_key, const Gates& gates = {},
                                       GateGradient gate_gradient = {}) {
    if constexpr (Gates::kGated) {
        logit_gradients_by<true>(e, g, prefix, gates, gate_gradient);
    } else if (key_by_key) {
        logit_gradients_by<true>(e, g, prefix, gates, gate_gradient);
    } else {
        logit_gradients_by<false>(e, g, prefix, gates, gate_gradient);
    }
}

}  // namespace megatron_sb::common
