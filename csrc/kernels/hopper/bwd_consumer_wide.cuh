// The warpgroups of the wide backward that sum. A key tile has 64 keys. Warpgroup 1 scans (bwd_scan_warpgroup.cuh). dK
// and dV together do not fit the registers of one warpgroup, so two share the sums:
//
//     warpgroup 2:  dK += dz^T Q    and some panels of dQ = dz K
//     warpgroup 3:  dV += A^T dO    and the other panels of dQ
//
// A panel is 64 columns. README.md lists the steps of both warpgroups, and bwd_scan_warpgroup.cuh the barriers. With
// 256 columns, dO has a ring of its own (d_o), because there is room for only one tile of it. At the end of a key tile,
// each of the two uses a panel of V as staging space before it releases the buffer.
#pragma once

#include "kernels/hopper/bwd_scan_warpgroup.cuh"

namespace megatron_sb::hopper {

// kKeys: sums dK; otherwise dV.
template <class T, bool kKeys>
class WideSumWarpgroup : BackwardThread<T> {
    using Base = BackwardThread<T>;
    using Base::control_, Base::kPanel, Base::kStage, Base::step;
    using typename Base::Element;
    static constexpr bool kSeparate = T::kSeparateDo && !kKeys;  // waits for dO on a ring of its own
    static constexpr int kColumns = kKeys ? T::kHeadDim : T::kHeadDimV;
    // ptxas accepts no product of 256 columns in a kernel of 512 threads.
    static constexpr int kPieces = kColumns == 256 ? 2 : 1, kPieceColumns = kColumns / kPieces;
    // Panels of dQ: kFirstPanel, kFirstPanel + kNextPanel, ... With 192 columns, 0 beside dK, and 1 and 2 beside dV.
    // With 256, every second one, because panels are added in their order.
    static constexpr int kFirstPanel = kKeys ? 0 : 1, kNextPanel = T::kHeadDim == 192 ? (kKeys ? 3 : 1) : 2;

  public:
    __device__ __forceinline__ WideSumWarpgroup(typename T::Shared& shared, const BackwardArguments& arguments)
        : Base(shared, arguments) {
        k_low_ = descriptor_low(shared_address(shared.k[0][0]), 0);
        // A product with all columns finds the next 64 of them after T::kPanelBytes.
        uint8_t* const rows = kKeys ? shared.qdo[0] : T::kSeparateDo ? shared.d_o : shared.qdo[0] + T::kTileBytes;
        rows_low_ = descriptor_low(shared_address(rows), T::kPanelBytes);
        dz_low_ = descriptor_low(shared_address(shared.dz[0][0]), 0);
        scores_low_ = kKeys ? dz_low_ : descriptor_low(shared_address(shared.weights[0][0]), 0);
        dq_staged_ = shared_address(shared.dq[0]);
        staged_ = shared_address(shared.v[0][0]) + (kKeys ? 0 : T::kPanelBytes);
    }

    __device__ __forceinline__ void run() {
        for (uint32_t tiles = 0;; ++tiles) {
            control_.qdo.wait_full(stage_);
            if (step(number_).flags & kEndOfWork) return;
            const auto tile = Place<T::kTileBuffers>::of(tiles);
            control_.kv.wait_full(tile);
#pragma unroll
            for (auto& piece : sum_) clear_accumulator(piece);
            do {
                sum_step();
            } while (!(step(number_ - 1).flags & kLastStepOfTile));
            // V becomes staging space. Only the scan warpgroup reads V, and its products were done before it arrived on
            // dz.full of the last step. racecheck of compute-sanitizer needs the barrier to know that the copies of V
            // are done: one lane of the loader arrived on kv.full for all.
            warpgroup_barrier(kKeys ? NamedBarrier::kConsumer1 : NamedBarrier::kConsumer2);
            const Step last = step(number_ - 1);
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
                this->write_keys(kKeys ? this->dk() : this->dv(), last, 0, staged_, sum_[i], i * kPieceColumns);
            fence_async_proxy();
            control_.kv.empty.arrive(tile);
        }
    }

  private:
    __device__ __forceinline__ void sum_step() {
        const auto slot = Place<T::kDzSlots>::of(number_);
        control_.qdo.wait_full(stage_);
        if constexpr (kSeparate) control_.d_o.wait_full(Place<1>::of(number_));
        control_.dz.wait_full(slot);
        wgmma_fence();
        if constexpr (kKeys) {
            issue_dq(kFirstPanel, slot.slot);
            issue_sum(slot.slot);
            wgmma_wait<1>();
            fence_accumulator(dq_);
            this->pass_on_dq(number_, dq_, kFirstPanel, dq_staged_);
            wgmma_wait<0>();
            fence_sum();
            release_rows();
        } else {  // the loader waits for the slot of dO, so dV comes first
            issue_sum(slot.slot);
            issue_dq(kFirstPanel, slot.slot);
            wgmma_wait<1>();
            fence_sum();
            release_rows();
            wgmma_wait<0>();
            fence_accumulator(dq_);
            this->pass_on_dq(number_, dq_, kFirstPanel, dq_staged_);
        }
#pragma unroll
        for (int panel = kFirstPanel + kNextPanel; panel < T::kPanels; panel += kNextPanel) {
            wgmma_fence();
            issue_dq(panel, slot.slot);
            wgmma_wait<0>();
            fence_accumulator(dq_);
            if (panel + kNextPanel >= T::kPanels) this->release(control_.dz, slot);
            this->pass_on_dq(number_, dq_, panel, dq_staged_);
        }
        if (kFirstPanel + kNextPanel >= T::kPanels) this->release(control_.dz, slot);
        stage_ = stage_.next();
        ++number_;
    }

    __device__ __forceinline__ void release_rows() {
        control_.qdo.empty.arrive(stage_);
        if constexpr (kSeparate) this->release(control_.d_o, Place<1>::of(number_));
    }
    // Issues dK += dz^T Q, or dV += A^T dO.
    __device__ __forceinline__ void issue_sum(int slot) {
        const uint32_t rows = this->opaque(rows_low_) + (kSeparate ? 0 : stage_.slot * kStage);
        const uint32_t scores = this->opaque(scores_low_) + slot * kPanel;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
            this->add_product_over_rows(sum_[piece], scores, rows + piece * (kPieceColumns / 64) * kPanel);
        wgmma_commit();
    }
    __device__ __forceinline__ void fence_sum() {
#pragma unroll
        for (auto& piece : sum_) fence_accumulator(piece);
    }
    // Issues a panel of dQ = dz K.
    __device__ __forceinline__ void issue_dq(int panel, int slot) {
        Base::issue_dq(dq_, this->opaque(dz_low_) + slot * kPanel, this->opaque(k_low_) + panel * kPanel);
    }

    uint32_t k_low_, rows_low_, dz_low_, scores_low_;
    uint32_t dq_staged_, staged_;  // addresses of the first slot of dQ, and of the staging space of dK or dV
    Stage<T> stage_;               // of step number_
    uint32_t number_ = 0;
    float dq_[32], sum_[kPieces][kPieceColumns / 2];  // sum_: dK or dV
};

}  // namespace megatron_sb::hopper
