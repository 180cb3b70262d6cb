// The scan of the forward with forget gates: beta = f e / (1 + e), so 1 - beta = (1 + y) / (1 + e) with y = (1 - f) e.
//
//     A_k = P / D  f_k e_k  L_k  U_k     L_k: product of 1 + e over the older keys of this thread
//                                        U_k: product of 1 + y over the newer keys of this thread
//
// P is the mass at the newer edge of the thread's keys, and D the product of 1 + e over all of them. So one reciprocal
// serves all keys of a row, as without gates. All factors are positive, so nothing cancels.
#pragma once

#include "kernels/hopper/fwd_scan.cuh"
#include "kernels/hopper/gates.cuh"

namespace megatron_sb::hopper {

constexpr int kGatedKeys = 32;  // keys of one row that a thread holds

class GatedForwardScan : public ForwardScan<kGatedKeys> {
  public:
    using Gates = GateTile<4 * kGatedKeys>;

    __device__ __forceinline__ GatedForwardScan(const ForwardScan<kGatedKeys>& scan, const Gates& gates)
        : ForwardScan<kGatedKeys>(scan), gates_(gates) {}

    // Replaces scores by weights and moves the mass to the older edge of the tile. The exponentials of row 1 are
    // interleaved with the multiplications of row 0, so that the MUFU and FMA pipes both have work. Row 0 is multiplied
    // by its factor while row 1 is computed.
    __device__ __forceinline__ void run() {
        OlderKeys older[2];
#pragma unroll
        for (int k = 0; k < kGatedKeys; ++k) exponential_of(0, k, older[0]);
        const float factor_0 = weights_without_factor(0, older[0], [&](int k) { exponential_of(1, k, older[1]); });
        const float factor_1 = weights_without_factor(1, older[1], [&](int k) { multiply(0, k, factor_0); });
#pragma unroll
        for (int k = 0; k < kGatedKeys; ++k) multiply(1, k, factor_1);
    }

  private:
    static constexpr int kGroup = 4;  // keys of which y is kept at the same time: there are no registers for more
    static constexpr int kGroups = kGatedKeys / kGroup;

    // Products of 1 + e in a row.
    struct OlderKeys {
        float before_group[kGroups];  // over the keys that are older than this group
        float all = 1.f;              // D, once all keys are there
    };

    // Replaces a score by e.
    __device__ __forceinline__ void exponential_of(int r, int k, OlderKeys& older) {
        if (k % kGroup == 0) older.before_group[k / kGroup] = older.all;
        exponential(r, k, older.all);
    }
    __device__ __forceinline__ void multiply(int r, int k, float factor) {
        s_[accumulator_register(r, k)] *= factor;
    }

    // Replaces e of row r by f e L U, and moves the mass of the row to the older edge of the tile. Returns P / D, which
    // is then missing from the weights. Calls after_key(k) for each key, the oldest first.
    template <class AfterKey>
    __device__ __forceinline__ float weights_without_factor(int r, const OlderKeys& older, const AfterKey& after_key) {
        const float inverse = reciprocal(older.all);
        if (saturated(inverse)) {
#pragma unroll
            for (int k = 0; k < kGatedKeys; ++k) after_key(k);
            gate_odds(r);
            scan_key_by_key(r);
            return 1.f;
        }
        float u = 1.f;
#pragma unroll
        for (int group = kGroups - 1; group >= 0; --group) {
            float y[kGroup], l = older.before_group[group];
#pragma unroll
            for (int i = 0; i < kGroup; i += 2) {
                const int k = group * kGroup + i;
                const float2 f = gates_.pair(thread_, k);
                y[i] = multiply_by_older(r, k, f.x, l);
                y[i + 1] = multiply_by_older(r, k + 1, f.y, l);
            }
#pragma unroll
            for (int i = kGroup - 1; i >= 0; --i) {
                const int k = group * kGroup + i;
                multiply(r, k, u);
                u = fmaf(u, y[i], u);
                after_key(kGatedKeys - 1 - k);
            }
        }
        return mass_at_newer_edge(r, u * inverse) * inverse;
    }
    // Replaces e by f e L, and L by that of the next newer key. Returns y, which is rounded only once.
    __device__ __forceinline__ float multiply_by_older(int r, int k, float f, float& l) {
        float& x = s_[accumulator_register(r, k)];
        const float e = x;
        x = f * e * l;
        l = fmaf(l, e, l);
        return fmaf(-f, e, e);
    }
    // Replaces e of row r by the odds e' = f e / (1 + y) = f / (1 / e + 1 - f) of beta, also where e is infinite.
    __device__ __forceinline__ void gate_odds(int r) {
#pragma unroll
        for (int k = 0; k < kGatedKeys; k += 2) {
            const float2 f = gates_.pair(thread_, k);
            replace_by_odds(s_[accumulator_register(r, k)], f.x);
            replace_by_odds(s_[accumulator_register(r, k + 1)], f.y);
        }
    }
    __device__ __forceinline__ static void replace_by_odds(float& e, float f) {
        e = f * reciprocal(reciprocal(e) + (1.f - f));
    }

    const Gates& gates_;
};

}  // namespace megatron_sb::hopper
