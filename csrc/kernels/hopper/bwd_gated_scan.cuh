// The scans of the backward with forget gates (gates.cuh): dz = n w, with n = g - e' b and w = E / (1 + E). n replaces
// g, because its sums over rows are the gradients of the gates.
#pragma once

#include "kernels/hopper/bwd_scan.cuh"
#include "kernels/hopper/gates.cuh"

namespace megatron_sb::hopper {

using HalfTileGates = GateTile<kHalfTileKeys>;

// Returns w = E / (1 + E). If E is infinite, e' is 0, and so is n; w is then 0 too, and not infinity times 0.
__device__ __forceinline__ float exact_w(float inverse_e) {
    return min_nan(inverse_e, 0x1p127f) * reciprocal(1.f + inverse_e);
}

// With kKeepsE, E and e' of each score are kept. At head_dim 128 there are not enough registers for both, and e'
// replaces E, with w = 1 - sigma = 1 - beta / f. This loses at most 2^-12 of w, unless a logit is above
// log(kLargeOdds). A warp with such a logit (form() is kLarge) keeps E and computes e' again at each use.
template <bool kKeepsE>
class GatedFastScan : public FastScan<false> {
  public:
    __device__ __forceinline__ GatedFastScan(float product_offset, const HalfTileGates& gates, int t)
        : FastScan<false>(product_offset), gates_(gates), t_(t) {}

    // Replaces scores by e', or by E if form() is kLarge.
    __device__ __forceinline__ void exponentials(float (&s)[32], const HeadLogits& logits, int t) {
#pragma unroll
        for (float& x : s) x = exp2_approximate(-logits(x, 0, 0));
        float product[2], least = s[0];
#pragma unroll
        for (float x : s) least = fminf(least, x);
        large_ = !kKeepsE && __any_sync(~0u, least < 1.f / kLargeOdds);
#pragma unroll
        for (int r = 0; r < 2; ++r) product[r] = large_ ? odds_of_row<true>(r, s) : odds_of_row<false>(r, s);
        set_products(product, t);
    }

    // Packs the weights of row r. Replaces dp by g.
    template <class Element, ScanForm kForm>
    __device__ __forceinline__ void weights(int r, const float (&s)[32], float (&dp)[32], uint32_t (&packed)[8]) {
        constexpr bool kLarge = kForm == ScanForm::kLarge;
        constexpr float kScale = common::kWeightScale<Element>;
        float m = mass_[r], sum = 0.f, older;
        for_each_key<kLarge>([&](int key, float c) {
            const int i = accumulator_register(r, key);
            const float e = kLarge ? Gate::odds(c, s[i]) : s[i], a = e * m;
            m = fmaf(e, m, m);
            dp[i] *= a;
            sum += dp[i];
            if (key % 2 == 0)
                older = a;
            else
                packed[key / 2] = pack<Element>(kScale * older, kScale * a);
        });
        sum_[r] = sum;
    }
    // Packs dz of row r. Replaces g by n.
    template <class Element, ScanForm kForm>
    __device__ __forceinline__ void logit_gradients(int r, const float (&s)[32], float (&g)[32],
                                                    uint32_t (&packed)[8]) const {
        constexpr bool kLarge = kForm == ScanForm::kLarge;
        float b = prefix_[r], older;
        for_each_key<!kKeepsE>([&](int key, float c) {
            const int i = accumulator_register(r, key);
            const float e = kLarge ? Gate::odds(c, s[i]) : s[i], n = fmaf(-e, b, g[i]);
            const float dz = n * w_of_key<kLarge>(e, s, i, c);
            b += g[i];
            g[i] = n;
            if (key % 2 == 0)
                older = dz;
            else
                packed[key / 2] = pack<Element>(older, dz);
        });
    }

  private:
    static constexpr float kLargeOdds = 0x1p12f;

    // Returns the product of 1 + e' over the keys of this thread.
    template <bool kLarge>
    __device__ __forceinline__ float odds_of_row(int r, float (&s)[32]) {
        float product = 1.f;
        for_each_key<true>([&](int key, float c) {
            const int i = accumulator_register(r, key);
            const float e = Gate::odds(c, s[i]);
            product = fmaf(product, e, product);
            if (kKeepsE) inverse_e_[i] = s[i];
            if (!kLarge) s[i] = e;
        });
        return product;
    }
    template <bool kLarge>
    __device__ __forceinline__ float w_of_key(float e, const float (&s)[32], int i, float c) const {
        if (kKeepsE) return exact_w(inverse_e_[i]);
        if (kLarge) return exact_w(s[i]);
        const float beta = e * reciprocal(1.f + e);
        return 1.f - fmaf(c, beta, beta);
    }

    // Calls f(key, c) for the keys of this thread, from the oldest on. Reads c of the key if kReadsGates is set.
    template <bool kReadsGates, class F>
    __device__ __forceinline__ void for_each_key(const F& f) const {
#pragma unroll
        for (int k = 0; k < kBackwardKeysPerThread; k += 2) {
            float2 c = {};
            if (kReadsGates) c = gates_.pair(t_, k);
            f(k, c.x);
            f(k + 1, c.y);
        }
    }

    const HalfTileGates& gates_;
    const int t_;
    float inverse_e_[kKeepsE ? 32 : 1];
};

// What SlowScan keeps of a score with forget gates.
struct GatedScores {
    static constexpr bool kGated = true;
    static constexpr float kHidden = INFINITY;
    const HalfTileGates& gates;
    int t;
    __device__ __forceinline__ float4 quad(int i) const { return gates.quad(t, i); }
    __device__ __forceinline__ static float keep(float score, const HeadLogits& logits) {
        return exp2_approximate(-logits(score, 0, 0));
    }
    __device__ __forceinline__ static float odds(float inverse_e, float c) {
        return min_nan(Gate::odds(c, inverse_e), common::kLargestE);
    }
    __device__ __forceinline__ static float w(float inverse_e) { return exact_w(inverse_e); }
};

}  // namespace megatron_sb::hopper
