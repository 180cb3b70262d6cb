// The consumers of the backward at head_dim 64. Here dK and dV of a whole key tile fit into the registers of one
// warpgroup, so the work is split:
//
//     warpgroups 1 and 2, one for each half tile (scan):  S = Q K^T, dP = dO V^T, then A and dz into a ring of 2 slots
//     warpgroup 3 (sum):                                  dQ = dz K,  dV^T += dO^T A,  dK^T += Q^T dz
//
// The sums dK and dV are transposed, because a product with all 128 keys in its columns reads less shared memory than
// two products with 64 columns.
//
// The tensor cores compute the sums of older steps while the scans compute A and dz. A scan waits only for the sums of
// the step that used the same slot before, two steps earlier.
//
// Synchronisation.
//     barrier      arrives                                        waits
//     qdo.full     step loader                                    all three warpgroups
//     qdo.empty    every thread, after its products               step loader, carry reader
//     kv.full      step loader                                    all three warpgroups
//     kv.empty     each warp, at the end of a key tile            step loader
//     dz.full      each scan warp, after it has written A and dz  sum warpgroup
//     dz.empty     each sum warp, after its products              scan warpgroups, before they write A
// bwd_half_tile.cuh describes the barriers of the carries, bwd_additions.cuh those of the additions to dQ.
// At the end of a key tile, the sum warpgroup uses K and V as staging space for dK and dV before it releases the
// buffer.
#pragma once

#include "kernels/hopper/bwd_half_tile.cuh"

namespace megatron_sb::hopper {

template <class T>
class ScanWarpgroup : HalfScan<T> {
    using Base = HalfScan<T>;
    using Base::args_, Base::control_, Base::dp_, Base::half_, Base::lane_, Base::product_offset_, Base::s_, Base::step,
        Base::warp_;
    using Base::dz_, Base::k_low_, Base::qdo_low_, Base::v_low_, Base::weights_;
    using typename Base::Element;

  public:
    __device__ __forceinline__ ScanWarpgroup(typename T::Shared& shared, const BackwardArguments& arguments, int half)
        : Base(shared, arguments, half) {}

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
    // Waits on qdo.full, and on kv.full at the first step of a tile, then issues S of step number_. Sets flags_ to the
    // flags of the step. After the last step it multiplies stale data; the result is not used. S does not wait for the
    // flags, except at the first step: reading them takes 90 cycles.
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
        wgmma_fence();
        this->issue_rows_by_keys(s_, queries(), this->opaque(k_low_) + tile.slot * 2 * Base::kTile);
    }
    __device__ __forceinline__ uint32_t queries() const {
        return this->opaque(qdo_low_) + stage_.slot * 2 * Base::kTile;
    }

    template <class Scan>
    __device__ __forceinline__ void scan_step(Scan scan) {
        wgmma_fence();
        this->issue_rows_by_keys(dp_, queries() + Base::kTile,
                                 this->opaque(v_low_) + tiles_ % T::kTileBuffers * 2 * Base::kTile);
        this->mask(number_, flags_);
        scan.exponentials(s_, args_.scale_log2, lane_ % 4);
        this->load_carries(scan, number_, stage_);
        wgmma_wait<0>();
        fence_accumulator(dp_);
        control_.qdo.empty.arrive(stage_);
        const auto dz = Place<T::kDzSlots>::of(number_);
        control_.dz.wait_empty(dz);
        constexpr int kSlotBytes = 2 * T::kPanelBytes;
        this->write_weights_and_dz(
            scan, number_, stage_.slot, weights_ + dz.slot * kSlotBytes, dz_ + dz.slot * kSlotBytes, [] {}, [] {});
        start_next_step();  // runs while A and dz become visible to wgmma
        fence_async_proxy();
        this->signal(control_.dz, dz);
        wgmma_wait<0>();
        fence_accumulator(s_);
    }
    __device__ __forceinline__ void start_next_step() {
        const bool tile_ends = flags_ & kLastStepOfTile;
        if (tile_ends) {
            const auto tile = Place<T::kTileBuffers>::of(tiles_++);
            this->end_gates(step(number_));
            this->release(control_.kv, tile);
        }
        stage_ = stage_.next();
        ++number_;
        start_step(tile_ends);
    }

    Stage<T> stage_;  // of step number_
    uint32_t number_ = 0, tiles_ = 0;
    int flags_ = 0;
};

template <class T>
class SumWarpgroup : BackwardThread<T> {
    using Base = BackwardThread<T>;
    using Base::control_, Base::kPanel, Base::kTile, Base::lane_, Base::step, Base::warp_;
    using typename Base::Element;

  public:
    __device__ __forceinline__ SumWarpgroup(typename T::Shared& shared, const BackwardArguments& arguments)
        : Base(shared, arguments) {
        k_low_ = descriptor_low(shared_address(shared.k[0][0]), 0);
        qdo_low_ = descriptor_low(shared_address(shared.qdo[0][0]), 0);
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
#pragma unroll
            for (int i = 0; i < 64; ++i) dk_[i] = dv_[i] = 0.f;
            fence_accumulator(dk_);
            fence_accumulator(dv_);
            do {
                sum_step(tile.slot);
            } while (!(step(number_ - 1).flags & kLastStepOfTile));
            const Step last = step(number_ - 1);
            // K and V become staging space for dK and dV. No product still reads them: the scans finished theirs before
            // they arrived on dz.full, and each of the four warps has waited for its dQ before the first barrier of
            // write_transposed_dk_dv().
            this->write_transposed_dk_dv(last, k_ + tile.slot * 2 * T::kTileBytes, v_ + tile.slot * 2 * T::kTileBytes,
                                         dk_, dv_);
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
        const uint32_t q = this->opaque(qdo_low_) + stage_.slot * 2 * kTile, d_o = q + kTile;
        const uint32_t weights = this->opaque(weights_low_) + slot.slot * 2 * kPanel;
        const uint32_t dz = this->opaque(dz_low_) + slot.slot * 2 * kPanel;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kStepRows / 16; ++i)
            wgmma_accumulate<1, 1>(Element{}, dv_, descriptor(d_o + i * 128), descriptor(weights + i * 128));
#pragma unroll
        for (int i = 0; i < kStepRows / 16; ++i)
            wgmma_accumulate<1, 1>(Element{}, dk_, descriptor(q + i * 128), descriptor(dz + i * 128));
        wgmma_commit();
        wgmma_overwrite<0, 1>(Element{}, dq_, descriptor(dz), descriptor(k));
#pragma unroll
        for (int i = 1; i < kBackwardKeyTile / 16; ++i)
            wgmma_accumulate<0, 1>(Element{}, dq_, descriptor(dz + i / 4 * kPanel + i % 4 * 2),
                                   descriptor(k + i / 4 * kTile + i % 4 * 128));
        wgmma_commit();
        // The scans of the next steps need the stage and the slot, so release both before the wait for a slot of dQ.
        wgmma_wait<1>();
        fence_accumulator(dk_);
        fence_accumulator(dv_);
        control_.qdo.empty.arrive(stage_);
        wgmma_wait<0>();
        fence_accumulator(dq_);
        this->release(control_.dz, slot);
        pass_on_dq();
        stage_ = stage_.next();
        ++number_;
    }

    // Hands dQ of step number_ to BulkAdder through shared memory, or writes the total if no newer key tile adds to it.
    // Waits on dq_staged.empty and dq_turn, on which BulkAdder arrives. Arrives on dq_staged.full, on which it waits.
    __device__ __forceinline__ void pass_on_dq() {
        const auto slot = Place<T::kDqSlots>::of(number_);
        control_.dq_staged.wait_empty(slot);
        if (step(number_).flags & kNewestKeyTile) {
            control_.dq_turn.wait(TurnPlace<T>::of(num_newest_++));
            this->template write_total_dq<2>(number_, this->dq_target(number_, 0).sum, dq_, 0);
        } else {
            const uint32_t to = dq_staged_ + slot.slot * sizeof(float) * T::kDqFloats + (warp_ * 32 + lane_) * 16;
#pragma unroll
            for (int v = 0; v < kDqVectors; ++v) {
                const float* const x = dq_ + 4 * v;
                store_shared(to + v * 2048, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                                       __float_as_uint(x[2]), __float_as_uint(x[3])));
            }
            fence_async_proxy();
        }
        this->signal(control_.dq_staged, slot);
    }

    uint32_t k_low_, qdo_low_, weights_low_, dz_low_, k_, v_;
    uint32_t dq_staged_;       // address of the first slot of dQ
    uint32_t num_newest_ = 0;  // steps so far in which this was the newest key tile
    Stage<T> stage_;           // of step number_
    uint32_t number_ = 0;
    float dq_[32], dk_[64], dv_[64];  // dK and dV transposed: rows are columns of the head dimension
};

}  // namespace megatron_sb::hopper
