// The consumers of the backward at head_dim 64. Two warpgroups scan and one sums:
//
//     warpgroups 1 and 2, every other step each (scan):  S = Q K^T, dP = dO V^T, then A and dz into a slot
//     warpgroup 3 (sum):                                 dQ = dz K,  dV^T += dO^T A,  dK^T += Q^T dz
//
// A scan computes a step in two halves: first the 64 older keys, then the 64 newer ones. The mass and the prefix pass
// from half to half in registers. The products of the next half run while the scan computes:
//
//     the tensor cores run     meanwhile the scan computes
//     dP of the older half     e, products of 1 + e, the carry
//     S of the newer half      prefixes and dz of the older half, after A is stored
//     dP of the newer half     e, products of 1 + e
//     S of its next step       prefixes, carry and dz of the newer half
//
// The sums dK and dV are transposed, because a product with all 128 keys in its columns reads less shared memory than
// two products with 64 columns.
//
// Synchronisation.
//     barrier             arrives                                             waits
//     qdo_full            step loader                                         the scan of the step, sum warpgroup
//     qdo_empty           every thread of these two, after its products       step loader, carry reader
//     kv_full             step loader                                         all three warpgroups
//     kv_empty            each warp, after its last step of a key tile        step loader
//     carry_in_full       carry reader                                        the scan of the step
//     carry_out_full[1]   each warp of the scan of the step                   publisher
//     carry_out_empty[1]  publisher                                           scans, before they write the slot again
//     dz_full             each warp of the scan, after A and dz               sum warpgroup
//     dz_empty            each sum warp, after its products                   scans, before they write A
// bwd_output.cuh describes the barriers of the additions to dQ.
//
// A scan starts S of its next step, and for that waits for K of its key tile, before it signals dz_full of this step.
// The step loader makes sure that each key tile has at least two steps. So the next step belongs to this key tile or to
// the next one, whose buffer is free once all steps before this key tile are summed.
#pragma once

#include "kernels/hopper/bwd_scan_thread.cuh"

namespace megatron_sb::hopper {

template <class T>
class ScanWarpgroup : ScanThread<T> {
    using Base = ScanThread<T>;
    using Base::args_, Base::control_, Base::lane_, Base::product_offset_, Base::qdo_low_, Base::row, Base::step;
    using typename Base::Cursor, typename Base::Element, typename Base::FastScan;
    static constexpr int kOlder = 0, kNewer = 1;

  public:
    // Takes the steps first, first + 2, ...
    __device__ __forceinline__ ScanWarpgroup(typename T::Shared& shared, const BackwardArguments& arguments, int first)
        : Base(shared, arguments), number_(first) {
        cursor_.stage = first;
        k_low_ = descriptor_low(shared_address(shared.k[0][0]), 0);
        v_low_ = descriptor_low(shared_address(shared.v[0][0]), 0);
        weights_ = shared_address(shared.weights[first][0]);
        dz_ = shared_address(shared.dz[first][0]);
    }

    __device__ __forceinline__ void run() {
        static_assert(T::kDzSlots == 2, "each of the two scans has one slot");
        start_step();
        wgmma_wait<0>();
        fence_accumulator(s_older_);
        while (!(flags_ & kEndOfWork)) {
            // Keep the two loops one after the other. If one is inside the other, or both are branches of one loop,
            // ptxas no longer recognises which values are uniform.
            while (flags_ & kSlow) scan_step<SlowScan>();
            while (!(flags_ & (kSlow | kEndOfWork))) scan_step<FastScan>();
        }
    }

  private:
    // Waits on qdo_full, and on kv_full for the key tile, then issues S of the older half of step number_. Sets flags_
    // to the flags of the step. After the last step it multiplies stale data; the result is not used.
    __device__ __forceinline__ void start_step() {
        mbarrier_wait(&control_.qdo_full[cursor_.stage], cursor_.parity);
        flags_ = step(number_).flags;
        if (!(flags_ & kEndOfWork)) {
            const int tile = step(number_).tile_of_cta;
            if (tile != tile_) {
                this->release(&control_.kv_empty[tile_ % T::kTileBuffers]);
                tile_ = tile;
            }
            this->set_product_offset(number_);
            mbarrier_wait(&control_.kv_full[tile % T::kTileBuffers], tile / T::kTileBuffers & 1);
        }
        wgmma_fence();
        this->issue_rows_by_keys(s_older_, queries(cursor_.stage), keys(k_low_, kOlder));
    }
    __device__ __forceinline__ uint32_t queries(int stage) const {
        return this->opaque(qdo_low_) + stage * 2 * Base::kTile;
    }
    __device__ __forceinline__ uint32_t keys(uint32_t low, int half) const {
        return this->opaque(low) + (tile_ % T::kTileBuffers * 2 + half) * Base::kTile;
    }

    template <class Scan>
    __device__ __forceinline__ void scan_step() {
        const uint32_t number = number_;
        const int stage = cursor_.stage, parity = cursor_.parity;
        bool unstarted_nan[2] = {false, false};
        Scan scan(product_offset_);
        begin_half(scan, s_older_, kOlder);
        mbarrier_wait(&control_.carry_in_full[stage], parity);
#pragma unroll
        for (int r = 0; r < 2; ++r) scan.start(r, control_.carry_in[stage][row(r)], kOlder);
        note_nan(scan, unstarted_nan);
        wgmma_wait<0>();
        fence_accumulator(dp_);
        this->write_weights(scan, s_older_, dp_, weights_,
                            [&] { mbarrier_wait(&control_.dz_empty[number % 2], number / 2 & 1 ^ 1); });
        wgmma_fence();
        this->issue_rows_by_keys(s_newer_, queries(stage), keys(k_low_, kNewer));
        scan.prefixes(lane_ % 4);
        this->write_dz(scan, s_older_, dp_, dz_);
        wgmma_wait<0>();
        fence_accumulator(s_newer_);

        const float mass[2] = {scan.newer_mass[0], scan.newer_mass[1]};
        const float prefix[2] = {this->passed_prefix(scan.newer_prefix[0]), this->passed_prefix(scan.newer_prefix[1])};
        begin_half(scan, s_newer_, kNewer);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Carry carry = control_.carry_in[stage][row(r)];
            carry.mass = mass[r];
            carry.prefix = prefix[r];
            scan.start(r, carry, kNewer);
        }
        note_nan(scan, unstarted_nan);
        wgmma_wait<0>();
        fence_accumulator(dp_);
        mbarrier_arrive(&control_.qdo_empty[stage]);
        this->write_weights(scan, s_newer_, dp_, weights_ + T::kPanelBytes, [] {});
        cursor_ = cursor_.next().next();
        number_ += 2;
        start_step();
        scan.prefixes(lane_ % 4);
        this->store_carry_out(scan, number, kNewer);
        this->write_dz(scan, s_newer_, dp_, dz_ + T::kPanelBytes);
        // dK adds dz^T Q, and dz = 0 times NaN would be NaN. No product of a scan reads Q of this step any more. A row
        // that starts in the newer half although its scores in the older half are NaN has NaN for all of its dz there.
        if constexpr (std::is_same_v<Scan, SlowScan>) this->clear_nan_queries(unstarted_nan, stage);
        fence_async_proxy();
        this->signal(&control_.dz_full[number % 2]);
        wgmma_wait<0>();
        fence_accumulator(s_older_);
    }
    // Issues dP of a half and computes e from its scores.
    template <class Scan>
    __device__ __forceinline__ void begin_half(Scan& scan, float (&s)[32], int half) {
        wgmma_fence();
        this->issue_rows_by_keys(dp_, queries(cursor_.stage) + Base::kTile, keys(v_low_, half));
        this->mask(s, number_, flags_, half);
        scan.exponentials(s, args_.scale_log2, lane_ % 4);
    }
    template <class Scan>
    __device__ __forceinline__ static void note_nan(const Scan& scan, bool (&unstarted_nan)[2]) {
        if constexpr (std::is_same_v<Scan, SlowScan>) {
#pragma unroll
            for (int r = 0; r < 2; ++r) unstarted_nan[r] = unstarted_nan[r] || scan.has_unstarted_nan(r);
        }
    }
    uint32_t k_low_, v_low_;  // lower halves of the descriptors of the first buffer
    uint32_t weights_, dz_;   // addresses of A and dz of the older half
    Cursor cursor_;           // of step number_
    uint32_t number_;
    int tile_ = 0, flags_ = 0;
    float s_older_[32], s_newer_[32], dp_[32];
};

template <class T>
class SumWarpgroup : BackwardThread<T> {
    using Base = BackwardThread<T>;
    using Base::control_, Base::kPanel, Base::kTile, Base::step;
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
    }

    __device__ __forceinline__ void run() {
        for (int tiles = 0;; ++tiles) {
            mbarrier_wait(&control_.qdo_full[cursor_.stage], cursor_.parity);
            if (step(number_).flags & kEndOfWork) return;
            const int buffer = tiles % T::kTileBuffers;
            mbarrier_wait(&control_.kv_full[buffer], tiles / T::kTileBuffers & 1);
#pragma unroll
            for (int i = 0; i < 64; ++i) dk_[i] = dv_[i] = 0.f;
            fence_accumulator(dk_);
            fence_accumulator(dv_);
            do {
                sum_step(buffer);
            } while (!(step(number_ - 1).flags & kLastStepOfTile));
            const Step last = step(number_ - 1);
            // K and V become staging space for dK and dV. No product still reads them: the scans finished theirs before
            // they arrived on dz_full, and each of the four warps has waited for its dQ before the first barrier of
            // write_transposed_dk_dv().
            this->write_transposed_dk_dv(last, k_ + buffer * 2 * T::kTileBytes, v_ + buffer * 2 * T::kTileBytes, dk_,
                                         dv_);
            fence_async_proxy();
            this->signal(&control_.kv_empty[buffer]);
        }
    }

  private:
    __device__ __forceinline__ void sum_step(int buffer) {
        const uint32_t slot = number_ % T::kDzSlots, parity = number_ / T::kDzSlots & 1;
        mbarrier_wait(&control_.qdo_full[cursor_.stage], cursor_.parity);
        mbarrier_wait(&control_.dz_full[slot], parity);
        const uint32_t k = this->opaque(k_low_) + buffer * 2 * kTile;
        const uint32_t q = this->opaque(qdo_low_) + cursor_.stage * 2 * kTile, d_o = q + kTile;
        const uint32_t weights = this->opaque(weights_low_) + slot * 2 * kPanel;
        const uint32_t dz = this->opaque(dz_low_) + slot * 2 * kPanel;
        wgmma_fence();
        wgmma_overwrite<0, 1>(Element{}, dq_, descriptor(dz), descriptor(k));
#pragma unroll
        for (int i = 1; i < kBackwardKeyTile / 16; ++i)
            wgmma_accumulate<0, 1>(Element{}, dq_, descriptor(dz + i / 4 * kPanel + i % 4 * 2),
                                   descriptor(k + i / 4 * kTile + i % 4 * 128));
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < kStepRows / 16; ++i)
            wgmma_accumulate<1, 1>(Element{}, dv_, descriptor(d_o + i * 128), descriptor(weights + i * 128));
#pragma unroll
        for (int i = 0; i < kStepRows / 16; ++i)
            wgmma_accumulate<1, 1>(Element{}, dk_, descriptor(q + i * 128), descriptor(dz + i * 128));
        wgmma_commit();
        const auto target = this->dq_target(number_, 0);
        wgmma_wait<0>();
        fence_accumulator(dq_);
        fence_accumulator(dk_);
        fence_accumulator(dv_);
        this->release(&control_.dz_empty[slot]);
        mbarrier_arrive(&control_.qdo_empty[cursor_.stage]);
        this->template add_dq<2>(number_, target, dq_, 0);
        cursor_ = cursor_.next();
        ++number_;
    }

    uint32_t k_low_, qdo_low_, weights_low_, dz_low_, k_, v_;
    StageCursor<T::kQdoStages> cursor_;  // of step number_
    uint32_t number_ = 0;
    float dq_[32], dk_[64], dv_[64];  // dK and dV transposed: rows are columns of the head dimension
};

}  // namespace megatron_sb::hopper
