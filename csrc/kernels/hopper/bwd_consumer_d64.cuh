// The consumers of the backward at head_dim 64. Here dK and dV of a whole key tile fit into the registers of one
// warpgroup, so the work is split:
//
//     warpgroups 1 and 2, one for each half tile (bwd_scan_warpgroup.cuh):  S, dP, then A and dz
//     warpgroup 3 (sum):                                                    dQ = dz K,  dV^T += dO^T A,  dK^T += Q^T dz
//
// The sums dK and dV are transposed, because a product with all 128 keys in its columns reads less shared memory than
// two products with 64 columns. bwd_scan_warpgroup.cuh lists the barriers. At the end of a key tile, the sum warpgroup
// uses K and V as staging space for dK and dV before it releases the buffer.
#pragma once

#include "kernels/hopper/bwd_scan_warpgroup.cuh"

namespace megatron_sb::hopper {

template <class T>
class SumWarpgroup : BackwardThread<T> {
    using Base = BackwardThread<T>;
    using Base::control_, Base::kPanel, Base::kStage, Base::kTile, Base::step;
    using typename Base::Element;

  public:
    __device__ __forceinline__ SumWarpgroup(typename T::Shared& shared, const BackwardArguments& arguments)
        : Base(shared, arguments) {
        k_low_ = descriptor_low(shared_address(shared.k[0][0]), 0);
        qdo_low_ = descriptor_low(shared_address(shared.qdo[0]), 0);
        // A product with 128 keys in its columns finds the newer 64 keys T::kPanelBytes after the older ones.
        weights_low_ = descriptor_low(shared_address(shared.weights[0][0]), T::kPanelBytes);
        dz_low_ = descriptor_low(shared_address(shared.dz[0][0]), T::kPanelBytes);
        k_ = shared_address(shared.k[0][0]);
        v_ = shared_address(shared.v[0][0]);
        dq_staged_ = shared_address(shared.dq[0]);
    }

    __device__ __forceinline__ void run() {
        for (uint32_t tiles = 0;; ++tiles) {
            control_.qdo.wait_full(stage_);
            if (step(number_).flags & kEndOfWork) return;
            const auto tile = Place<T::kTileBuffers>::of(tiles);
            control_.kv.wait_full(tile);
            clear_accumulator(dk_);
            clear_accumulator(dv_);
            if constexpr (T::kBiases > 0)
#pragma unroll
                for (auto& half : dk_biases_) clear_accumulator(half);
            do {
                sum_step(tile.slot);
            } while (!(step(number_ - 1).flags & kLastStepOfTile));
            const Step last = step(number_ - 1);
            // K and V become staging space for dK and dV. No product still reads them: the scans finished theirs before
            // they arrived on dz.full, and each of the four warps has waited for its dQ before the first barrier of
            // write_transposed_dk_dv().
            this->write_transposed_dk_dv(last, k_ + tile.slot * 2 * T::kTileBytes, v_ + tile.slot * 2 * T::kTileBytes,
                                         dk_, dv_);
            if constexpr (T::kBiases > 0)
#pragma unroll
                for (int half = 0; half < 2; ++half) this->write_bias_dk(last, half, dk_biases_[half]);
            fence_async_proxy();
            __syncwarp();
            this->release(control_.kv, tile);
        }
    }

  private:
    __device__ __forceinline__ void sum_step(int buffer) {
        const auto slot = Place<T::kDzSlots>::of(number_);
        control_.qdo.wait_full(stage_);
        control_.dz.wait_full(slot);
        const uint32_t k = this->opaque(k_low_) + buffer * 2 * kTile;
        const uint32_t q = this->opaque(qdo_low_) + stage_.slot * kStage, d_o = q + kTile;
        const uint32_t weights = this->opaque(weights_low_) + slot.slot * 2 * kPanel;
        const uint32_t dz = this->opaque(dz_low_) + slot.slot * 2 * kPanel;
        wgmma_fence();
        this->add_product_over_rows(dv_, d_o, weights);
        this->add_product_over_rows(dk_, q, dz);
        if constexpr (T::kBiases > 0)
#pragma unroll
            for (int half = 0; half < 2; ++half) this->issue_bias_dk(dk_biases_[half], dz + half * kPanel, stage_.slot);
        wgmma_commit();
        this->issue_dq(dq_, dz, k);
        // The scans of the next steps need the stage and the slot, so release both before the wait for a slot of dQ.
        wgmma_wait<1>();
        fence_accumulator(dk_);
        fence_accumulator(dv_);
        if constexpr (T::kBiases > 0)
#pragma unroll
            for (auto& half : dk_biases_) fence_accumulator(half);
        control_.qdo.empty.arrive(stage_);
        wgmma_wait<0>();
        fence_accumulator(dq_);
        const float dz_sum = this->dz_sum(slot.slot);
        this->release(control_.dz, slot);
        this->pass_on_dq(number_, dq_, 0, dq_staged_, dz_sum);
        stage_ = stage_.next();
        ++number_;
    }

    uint32_t k_low_, qdo_low_, weights_low_, dz_low_, k_, v_;
    uint32_t dq_staged_;  // address of the first slot of dQ
    Stage<T> stage_;      // of step number_
    uint32_t number_ = 0;
    float dq_[32], dk_[64], dv_[64];  // dK and dV transposed: rows are columns of the head dimension
    float dk_biases_[2][4];           // with bias columns, of each half: rows are keys
};

}  // namespace megatron_sb::hopper
