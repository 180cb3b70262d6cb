// The scan of the forward with forget gates (gates.cuh): E from the scores, then e'. The rest is that of fwd_scan.cuh.
#pragma once

#include "kernels/hopper/fwd_scan.cuh"
#include "kernels/hopper/gates.cuh"

namespace megatron_sb::hopper {

constexpr int kGatedKeys = 32;  // keys of one row that a thread holds

class GatedForwardScan : public ForwardScan<kGatedKeys> {
  public:
    using Gates = GateTile<4 * kGatedKeys>;

    __device__ __forceinline__ GatedForwardScan(float (&scores)[2 * kGatedKeys], const HeadLogits& logits,
                                                int thread_in_quad, float floor, int tile, RowState& rows,
                                                const Gates& gates)
        : ForwardScan<kGatedKeys>(scores, logits, thread_in_quad, floor, tile, rows), gates_(gates) {}

    // Replaces scores by weights and moves the mass to the older edge of the tile. E, e' and the weights of a row are
    // three passes over its keys, and passes of the two rows are interleaved. In one pass, each key would wait for the
    // latency of two instructions of the MUFU.
    __device__ __forceinline__ void run() {
#pragma unroll
        for (int k = 0; k < kGatedKeys; ++k) inverse_exponential(0, k);
        float t = odds(0, [&](int k) { inverse_exponential(1, k); });
        const float inverse = reciprocal(t);
        if (saturated(inverse)) {
            scan_key_by_key(0);
            t = odds(1, [](int) {});
        } else {
            float m = mass_at_newer_edge(0, inverse) * inverse;
            t = odds(1, [&](int k) { weight(0, k, m); });
        }
        finish_row_1(t);
    }

  private:
    // Replaces a score by E.
    __device__ __forceinline__ void inverse_exponential(int r, int k) {
        float& x = s_[accumulator_register(r, k)];
        x = exp2_approximate(-logits_(x, 0, r));
    }
    // Replaces E of row r by e'. Returns the product of 1 + e'. Calls after_key(k) for each key.
    template <class AfterKey>
    __device__ __forceinline__ float odds(int r, const AfterKey& after_key) {
        float t = 1.f;
#pragma unroll
        for (int i = 0; i < kGatedKeys; i += 2) {
            const float2 c = gates_.pair(thread_, i);
#pragma unroll
            for (int k = i; k < i + 2; ++k) {
                float& x = s_[accumulator_register(r, k)];
                x = Gate::odds(k == i ? c.x : c.y, x);
                t = fmaf(t, x, t);
                after_key(k);
            }
        }
        return t;
    }

    const Gates& gates_;
};

}  // namespace megatron_sb::hopper
