// Shared by the warpgroups that scan, for all numbers of columns: S and dP of a step with half a key tile, masks,
// carries, and the stores of A and dz. The key tiles of wide heads have one half; it is the newer one in the table.
//
// Synchronisation of the carries.
//     barrier                 arrives                          waits
//     carry_in_full           CarryReader                      both halves
//     qdo.empty               every consumer thread            CarryReader, before it writes carry_in again
//     carry_out_full[0]       a warp of the older half         the same warp of the newer half
//     older_carry_out_empty   every thread of the newer half   older half, before it writes the slot again, and
//                                                              before it removes NaN from Q (clear_nan_queries)
//     carry_out_full[1]       each warp of the newer half      Publisher
//     newer_carry_out_empty   Publisher                        newer half, before it writes the slot again
#pragma once

#include <type_traits>

#include "kernels/hopper/bwd_gated_scan.cuh"
#include "kernels/hopper/bwd_output.cuh"

namespace megatron_sb::hopper {

// A thread that computes A and dz of a step for one half of the key tile.
template <class T>
class HalfScan : protected BackwardThread<T> {
  protected:
    using Base = BackwardThread<T>;
    using Base::args_, Base::control_, Base::lane_, Base::row, Base::step, Base::warp_;
    using Base::kPanel, Base::kStage, Base::kTile, Base::kValueTile;
    using typename Base::Element;

    __device__ __forceinline__ HalfScan(typename T::Shared& shared, const BackwardArguments& arguments, int half)
        : Base(shared, arguments), half_(half) {
        k_low_ = descriptor_low(shared_address(shared.k[0][half]), 0);
        v_low_ = descriptor_low(shared_address(shared.v[0][half]), 0);
        qdo_low_ = descriptor_low(shared_address(shared.qdo[0]), 0);
        weights_ = shared_address(shared.weights[0][half]);
        dz_ = shared_address(shared.dz[0][half]);
    }

    // Issues S = Q K^T for the rows of a stage and the 64 keys of this half.
    __device__ __forceinline__ void issue_scores(int stage, int buffer) {
        multiply_rows_by_keys<T::kHeadDim>(s_, this->opaque(qdo_low_) + stage * kStage,
                                           this->opaque(k_low_) + buffer * T::kHalves * kTile);
        if constexpr (T::kBiases > 0) {
            const uint32_t zeros = shared_address(this->shared_.zeros);
            const uint32_t q = shared_address(this->shared_.q_biases[stage]);
            const uint32_t k = shared_address(this->shared_.k_biases[buffer][half_]);
            wgmma_accumulate(Element{}, s_, bias_descriptor(q, zeros), bias_descriptor(k, zeros));
        }
        wgmma_commit();
    }
    // d = rows keys^T for 64 rows of Q or dO and the 64 keys of this half.
    template <int kColumns>
    __device__ __forceinline__ static void multiply_rows_by_keys(float (&d)[32], uint32_t rows, uint32_t keys) {
        wgmma_overwrite(Element{}, d, descriptor(rows), descriptor(keys));
#pragma unroll
        for (int i = 1; i < kColumns / 16; ++i) {
            const int at = i / 4 * kPanel + i % 4 * 2;
            wgmma_accumulate(Element{}, d, descriptor(rows + at), descriptor(keys + at));
        }
    }

    // Call this once a step of a new key tile is there. The lane makes the offset differ between threads. Otherwise
    // ptxas keeps it in a uniform register, and moves it there between the products that follow.
    __device__ __forceinline__ void set_product_offset(uint32_t number) {
        product_offset_ = UnbiasedProduct::offset_of(4 * step(number).tile + lane_ % 4);
    }

    // The scans of a step.
    __device__ __forceinline__ auto slow_scan() const {
        if constexpr (T::kGated)
            return SlowScan<GatedScores, false>(half_, product_offset_,
                                                GatedScores{control_.gates_of_half[half_], lane_ % 4});
        else
            return SlowScan<PlainScores, T::kKeepsReciprocals>(half_, product_offset_);
    }
    __device__ __forceinline__ auto fast_scan() const {
        if constexpr (T::kGated)
            return GatedFastScan<T::kHeadDim == 64>(product_offset_, control_.gates_of_half[half_], lane_ % 4);
        else
            return FastScan<T::kKeepsReciprocals>(product_offset_);
    }

    // Reads the gates of this half of a key tile. All threads of the warpgroup call it before the first scan of the
    // tile, and after end_gates() of the last tile.
    __device__ __forceinline__ void begin_gates(const Step& step) {
        if constexpr (T::kGated) {
            gate_sums_[0] = gate_sums_[1] = 0.f;
            clear_accumulator(n_sums_);
            const int key = threadIdx.x % 128, key_of_tile = half_ * kHalfTileKeys + key;
            if (key < kHalfTileKeys) {
                const Rows<const void*>& k = args_.params.k;
                const int64_t at = offset_of(k, step.batch, step.kv_head, step.k_row + key_of_tile);
                float c = Gate::kLeastC;
                if (key_of_tile < step.tile_keys)
                    c = Gate::c_of<Element>(Gate::words(k, at, args_.params.sizes.head_dim));
                control_.gates_of_half[half_][key] = c;
            }
            warpgroup_barrier(barrier_of_consumer(half_));  // the gates are written
        }
    }
    // Writes the gradients of the gates of a key tile to dk, in the columns after the keys. All threads of the
    // warpgroup call it after the last scan of the tile.
    __device__ __forceinline__ void end_gates(const Step& last) {
        if constexpr (T::kGated) {
            common::sum_over_rows(n_sums_, gate_sums_);
            auto& sums = control_.gate_sums[half_];
            const int first = lane_ % 4 * kBackwardKeysPerThread + lane_ / 4 * 2, key = threadIdx.x % 128;
            sums[warp_][first] = gate_sums_[0];
            sums[warp_][first + 1] = gate_sums_[1];
            warpgroup_barrier(barrier_of_consumer(half_));  // all sums are written, all gates are read
            if (key < kHalfTileKeys && half_ * kHalfTileKeys + key < last.tile_keys) {
                const float sum = sums[0][key] + sums[1][key] + sums[2][key] + sums[3][key];
                this->write_gate_gradient(last, half_ * kHalfTileKeys + key,
                                          sum * Gate::inverse(control_.gates_of_half[half_][key]));
            }
            // The sums are written again after the barrier of begin_gates(). The same thread writes the gate of its
            // key.
        }
    }

    __device__ __forceinline__ HeadLogits logits(uint32_t number) const {
        return {args_.scale_log2, step(number).offset};
    }

    // Hides the keys that a row does not see: e of a hidden key is 0. Rows after the end of the step see none.
    __device__ __forceinline__ void mask(uint32_t number, int flags) {
        if (!(flags & kMasked << half_)) return;
        const int visible = step(number).visible - half_ * kHalfTileKeys;
        const int num_keys = step(number).num_keys - half_ * kHalfTileKeys;
        const float hidden = copysignf(INFINITY, -args_.scale_log2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int visible_to_row = row(r) < step(number).num_rows ? min(visible + row(r), num_keys) : 0;
            const int num_visible = visible_to_row - lane_ % 4 * kBackwardKeysPerThread;
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k)
                if (k >= num_visible) s_[accumulator_register(r, k)] = hidden;
        }
    }

    // Whether another half of the tile hands its carries to this one.
    __device__ __forceinline__ bool follows_half() const {
        return T::kHalves == 2 && half_ == 1;
    }
    // Waits for the carries at the older edge of this half, and passes them to the scan.
    template <class Scan>
    __device__ __forceinline__ void load_carries(Scan& scan, uint32_t number, const Stage<T>& stage) {
        const auto place = CarryPlace<T>::of(number);
        control_.carry_in_full.wait(stage);
        if (follows_half()) control_.carry_out_full[0][warp_].wait(place);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Carry carry = control_.carry_in[stage.slot][row(r)];
            if (follows_half()) {
                const float2 from_older_half = control_.carry_out[0][place.slot][row(r)];
                carry.mass = from_older_half.x;
                carry.prefix = from_older_half.y;
            }
            scan.start(r, carry);
        }
        if (follows_half()) control_.older_carry_out_empty.arrive(place);
    }

    // Computes A and dz from e (in s_) and dP (in dp_), stores them in shared memory, and stores the carries at the
    // newer edge. Calls before_weights and before_dz before the first store of A and of dz; they must wait until the
    // slot is empty. The caller must then fence and signal that the slots are full.
    template <class Scan, class BeforeWeights, class BeforeDz>
    __device__ __forceinline__ void write_weights_and_dz(Scan& scan, uint32_t number, int stage, uint32_t weights,
                                                         uint32_t dz, const BeforeWeights& before_weights,
                                                         const BeforeDz& before_dz) {
        // One branch for all that follows. A branch for each row in each function of the scan costs 2% to 4%.
        const ScanForm form = scan.form();
        if constexpr (Scan::kIsSlow)
            if (form == ScanForm::kKeyByKey) {
                scan.begin_key_by_key(s_, lane_ % 4);
                return write_rows<ScanForm::kKeyByKey>(scan, number, stage, weights, dz, before_weights, before_dz);
            }
        if (form == ScanForm::kLarge)
            write_rows<ScanForm::kLarge>(scan, number, stage, weights, dz, before_weights, before_dz);
        else
            write_rows<ScanForm::kSmall>(scan, number, stage, weights, dz, before_weights, before_dz);
    }
    template <ScanForm kForm, class Scan, class BeforeWeights, class BeforeDz>
    __device__ __forceinline__ void write_rows(Scan& scan, uint32_t number, int stage, uint32_t weights, uint32_t dz,
                                               const BeforeWeights& before_weights, const BeforeDz& before_dz) {
        const auto carry_out = CarryPlace<T>::of(number);
        const bool carry_out_is_empty = control_.carry_out_empty(half_).has_happened(carry_out.previous_use());
        uint32_t packed[8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scan.template weights<Element, kForm>(r, s_, dp_, packed);
            if (r == 0) before_weights();
            this->store_rows(weights, r, packed);
        }
        scan.prefixes(lane_ % 4);
        if (!carry_out_is_empty) control_.carry_out_empty(half_).wait(carry_out.previous_use());
        store_carry_out(scan, carry_out);
        if constexpr (Scan::kIsSlow) clear_nan_queries(scan, number, stage);
        before_dz();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scan.template logit_gradients<Element, kForm>(r, s_, dp_, packed);
            this->store_rows(dz, r, packed);
            if constexpr (T::kBiases > 0) {
                float& sum = this->shared_.dz_sums[Place<T::kDzSlots>::of(number).slot][half_][row(r)];
                store_shared_if(lane_ % 4 == 0, shared_address(&sum), sum_over_quad(Element{}, packed));
            }
        }
        if constexpr (T::kGated)
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k)
                n_sums_[k] = dp_[accumulator_register(0, k)] + dp_[accumulator_register(1, k)] +
                             (T::kKeepsGateSums ? n_sums_[k] : -0.f);  // x + -0 is x
    }
    // Sums n of the last step over the rows of the warp, if threads do not keep sums over all steps. Call it before the
    // exponentials of the next step and after a branch: ptxas then places its shuffles between the exponentials. Right
    // after products are issued, it would place them between these products and so delay them.
    __device__ __forceinline__ void add_gate_sums() {
        if constexpr (T::kGated && !T::kKeepsGateSums) common::sum_over_rows(n_sums_, gate_sums_);
    }
    // Replaces NaN by 0 in a row of Q in shared memory if the row starts only in newer keys and its scores in this half
    // are NaN. dK adds dz^T Q, and dz = 0 times NaN would be NaN. The zeros stay until dK of this step is done: the
    // warpgroup that computes dK arrives on qdo.empty only after that.
    //
    // The row can start in the newer half, whose scores must still be NaN. So the older half waits until every thread
    // of the newer half has arrived on older_carry_out_empty for this step, which it does after its product S. For that
    // the newer half needs nothing from the older half except carry_out[0], which store_carry_out() has written. The dK
    // of the newer half may read NaN or 0: dz of the row is NaN for all of its keys, so dK is NaN in both cases.
    template <class Scan>
    __device__ __forceinline__ void clear_nan_queries(const Scan& scan, uint32_t number, int stage) const {
        if (!__any_sync(~0u, scan.has_unstarted_nan(0) || scan.has_unstarted_nan(1))) return;
        if (half_ < T::kHalves - 1) control_.older_carry_out_empty.wait(CarryPlace<T>::of(number));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!scan.has_unstarted_nan(r)) continue;
            const uint32_t queries = (this->opaque(qdo_low_) + stage * kStage) << 4;
#pragma unroll 1
            for (int i = 0; i < 2 * T::kPanels; ++i) {
                const uint32_t at = queries + i / 2 * T::kPanelBytes + row(r) * 128 + lane_ % 4 * 32 + i % 2 * 16;
                store_shared(at, without_nan(load_shared(at)));
            }
            if constexpr (T::kBiases > 0)
                if (lane_ % 4 == 0) {
                    const uint32_t at = shared_address(this->shared_.q_biases[stage]) + row(r) * kBiasRowBytes;
                    store_shared(at, without_nan(load_shared(at)));
                }
        }
    }
    __device__ __forceinline__ static uint4 without_nan(const uint4& x) {
        return make_uint4(nan_to_zero(x.x), nan_to_zero(x.y), nan_to_zero(x.z), nan_to_zero(x.w));
    }
    // Replaces NaN by 0 in a pair of elements.
    __device__ __forceinline__ static uint32_t nan_to_zero(uint32_t pair) {
        constexpr uint32_t kInfinity = std::is_same_v<Element, __half> ? 0x7c00 : 0x7f80, kMagnitude = 0x7fff;
        const uint32_t low = (pair & kMagnitude) > kInfinity ? 0 : pair & 0xffff;
        const uint32_t high = (pair >> 16 & kMagnitude) > kInfinity ? 0 : pair & 0xffff0000;
        return high | low;
    }
    // Stores the carries at the newer edge of this half, once their slot is empty: arrives on carry_out_full.
    template <class Scan>
    __device__ __forceinline__ void store_carry_out(const Scan& scan, const CarryPlace<T>& place) {
        float prefix[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)  // a NaN in this half must not reach newer keys
            prefix[r] = isnan(scan.newer_prefix[r]) ? 0.f : scan.newer_prefix[r];
        // Without branches: they would end the schedule of the scan.
        const bool stores = lane_ % 4 == 0;
        const uint32_t to = shared_address(&control_.carry_out[half_][place.slot][row(0)]);
#pragma unroll
        for (int r = 0; r < 2; ++r) store_shared_if(stores, to + 8 * r * sizeof(float2), scan.newer_mass[r], prefix[r]);
        control_.carry_out_full[half_][warp_].arrive_if(stores, place);
    }

    const int half_;                    // 0: older half of the key tile, 1: newer half
    uint32_t k_low_, v_low_, qdo_low_;  // lower halves of the descriptors of the first buffer or stage
    uint32_t weights_, dz_;             // addresses of A and dz of this half, first slot
    float product_offset_ = 0.f;        // of the key tile
    float s_[32], dp_[32];
    // With gates: sums of n for the keys of this thread over its two rows, of the last step or with kKeepsGateSums of
    // all steps of the key tile; and sums over the rows of the warp and all steps before (sum_over_rows).
    float n_sums_[T::kGated ? kBackwardKeysPerThread : 1], gate_sums_[2];
};

}  // namespace megatron_sb::hopper
