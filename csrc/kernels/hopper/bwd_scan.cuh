// The scans of the backward: from scores to weights A and logit gradients dz, in the registers of one thread. A thread
// holds rows r = 0 and 1 of a step and 16 neighbouring keys of each; a quad of threads holds the 64 keys of a half
// tile.
//
//     e = 2^(scale log2(e) q . k + offset)     A = e m     g = A (dO . v)
//     dz = (g - e b) / (1 + e)     m' = m (1 + e)     b' = b + g
//
// m is the mass at the older edge of a key, and b the prefix there (the sum of g over all older keys, plus P dP). m'
// and b' are the values at its newer edge. FastScan uses the same dz in other forms: g - beta (b + g), with the
// fraction beta = e / (1 + e) = A / m', or A (dO . v - (b + g) / m'), which takes one instruction less for each key and
// keeps one number more.
//
// FastScan needs rows that have started in older keys. It computes masses from the older edge of the half tile to the
// newer one. No product of (1 + e) exceeds 2^64, because the mass rises from at least 2^-64 to at most 1.
//
// SlowScan also serves rows that start in this half tile, in newer keys, or never. It uses the formulas of FastScan,
// with weights of 0 for rows that have not started. Only if the product of (1 + e) is large for a row that starts here,
// it computes masses key by key from the newer edge, with e up to 2^126.
//
// Call the functions in this order: exponentials, start, weights, prefixes, logit_gradients. The form of weights and
// logit_gradients must be form(), which is known after start.
#pragma once

#include "kernels/common/scalars.h"
#include "kernels/hopper/bwd_traits.h"
#include "kernels/hopper/ptx.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

using common::HeadLogits;

// The formulas of a step. The same for all lanes of a warp.
enum class ScanForm {
    kSmall,     // the products of 1 + e over the keys of a thread are at most kLargeProduct (FastScan)
    kLarge,     // some are not
    kKeyByKey,  // so is one of a row that starts in this half tile; or forget gates
};

// Product or sum of one value x of each thread of a quad: over the threads with older keys, over those with newer keys,
// and over all four. Thread t = 0 has the oldest keys. add_over_quad does not compute `newer`. Three shuffles that do
// not depend on each other take half as long as two that do.
struct QuadScan {
    float older, newer, all;
};
template <class Multiply>
__device__ __forceinline__ QuadScan multiply_over_quad(float x, int t, const Multiply& multiply) {
    const float neighbour = __shfl_xor_sync(~0u, x, 1), across = __shfl_xor_sync(~0u, x, 2);
    const float pair = multiply(x, neighbour), other = multiply(across, __shfl_xor_sync(~0u, x, 3));
    return {multiply((t & 1) ? neighbour : 1.f, (t & 2) ? other : 1.f),
            multiply((t & 1) ? 1.f : neighbour, (t & 2) ? 1.f : other), multiply(pair, other)};
}
__device__ __forceinline__ QuadScan add_over_quad(float x, int t) {
    const float neighbour = __shfl_xor_sync(~0u, x, 1), across = __shfl_xor_sync(~0u, x, 2);
    const float other = across + __shfl_xor_sync(~0u, x, 3);
    return {((t & 1) ? neighbour : 0.f) + ((t & 2) ? other : 0.f), 0.f, x + neighbour + other};
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

// Makes the compiler compute what depends on s again instead of keeping it: there are not enough registers.
__device__ __forceinline__ void prevent_reuse(float (&s)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(s[i]));
}

// With kKeepsReciprocals, 1 / m' of each score is kept (BackwardTraits says for which heads).
template <bool kKeepsReciprocals>
class FastScan {
  public:
    static constexpr bool kIsSlow = false;
    // Where e is large, beta is close to 1, and g - beta G loses what is left of g. Then om G - (G - g) is exact
    // enough, with om = 1 - beta = 1 / (1 + e). It takes more instructions, so only warps use it in which the product
    // of 1 + e over the keys of a thread is above this bound. Below it, the loss is at most 2^-12 of the result.
    static constexpr float kLargeProduct = 0x1p12f;
    using Reciprocals = float[kKeepsReciprocals ? 32 : 1];  // of m', at the newer edges of this thread's keys

    __device__ __forceinline__ explicit FastScan(float product_offset) : multiply_(product_offset) {}

    // Replaces scores by e. Runs before the carries are known.
    __device__ __forceinline__ void exponentials(float (&s)[32], const HeadLogits& logits, int t) {
        float product[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k)
                s[accumulator_register(r, k)] = exp2_approximate(logits(s[accumulator_register(r, k)], 0, r));
            float& p = product[r];
            p = 1.f + s[accumulator_register(r, 0)];
#pragma unroll
            for (int k = 1; k < kBackwardKeysPerThread; ++k) p = fmaf(p, s[accumulator_register(r, k)], p);
        }
        large_ = __any_sync(~0u, fmaxf(product[0], product[1]) > kLargeProduct);
        set_products(product, t);
    }
    __device__ __forceinline__ ScanForm form() const {
        return large_ ? ScanForm::kLarge : ScanForm::kSmall;
    }
    // Returns 0, as no product of 1 + e is negative, but not before e of row 0 is known. What depends on it cannot be
    // scheduled earlier.
    __device__ __forceinline__ uint32_t zero_after_row_0() const {
        return row_0_is_negative_;
    }
    __device__ __forceinline__ void start(int r, const Carry& carry) {
        mass_[r] *= carry.mass;
        newer_mass[r] *= carry.mass;
        prefix_[r] = carry.prefix;
    }

    template <class Element, ScanForm kForm>
    __device__ __forceinline__ void weights(int r, float (&s)[32], float (&dp)[32], uint32_t (&packed)[8]) {
        sum_[r] = weights_of_row<Element, kForm == ScanForm::kLarge>(r, mass_[r], s, dp, reciprocals_, packed);
    }
    // Packs the weights of row r, with mass m at the older edge of this thread's keys. Replaces s by
    // beta = e / (1 + e), which is A over the mass at the newer edge of the key, and dp by its part of dz that does not
    // depend on the keys of older threads: g - beta G, where G is the sum of g from the oldest key of this thread to
    // this key. If 1 / m' is kept, replaces s by A and dp by dP - G / m'. Returns the sum of g over the keys of this
    // thread.
    template <class Element, bool kLarge>
    __device__ __forceinline__ static float weights_of_row(int r, float m, float (&s)[32], float (&dp)[32],
                                                           Reciprocals& reciprocals, uint32_t (&packed)[8]) {
        constexpr float kScale = common::kWeightScale<Element>;
        float sum = 0.f, older;
#pragma unroll
        for (int k = 0; k < kBackwardKeysPerThread; ++k) {
            const int i = accumulator_register(r, k);
            const float e = s[i], a = e * m, g = dp[i] * a, newer_mass = fmaf(e, m, m),
                        inverse = reciprocal(newer_mass);
            const float newer_sum = k == 0 ? g : kKeepsReciprocals && !kLarge ? fmaf(dp[i], a, sum) : sum + g;
            if (kKeepsReciprocals && !kLarge) {
                s[i] = a;
                dp[i] = fmaf(-inverse, newer_sum, dp[i]);
                reciprocals[i] = inverse;
            } else {
                s[i] = a * inverse;
                dp[i] = fmaf(-s[i], newer_sum, g);
                if (kLarge && e > 1.f) {
                    const float om = m * inverse;
                    s[i] = 1.f - om;
                    dp[i] = fmaf(om, newer_sum, -sum);
                }
            }
            m = newer_mass;
            sum = newer_sum;
            if (k % 2 == 0)
                older = a;
            else
                packed[k / 2] = pack<Element>(kScale * older, kScale * a);
        }
        return sum;
    }
    __device__ __forceinline__ void prefixes(int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuadScan over = add_over_quad(sum_[r], t);
            newer_prefix[r] = prefix_[r] + over.all;
            prefix_[r] += over.older;
        }
    }

    template <class Element, ScanForm kForm>
    __device__ __forceinline__ void logit_gradients(int r, const float (&s)[32], const float (&dp)[32],
                                                    uint32_t (&packed)[8]) const {
        gradients_of_row<Element, kForm == ScanForm::kLarge>(r, prefix_[r], s, dp, reciprocals_, packed);
    }
    // Packs dz of row r, with prefix b at the older edge of this thread's keys. The other numbers are those of
    // weights_of_row(): dz is beta b less than g - beta G, or A times (dP - G / m' - b / m').
    template <class Element, bool kLarge>
    __device__ __forceinline__ static void gradients_of_row(int r, float b, const float (&s)[32], const float (&dp)[32],
                                                            const Reciprocals& reciprocals, uint32_t (&packed)[8]) {
        const auto dz = [&](int i) {
            return kKeepsReciprocals && !kLarge ? s[i] * fmaf(-reciprocals[i], b, dp[i]) : fmaf(-s[i], b, dp[i]);
        };
#pragma unroll
        for (int k = 0; k < kBackwardKeysPerThread; k += 2)
            packed[k / 2] = pack<Element>(dz(accumulator_register(r, k)), dz(accumulator_register(r, k + 1)));
    }

    float newer_mass[2], newer_prefix[2];  // at the newer edge of the half tile

  protected:
    // Sets the masses, as products from the older edge of the half tile, from the products of this thread's keys.
    __device__ __forceinline__ void set_products(const float (&product)[2], int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuadScan over = multiply_over_quad(product[r], t, multiply_);
            mass_[r] = over.older;
            newer_mass[r] = over.all;
        }
        row_0_is_negative_ = __any_sync(~0u, product[0] < 0.f);
    }

    const UnbiasedProduct multiply_;
    Reciprocals reciprocals_;
    float sum_[2];               // sum of g over the keys of this thread
    float mass_[2], prefix_[2];  // at the older edge of this thread's keys
    bool large_;                 // form() is kLarge
    bool row_0_is_negative_;     // the product of 1 + e
};

// What SlowScan keeps of a score, and what it computes from it. c is a number for each key that forget gates need
// (bwd_gated_scan.cuh).
struct PlainScores {
    static constexpr bool kGated = false;
    static constexpr float kHidden = 0.f;  // of a key that contributes nothing
    __device__ __forceinline__ float4 quad(int) const { return {}; }
    // Returns e, at most 2^126.
    __device__ __forceinline__ static float keep(float score, const HeadLogits& logits) {
        return min_nan(exp2_approximate(logits(score, 0, 0)), common::kLargestE);
    }
    __device__ __forceinline__ static float odds(float e, float) { return e; }
    // Returns the derivative of log(odds) with respect to the logit, times 1 - beta.
    __device__ __forceinline__ static float w(float e) { return reciprocal(1.f + e); }
};

template <class Scores, bool kKeepsReciprocals>
class SlowScan {
    using Fast = FastScan<kKeepsReciprocals>;

  public:
    static constexpr bool kIsSlow = true;

    __device__ __forceinline__ SlowScan(int half, float product_offset, const Scores& scores = {})
        : half_(half), multiply_(product_offset), scores_(scores) {}

    // Replaces scores by e. Rows that start in older keys get the same bits as in FastScan.
    __device__ __forceinline__ void exponentials(float (&s)[32], const HeadLogits& logits, int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float product = 1.f;
            for_each_key([&](int key, float c) {
                float& x = s[accumulator_register(r, key)];
                x = Scores::keep(x, logits);
                product = fmaf(product, Scores::odds(x, c), product);
            });
            products_[r] = multiply_over_quad(product, t, multiply_);
            large_[r] = !(product <= Fast::kLargeProduct);  // also if it is NaN, as infinity times e = 0
        }
    }
    __device__ __forceinline__ ScanForm form() const {
        if (Scores::kGated || __any_sync(~0u, (large_[0] && here_[0]) || (large_[1] && here_[1])))
            return ScanForm::kKeyByKey;
        const bool large = (large_[0] && started_[0]) || (large_[1] && started_[1]);
        return __any_sync(~0u, large) ? ScanForm::kLarge : ScanForm::kSmall;
    }
    __device__ __forceinline__ static constexpr uint32_t zero_after_row_0() {
        return 0;
    }
    // Whether row r starts only in newer keys and can have a NaN score in this half.
    __device__ __forceinline__ bool has_unstarted_nan(int r) const {
        return unstarted_nan_[r];
    }
    __device__ __forceinline__ void start(int r, const Carry& carry) {
        const bool before = carry.start < half_;
        here_[r] = carry.start == half_;
        started_[r] = before || here_[r];
        unstarted_nan_[r] = !started_[r] && isnan(products_[r].all);
        // Masses with a reciprocal that is infinite: of a record, because of mass_in of a block, and of a carry from
        // the older half.
        large_[r] |= here_[r] && !(carry.restart_mass >= kLeastRestartMass);
        const float mass = carry.mass < kLeastCarriedMass ? kLeastCarriedMass : carry.mass;
        newer_mass[r] = before ? mass * products_[r].all : here_[r] ? carry.restart_mass : 0.f;
        older_mass_[r] = before ? mass : __fdividef(carry.restart_mass, products_[r].all);
        prefix_[r] = carry.prefix;
    }
    // Call this before weights() if form() is kKeyByKey. It sets the masses from products of 1 / (1 + e).
    __device__ __forceinline__ void begin_key_by_key(float (&s)[32], int t) {
        prevent_reuse(s);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float product = 1.f;
            for_each_key([&](int key, float c) {
                product *= reciprocal(1.f + Scores::odds(s[accumulator_register(r, key)], c));
            });
            products_[r] = multiply_over_quad(product, t, [](float x, float y) { return x * y; });
            if (started_[r] && !here_[r]) newer_mass[r] = __fdividef(older_mass_[r], products_[r].all);
        }
    }
    // Packs the weights of row r. Replaces dp by g with kKeyByKey, else s and dp as FastScan does.
    template <class Element, ScanForm kForm>
    __device__ __forceinline__ void weights(int r, float (&s)[32], float (&dp)[32], uint32_t (&packed)[8]) {
        if (!started_[r]) {  // the row starts in newer keys: A and g are 0, even if its scores or dP are NaN
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k) {
                s[accumulator_register(r, k)] = Scores::kHidden;
                dp[accumulator_register(r, k)] = 0.f;
            }
        }
        if (kForm == ScanForm::kKeyByKey)
            sum_[r] =
                weights_key_by_key<Element>(r, started_[r] ? newer_mass[r] * products_[r].newer : 0.f, s, dp, packed);
        else  // with any mass, the weights of a row that has not started are 0
            sum_[r] = Fast::template weights_of_row<Element, kForm == ScanForm::kLarge>(
                r, started_[r] ? products_[r].older * older_mass_[r] : 1.f, s, dp, reciprocals_, packed);
    }
    __device__ __forceinline__ void prefixes(int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuadScan over = add_over_quad(sum_[r], t);
            newer_prefix[r] = prefix_[r] + over.all;
            prefix_[r] = started_[r] ? prefix_[r] + over.older : 0.f;
        }
    }
    // Packs dz of row r. With forget gates, replaces g by n.
    template <class Element, ScanForm kForm>
    __device__ __forceinline__ void logit_gradients(int r, float (&s)[32], float (&dp)[32],
                                                    uint32_t (&packed)[8]) const {
        if (kForm == ScanForm::kKeyByKey)
            gradients_key_by_key<Element>(r, s, dp, packed);
        else
            Fast::template gradients_of_row<Element, kForm == ScanForm::kLarge>(r, prefix_[r], s, dp, reciprocals_,
                                                                                packed);
    }

    float newer_mass[2], newer_prefix[2];

  private:
    static constexpr int kQuads = kBackwardKeysPerThread / 4;
    // Divided by the product of a quad, at most 2^48, it is above 2^-126.
    static constexpr float kLeastRestartMass = 0x1p-64f;

    // Calls f(key, c) for the keys of this thread, from the oldest on.
    template <class F>
    __device__ __forceinline__ void for_each_key(const F& f) const {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const float4 c = scores_.quad(i);
#pragma unroll
            for (int k = 0; k < 4; ++k) f(4 * i + k, component(c, k));
        }
    }
    // Packs the weights of row r, with mass m at the newer edge of this thread's keys. Replaces dp by g, and returns
    // its sum over the keys of this thread.
    template <class Element>
    __device__ __forceinline__ float weights_key_by_key(int r, float m, float (&s)[32], float (&dp)[32],
                                                        uint32_t (&packed)[8]) const {
        constexpr float kScale = common::kWeightScale<Element>;
        prevent_reuse(s);
        float newer = 0.f, sum = 0.f;
#pragma unroll
        for (int quad = kQuads - 1; quad >= 0; --quad) {
            const float4 c = scores_.quad(quad);
#pragma unroll
            for (int k = 4 * quad + 3; k >= 4 * quad; --k) {
                const int i = accumulator_register(r, k);
                const float e = Scores::odds(s[i], component(c, k % 4)), inverse = reciprocal(1.f + e);
                const float a = m * (e * inverse);
                m *= inverse;
                dp[i] *= a;
                sum += dp[i];
                if (k % 2 == 1)
                    newer = a;
                else
                    packed[k / 2] = pack<Element>(kScale * a, kScale * newer);
            }
        }
        return sum;
    }
    template <class Element>
    __device__ __forceinline__ void gradients_key_by_key(int r, float (&s)[32], float (&g)[32],
                                                         uint32_t (&packed)[8]) const {
        prevent_reuse(s);
        float b = prefix_[r], older = 0.f;
        for_each_key([&](int key, float c) {
            const int i = accumulator_register(r, key);
            const float e = Scores::odds(s[i], c), w = Scores::w(s[i]);
            const float dz = w * g[i] - (e * w) * b, n = g[i] - e * b;
            b += g[i];
            if (Scores::kGated) g[i] = n;
            if (key % 2 == 0)
                older = dz;
            else
                packed[key / 2] = pack<Element>(older, dz);
        });
    }

    const int half_;
    const UnbiasedProduct multiply_;
    const Scores scores_;
    QuadScan products_[2];  // of 1 + e, or of the odds that gates leave; with kKeyByKey of its reciprocals
    typename Fast::Reciprocals reciprocals_;
    float older_mass_[2];  // at the older edge of the half tile, of a row that has started
    float prefix_[2], sum_[2];
    bool large_[2];  // whether the product of this thread's keys is large, or the mass of the record too small
    bool here_[2], started_[2], unstarted_nan_[2];
};

}  // namespace megatron_sb::hopper
