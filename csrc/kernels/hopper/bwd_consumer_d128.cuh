// A consumer warpgroup of the backward at head_dim 128. It owns 64 keys of the tile and all rows of a step. Round n
// computes, in this order:
//
//     dQ = dz K of step n - 1
//     S = Q K^T of step n + 1
//     dV += A^T dO and dK += dz^T Q of step n
//     dP = dO V^T of step n + 1, in the registers of dQ
//     A and dz of step n + 1, into shared memory
//
// dQ needs the dz of both warpgroups, and each warpgroup computes half of the columns of dQ. All other products use
// only the keys of the warpgroup. The carries of a step pass from the warpgroup of the older half tile to that of the
// newer one, and from there to the next key tile.
//
// Synchronisation.
//     barrier           arrives                                             waits
//     qdo.full          step loader                                         both warpgroups
//     qdo.empty         every thread, after its products                    step loader, carry reader
//     kv.full           step loader                                         both warpgroups
//     kv.empty          each warp, at the end of a key tile                 step loader
//     dz.full           each warp, after it has written its part of dz      both warpgroups, before dQ
//     dz.empty          each warp, after its dQ                             both warpgroups, before they write dz
//     own_half.full     every thread of the warpgroup, after A and dz       this warpgroup, before dV and dK
//     own_half.empty    every thread of the warpgroup, after dV and dK      this warpgroup, before it writes A
// bwd_half_tile.cuh describes the barriers of the carries, bwd_output.cuh those of the additions to dQ.
// wgmma_wait shows a warp only that its own part of a product is done. So the threads of a warpgroup need
// own_half.empty before one of them overwrites A.
#pragma once

#include "kernels/hopper/bwd_half_tile.cuh"

namespace megatron_sb::hopper {

template <class T>
class BackwardConsumer : HalfScan<T> {
    using Base = HalfScan<T>;
    using Base::control_, Base::dp_, Base::half_, Base::lane_, Base::s_, Base::step;
    using Base::dz_, Base::qdo_low_, Base::v_low_, Base::weights_;
    using Base::kPanel, Base::kStage, Base::kTile;
    using typename Base::Element;
    using DzPlace = Place<T::kDzSlots>;
    static constexpr int kHeadDim = T::kHeadDim;

  public:
    __device__ __forceinline__ BackwardConsumer(typename T::Shared& shared, const BackwardArguments& arguments,
                                                int half)
        : Base(shared, arguments, half) {
        k_columns_low_ = descriptor_low(shared_address(shared.k[0][0]) + half * T::kPanelBytes, 0);
    }

    __device__ __forceinline__ void run() {
        for (uint32_t tiles = 0;; ++tiles) {
            control_.qdo.wait_full(stage_);
            if (step(number_).flags & kEndOfWork) return;
            tile_ = Place<T::kTileBuffers>::of(tiles);
            control_.kv.wait_full(tile_);
            begin_tile();
            // Keep the loops one after the other. If one is inside the other, or both are branches of one loop, ptxas
            // no longer recognises which values are uniform. The second one leaves out the code for masks, with which
            // its rounds would take 1.5% longer.
            while (flags_ & kSlowNext) run_round<true>(this->slow_scan());
            while (!(flags_ & (kLastStepOfTile | kMaskedNext << half_))) run_round<false>(this->fast_scan());
            while (!(flags_ & kLastStepOfTile)) run_round<true>(this->fast_scan());
            end_tile();
        }
    }

  private:
    // ---- products -----------------------------------------------------------------------------------------------

    // `zero` delays the product until it is known.
    __device__ __forceinline__ void issue_dp(int stage, uint32_t zero = 0) {
        this->template multiply_rows_by_keys<kHeadDim>(dp_, this->opaque(qdo_low_) + stage * kStage + kTile + zero,
                                                       this->opaque(v_low_));
        wgmma_commit();
    }
    // Issues dQ = dz K into the registers of dP: one of the two is dead whenever the other is in use.
    __device__ __forceinline__ void issue_dq(int slot) {
        const uint32_t dz = this->opaque(dz_ >> 4) + slot * 2 * kPanel - half_ * kPanel;
        Base::issue_dq(dp_, dz, this->opaque(k_columns_low_));
    }
    // Issues dV += A^T dO and dK += dz^T Q.
    __device__ __forceinline__ void issue_dk_dv(int stage, int slot) {
        constexpr uint32_t kNextColumns = uint32_t(kPanel) << 16;
        const uint32_t q = (this->opaque(qdo_low_) + stage * kStage) | kNextColumns, d_o = q + kTile;
        const uint32_t dz = this->opaque(dz_ >> 4) + slot * 2 * kPanel, weights = this->opaque(weights_ >> 4);
        this->add_product_over_rows(dv_, weights, d_o);
        this->add_product_over_rows(dk_, dz, q);
        if constexpr (T::kBiases > 0) this->issue_bias_dk(dk_biases_, dz, stage);
        wgmma_commit();
    }

    // ---- rounds -------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void begin_tile() {
        if constexpr (T::kBiases > 0) clear_accumulator(dk_biases_);
        clear_accumulator(dk_);
        clear_accumulator(dv_);
        wgmma_fence();
        this->issue_scores(stage_.slot, 0);
        issue_dp(stage_.slot);
        wgmma_wait<0>();
        fence_accumulator(s_);
        fence_accumulator(dp_);
        flags_ = step(number_).flags;
        this->set_product_offset(number_);
        this->mask(number_, flags_);
        this->begin_gates(step(number_));
        flags_& kSlow ? scan_first_step(this->slow_scan()) : scan_first_step(this->fast_scan());
        first_round_ = true;
        next_is_ready_ = false;
    }
    template <class Scan>
    __device__ __forceinline__ void scan_first_step(Scan scan) {
        scan.exponentials(s_, this->logits(number_), lane_ % 4);
        this->load_carries(scan, number_, stage_);
        control_.own_half[half_].empty.arrive({});
        write_weights_and_dz(scan, number_, stage_);
    }

    template <bool kMayBeMasked, class Scan>
    __device__ __forceinline__ void run_round(Scan scan) {
        const Stage<T> next = stage_.next();
        if (!next_is_ready_) {
            wait_for_dz(number_ - 1);
            control_.qdo.wait_full(next);
        }
        const int next_flags = step(number_ + 1).flags;
        const auto target = this->dq_target(number_ - 1, half_);
        // All products of the round are issued together. Each time that the four warps meet to issue costs 60 to 100
        // cycles.
        control_.own_half[half_].wait_full(Place<1>::of(number_));
        wgmma_fence();
        issue_dq((number_ - 1) & 1);  // in the first round of a tile the result is not used
        this->issue_scores(next.slot, 0);
        issue_dk_dv(stage_.slot, number_ & 1);
        wgmma_wait<2>();
        fence_accumulator(dp_);
        if (!first_round_) finish_dq(number_ - 1, target);
        first_round_ = false;
        wgmma_wait<1>();
        fence_accumulator(s_);
        this->add_gate_sums();
        if constexpr (kMayBeMasked) this->mask(number_ + 1, next_flags);
        scan.exponentials(s_, this->logits(number_ + 1), lane_ % 4);
        // dP overwrites dQ, which the additions in finish_dq() read for some time. Half of the exponentials come first,
        // or ptxas would make all of them wait.
        wgmma_fence();
        issue_dp(next.slot, scan.zero_after_row_0());
        this->load_carries(scan, number_ + 1, next);
        wgmma_wait<0>();
        fence_accumulator(dp_);
        control_.own_half[half_].empty.arrive({});
        control_.qdo.empty.arrive(stage_);
        write_weights_and_dz(scan, number_ + 1, next);
        stage_ = next;
        ++number_;
        flags_ = next_flags;
    }

    __device__ __forceinline__ void end_tile() {
        const Step last = step(number_);
        this->end_gates(last);
        wait_for_dz(number_ - 1);
        control_.own_half[half_].wait_full(Place<1>::of(number_));
        wgmma_fence();
        issue_dq((number_ - 1) & 1);
        issue_dk_dv(stage_.slot, number_ & 1);
        wgmma_wait<1>();
        fence_accumulator(dp_);
        if (!first_round_) finish_dq(number_ - 1, this->dq_target(number_ - 1, half_));
        wgmma_wait<0>();
        if constexpr (T::kBiases > 0) fence_accumulator(dk_biases_);
        fence_accumulator(dk_);
        fence_accumulator(dv_);
        control_.qdo.empty.arrive(stage_);
        wait_for_dz(number_);
        wgmma_fence();
        issue_dq(number_ & 1);
        wgmma_wait<0>();
        fence_accumulator(dp_);
        this->release(control_.kv, tile_);
        finish_dq(number_, this->dq_target(number_, half_));
        stage_ = stage_.next();
        ++number_;
        // The slot of A becomes staging space. After this barrier, all four warps have finished the dV product that
        // reads it. The next write of A waits on own_half.empty, on which each thread arrives after its use of the
        // staging space.
        warpgroup_barrier(barrier_of_consumer(half_));
        this->write_keys(this->dk(), last, half_, weights_, dk_);
        if constexpr (T::kBiases > 0) this->write_bias_dk(last, half_, dk_biases_);
        this->write_keys(this->dv(), last, half_, weights_, dv_);
    }

    // ---- hand-overs ---------------------------------------------------------------------------------------------

    // Waits on own_half.empty before it writes A, and on dz.empty before it writes dz. Arrives on own_half.full and on
    // dz.full. Between A and dz it also tests, without waiting, whether the next round can start.
    template <class Scan>
    __device__ __forceinline__ void write_weights_and_dz(Scan& scan, uint32_t number, const Stage<T>& stage) {
        const auto dz = DzPlace::of(number);
        const bool dz_is_empty = control_.dz.is_empty(dz);
        Base::write_weights_and_dz(
            scan, number, stage.slot, weights_, dz_ + dz.slot * 2 * T::kPanelBytes,
            [&] { control_.own_half[half_].empty.wait(Place<1>::of(number)); },
            [&] {
                if (!dz_is_empty) control_.dz.wait_empty(dz);
                next_is_ready_ = control_.qdo.full.has_happened(stage.next()) &
                                 control_.dz.full.has_happened(DzPlace::of(number - 1));
            });
        fence_async_proxy();
        control_.own_half[half_].full.arrive({});
        this->signal(control_.dz, dz);
    }
    // Releases dz after dQ: each warp arrives on dz.empty, on which the warps that write dz wait. Then adds dQ in
    // memory.
    __device__ __forceinline__ void finish_dq(uint32_t number, const typename Base::DqTarget& target) {
        const auto dz = DzPlace::of(number);
        const float dz_sum = this->dz_sum(dz.slot);
        this->release(control_.dz, dz);
        this->add_dq(number, target, dp_, half_, dz_sum);
    }
    // Waits until both warpgroups have written dz of step `number`.
    __device__ __forceinline__ void wait_for_dz(uint32_t number) { control_.dz.wait_full(DzPlace::of(number)); }

    uint32_t k_columns_low_;
    Stage<T> stage_;               // of step number_
    Place<T::kTileBuffers> tile_;  // of the key tile
    uint32_t number_ = 0;
    int flags_ = 0;
    bool first_round_ = true;     // of the key tile; there is no previous step
    bool next_is_ready_ = false;  // whether the next round need not wait for dz and Q
    float dk_[kHeadDim / 2], dv_[kHeadDim / 2];
    float dk_biases_[4];  // with bias columns
};

}  // namespace megatron_sb::hopper
