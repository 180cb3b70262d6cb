// A warpgroup of the backward that only scans, at head_dim 64 and in the wide kernels:
//
//     S = Q K^T, dP = dO V^T, then A and dz of 64 keys and the rows of a step, into a ring of slots
//
// Sum warpgroups add them up (bwd_consumer_d64.cuh, bwd_consumer_wide.cuh). The tensor cores compute the sums of older
// steps while the scans compute A and dz. A scan waits only for the sums of the step that used the same slot before.
//
// Synchronisation.
//     barrier      arrives                                        waits
//     qdo.full     step loader                                    all warpgroups
//     qdo.empty    every thread, after its products               step loader, carry reader
//     kv.full      step loader                                    all warpgroups
//     kv.empty     each warp, at the end of a key tile; of the    step loader
//                  wide sum warpgroups every thread
//     dz.full      each scan warp, after it has written A and dz  sum warpgroups
//     dz.empty     each sum warp, after its products              scan warpgroups, before they write A
// bwd_half_tile.cuh describes the barriers of the carries, bwd_additions.cuh those of the additions to dQ.
#pragma once

#include "kernels/hopper/bwd_half_tile.cuh"

namespace megatron_sb::hopper {

template <class T>
class ScanWarpgroup : HalfScan<T> {
    using Base = HalfScan<T>;
    using Base::args_, Base::control_, Base::dp_, Base::lane_, Base::s_, Base::step;
    using Base::dz_, Base::qdo_low_, Base::v_low_, Base::weights_;
    using typename Base::Element;

  public:
    __device__ __forceinline__ ScanWarpgroup(typename T::Shared& shared, const BackwardArguments& arguments, int half)
        : Base(shared, arguments, half), d_o_low_(descriptor_low(shared_address(shared.d_o), 0)) {}

    __device__ __forceinline__ void run() {
        start_step(true);
        wgmma_wait<0>();
        fence_accumulator(s_);
        while (!(flags_ & kEndOfWork)) {
            // Keep the two loops one after the other. If one is inside the other, or both are branches of one loop,
            // ptxas no longer recognises which values are uniform.
            while (flags_ & kSlow) scan_step(this->slow_scan());
            while (!(flags_ & (kSlow | kEndOfWork))) scan_step(this->fast_scan());
        }
    }

  private:
    // Waits on qdo.full, and on kv.full at the first step of a tile, then issues S of step number_. Reads flags_ and
    // logit_offset_ of the step. After the last step it multiplies stale data; the result is not used. S does not wait
    // for the flags, except at the first step: reading them takes 90 cycles.
    __device__ __forceinline__ void start_step(bool tile_begins) {
        control_.qdo.wait_full(stage_);
        const auto tile = Place<T::kTileBuffers>::of(tiles_);
        if (tile_begins) {
            if (!(step(number_).flags & kEndOfWork)) {
                control_.kv.wait_full(tile);
                this->begin_gates(step(number_));
            }
            this->set_product_offset(number_);
        }
        flags_ = step(number_).flags;
        logit_offset_ = step(number_).offset;
        wgmma_fence();
        this->issue_scores(stage_.slot, tile.slot);
    }
    // Waits for dO and issues dP.
    __device__ __forceinline__ void issue_dp() {
        if constexpr (T::kSeparateDo) control_.d_o.wait_full(Place<1>::of(number_));
        const uint32_t d_o =
            T::kSeparateDo ? this->opaque(d_o_low_) : this->opaque(qdo_low_) + stage_.slot * Base::kStage + Base::kTile;
        this->template multiply_rows_by_keys<T::kHeadDimV>(
            dp_, d_o, this->opaque(v_low_) + tiles_ % T::kTileBuffers * T::kHalves * Base::kValueTile);
        wgmma_commit();
    }

    template <class Scan>
    __device__ __forceinline__ void scan_step(Scan scan) {
        const auto dz = Place<T::kDzSlots>::of(number_);
        wgmma_fence();
        issue_dp();
        const bool dz_is_empty = control_.dz.is_empty(dz);
        this->mask(number_, flags_);
        scan.exponentials(s_, {args_.scale_log2, logit_offset_}, lane_ % 4);
        this->load_carries(scan, number_, stage_);
        wgmma_wait<0>();
        fence_accumulator(dp_);
        control_.qdo.empty.arrive(stage_);
        if constexpr (T::kSeparateDo) this->release(control_.d_o, Place<1>::of(number_));
        if (!dz_is_empty) control_.dz.wait_empty(dz);
        constexpr int kSlotBytes = T::kHalves * T::kPanelBytes;
        this->write_weights_and_dz(
            scan, number_, stage_.slot, weights_ + dz.slot * kSlotBytes, dz_ + dz.slot * kSlotBytes, [] {}, [] {});
        if constexpr (T::kTileBuffers > 1) start_next_step();  // runs while A and dz become visible to wgmma
        fence_async_proxy();
        this->signal(control_.dz, dz);
        // With one buffer, the next key tile is loaded only after the sums of this one.
        if constexpr (T::kTileBuffers == 1) start_next_step();
        wgmma_wait<0>();
        fence_accumulator(s_);
    }
    __device__ __forceinline__ void start_next_step() {
        const bool tile_ends = flags_ & kLastStepOfTile;
        if (tile_ends) {
            this->end_gates(step(number_));
            this->release(control_.kv, Place<T::kTileBuffers>::of(tiles_++));
        }
        stage_ = stage_.next();
        ++number_;
        start_step(tile_ends);
    }

    const uint32_t d_o_low_;  // of dO, if it has a ring of its own
    Stage<T> stage_;          // of step number_
    uint32_t number_ = 0, tiles_ = 0;
    int flags_ = 0;             // of step number_
    float logit_offset_ = 0.f;  // of step number_
};

}  // namespace megatron_sb::hopper
