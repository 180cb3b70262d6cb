// Shared by the warpgroups that scan, at both head dimensions: products of rows and keys, masks, and the stores of A,
// dz and carries. A step is scanned in two halves of 64 keys: half 0 has the older keys, half 1 the newer ones.
#pragma once

#include <type_traits>

#include "kernels/hopper/bwd_output.cuh"
#include "kernels/hopper/bwd_scan.cuh"

namespace megatron_sb::hopper {

template <class T>
class ScanThread : protected BackwardThread<T> {
  protected:
    using Base = BackwardThread<T>;
    using Base::args_, Base::control_, Base::lane_, Base::row, Base::step, Base::warp_;
    using Base::kPanel, Base::kHeadDim, Base::kTile;
    using typename Base::Element;
    using Cursor = StageCursor<T::kQdoStages>;
    using FastScan = hopper::FastScan<T::kChains>;

    __device__ __forceinline__ ScanThread(typename T::Shared& shared, const BackwardArguments& arguments)
        : Base(shared, arguments) {
        qdo_low_ = descriptor_low(shared_address(shared.qdo[0][0]), 0);
    }

    // Issues d = rows keys^T for 64 rows of Q or dO and 64 keys.
    __device__ __forceinline__ static void issue_rows_by_keys(float (&d)[32], uint32_t rows, uint32_t keys) {
        wgmma_overwrite(Element{}, d, descriptor(rows), descriptor(keys));
#pragma unroll
        for (int i = 1; i < kHeadDim / 16; ++i) {
            const int at = i / 4 * kPanel + i % 4 * 2;
            wgmma_accumulate(Element{}, d, descriptor(rows + at), descriptor(keys + at));
        }
        wgmma_commit();
    }

    // Call this once a step of a new key tile is there. The lane makes the offset differ between threads. Otherwise ptxas
    // keeps it in a uniform register, and moves it there between the products that follow.
    __device__ __forceinline__ void set_product_offset(uint32_t number) {
        product_offset_ = UnbiasedProduct::offset_of(4 * step(number).tile + lane_ % 4);
    }

    // Hides the keys of a half that a row does not see: e of a hidden key is 0.
    __device__ __forceinline__ void mask(float (&s)[32], uint32_t number, int flags, int half) {
        if (!(flags & kMasked << half)) return;
        const int visible = step(number).visible - half * kHalfTileKeys;
        const int num_keys = step(number).num_keys - half * kHalfTileKeys;
        const float hidden = copysignf(INFINITY, -args_.scale_log2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int num_visible = min(visible + row(r), num_keys) - lane_ % 4 * kBackwardKeysPerThread;
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k)
                if (k >= num_visible) s[accumulator_register(r, k)] = hidden;
        }
    }

    // Computes A of a half from e (in s), stores it in shared memory, and replaces dP (in dp) by g. Calls
    // before_store before the first store; it must wait until the slot is empty.
    template <class Scan, class BeforeStore>
    __device__ __forceinline__ void write_weights(Scan& scan, float (&s)[32], float (&dp)[32], uint32_t to,
                                                  const BeforeStore& before_store) {
        uint32_t packed[8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scan.template weights<Element>(r, s, dp, packed);
            if (r == 0) before_store();
            this->store_rows(to, r, packed);
        }
    }
    // Computes dz of a half from e (in s) and g, and stores it in shared memory.
    template <class Scan>
    __device__ __forceinline__ void write_dz(const Scan& scan, float (&s)[32], const float (&g)[32], uint32_t to) {
        uint32_t packed[8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scan.template logit_gradients<Element>(r, s, g, packed);
            this->store_rows(to, r, packed);
        }
    }

    // The prefix that a row passes to newer keys. A NaN in older keys must not reach them.
    __device__ __forceinline__ static float passed_prefix(float prefix) {
        return isnan(prefix) ? 0.f : prefix;
    }
    // Stores the carries at the newer edge of half `half`: waits on carry_out_empty, arrives on carry_out_full.
    template <class Scan>
    __device__ __forceinline__ void store_carry_out(const Scan& scan, uint32_t number, int half) {
        float prefix[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) prefix[r] = passed_prefix(scan.newer_prefix[r]);
        const int slot = number % kCarryOutSlots;
        mbarrier_wait(&control_.carry_out_empty[half][slot], number / kCarryOutSlots & 1 ^ 1);
        if (lane_ % 4 == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                control_.carry_out[half][slot][row(r)] = make_float2(scan.newer_mass[r], prefix[r]);
            mbarrier_arrive(&control_.carry_out_full[half][slot][warp_]);
        }
    }

    // Replaces NaN by 0 in row r of Q in shared memory if `clear[r]`. The caller explains when.
    __device__ __forceinline__ void clear_nan_queries(const bool (&clear)[2], int stage) const {
        if (!__any_sync(~0u, clear[0] || clear[1])) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!clear[r]) continue;
            const uint32_t queries = (this->opaque(qdo_low_) + stage * 2 * kTile) << 4;
#pragma unroll 1
            for (int i = 0; i < 2 * T::kPanels; ++i) {
                const uint32_t at = queries + i / 2 * T::kPanelBytes + row(r) * 128 + lane_ % 4 * 32 + i % 2 * 16;
                const uint4 x = load_shared(at);
                store_shared(at, make_uint4(nan_to_zero(x.x), nan_to_zero(x.y), nan_to_zero(x.z), nan_to_zero(x.w)));
            }
        }
    }
    // Replaces NaN by 0 in a pair of elements.
    __device__ __forceinline__ static uint32_t nan_to_zero(uint32_t pair) {
        constexpr uint32_t kInfinity = std::is_same_v<Element, __half> ? 0x7c00 : 0x7f80, kMagnitude = 0x7fff;
        const uint32_t low = (pair & kMagnitude) > kInfinity ? 0 : pair & 0xffff;
        const uint32_t high = (pair >> 16 & kMagnitude) > kInfinity ? 0 : pair & 0xffff0000;
        return high | low;
    }

    uint32_t qdo_low_;            // lower half of the descriptor of the first stage
    float product_offset_ = 0.f;  // of the key tile
};

}  // namespace megatron_sb::hopper
