// What the threads of both kinds of backward kernels do alike: a scan of the scores of a step with half a key tile, and
// results.
#pragma once

#include "kernels/hopper/bwd_producer.cuh"
#include "kernels/hopper/bwd_scan.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

constexpr int kDqVectors = 8;  // of four numbers, in a thread's part of 64 columns of dq

// A thread of a warpgroup that has 64 rows of an accumulator: query rows, or keys.
template <class T>
class BackwardThread {
  protected:
    using Element = typename T::Element;
    static constexpr int kHeadDim = T::kHeadDim;
    static constexpr int kTile = T::kTileBytes >> 4, kPanel = T::kPanelBytes >> 4;  // in units of descriptors

    __device__ __forceinline__ BackwardThread(typename T::Shared& shared, const BackwardArguments& arguments)
        : control_(shared.control),
          args_(arguments),
          warp_(__shfl_sync(~0u, int(threadIdx.x / 32 % 4), 0)),
          lane_(opaque(threadIdx.x % 32)) {
        const int first_row = warp_ * 16 + lane_ % 8;
        store_offset_ = first_row * 128 + ((lane_ / 8) ^ (lane_ % 8)) * 16;
    }

    __device__ __forceinline__ const Step& step(uint32_t number) const {
        return control_.step_info[number % kStepRing];
    }
    __device__ __forceinline__ int row(int r) const { return warp_ * 16 + lane_ / 4 + 8 * r; }
    // Each warp speaks for itself.
    __device__ __forceinline__ void release(uint64_t* empty) const {
        if (lane_ == 0) mbarrier_arrive(empty);
    }
    // What this warp's threads have written and fenced is has_row.
    __device__ __forceinline__ void signal(uint64_t* full) const {
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(full);
    }
    // Not to be computed once for all loops and kept: has_row are not enough uniform registers.
    __device__ __forceinline__ static uint32_t opaque(uint32_t x) {
        uint32_t y;
        asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
        return y;
    }

    // Where a thread's part of 64 columns of a step's dq accumulates_gradients up.
    struct DqTarget {
        float* sum;
        int flags;  // of the step
    };
    __device__ __forceinline__ DqTarget dq_target(uint32_t number, int part) const {
        const Step& of = step(number);
        const int thread = warp_ * 32 + lane_;
        return {args_.plan.dq + (int64_t(of.sum) * (kHeadDim / 64) + part) * (kStepRows * 64) + thread * 4, of.flags};
    }
    // Adds this key tile's part of 64 columns of a step's dq to that of the older ones, in their order; the newest tile
    // accumulates_gradients all to the result.
    template <int kLoads>  // of the sum, under way at once
    __device__ __forceinline__ void add_dq(uint32_t number, const DqTarget& place, const float (&dq)[32],
                                           int part) const {
        mbarrier_wait(&control_.dq_turn[number % kDqTurns], number / kDqTurns & 1);
        float* const sum = place.sum;
        if (place.flags & kNewestKeyTile) {
            const Step& of = step(number);
            accumulates_gradients() ? write_dq<float, kLoads>(of, sum, dq, part * 64)
                                    : write_dq<Element, kLoads>(of, sum, dq, part * 64);
        } else if (place.flags & kOldestKeyTile) {
#pragma unroll
            for (int v = 0; v < kDqVectors; ++v)
                *reinterpret_cast<float4*>(sum + v * 512) =
                    make_float4(dq[4 * v], dq[4 * v + 1], dq[4 * v + 2], dq[4 * v + 3]);
        } else {
#pragma unroll
            for (int v = 0; v < kDqVectors; ++v)
                reduce_add_global(sum + v * 512, dq[4 * v], dq[4 * v + 1], dq[4 * v + 2], dq[4 * v + 3]);
        }
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(&control_.dq_added[number % kDqTurns]);
    }
    // Rows of dk and dv are the keys of half a tile in the order of shared memory. `staged`: 64 rows of 64 columns in
    // shared memory that nothing else uses, and no product of another warp still reads.
    __device__ __forceinline__ void write_dk_dv(const Step& of, int half, uint32_t staged,
                                                const float (&dk)[kHeadDim / 2],
                                                const float (&dv)[kHeadDim / 2]) const {
        constexpr float kOutputScale = 1.f / portable::kWeightScale<Element>;
        if (accumulates_gradients()) {
            add_gradient_rows(args_.params.dk, of, half, dk, args_.scale);
            add_gradient_rows(args_.params.dv, of, half, dv, kOutputScale);
        } else {
            store_gradient_rows(args_.params.dk, of, half, staged, dk, args_.scale);
            store_gradient_rows(args_.params.dv, of, half, staged, dv, kOutputScale);
        }
    }
    // 64 columns of row r as they are in the accumulator; the lanes give the addresses of 8 rows by 4 columns of 8.
    __device__ __forceinline__ void store_rows(uint32_t tile, int r, const uint32_t (&x)[8]) const {
        stmatrix_x4(tile + store_offset_ + r * 8 * 128, {x[0], x[1], x[2], x[3]});
        stmatrix_x4(tile + (store_offset_ ^ 64) + r * 8 * 128, {x[4], x[5], x[6], x[7]});
    }

  private:
    template <class Out, int kLoads>
    __device__ __forceinline__ void write_dq(const Step& of, const float* sum, const float (&dq)[32],
                                             int first_column) const {
        const Rows<void*>& to = args_.params.dq;
        Out* const first = static_cast<Out*>(to.data) + of.batch * to.batch_stride + of.head * to.head_stride +
                           (of.row + row(0)) * to.row_stride + first_column + lane_ % 4 * 2;
        const bool alone = of.flags & kOldestKeyTile;
#pragma unroll
        for (int u = 0; u < kDqVectors; u += kLoads) {
            float4 older[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; ++i)
                older[i] = alone ? make_float4(0.f, 0.f, 0.f, 0.f)
                                 : __ldcg(reinterpret_cast<const float4*>(sum + (u + i) * 512));
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const int v = u + i;
                if (row(0) < of.num_rows)
                    write_pair(first + 8 * v, (dq[4 * v] + older[i].x) * args_.scale,
                               (dq[4 * v + 1] + older[i].y) * args_.scale);
                if (row(1) < of.num_rows)
                    write_pair(first + 8 * to.row_stride + 8 * v, (dq[4 * v + 2] + older[i].z) * args_.scale,
                               (dq[4 * v + 3] + older[i].w) * args_.scale);
            }
        }
    }

    __device__ __forceinline__ void add_gradient_rows(const Rows<void*>& to, const Step& of, int half,
                                                      const float (&x)[kHeadDim / 2], float factor) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = half * kHalfTileKeys + KeyOrder<kHalfTileKeys>()(row(r));
            if (key >= of.tile_keys) continue;
            float* const first = key_row<float>(to, of, key) + lane_ % 4 * 2;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                write_pair(first + 8 * n, x[4 * n + 2 * r] * factor, x[4 * n + 2 * r + 1] * factor);
        }
    }
    // Each warp its own rows, through shared memory, so that a row is written as a whole.
    __device__ __forceinline__ void store_gradient_rows(const Rows<void*>& to, const Step& of, int half,
                                                        uint32_t staged, const float (&x)[kHeadDim / 2],
                                                        float factor) const {
#pragma unroll
        for (int part = 0; part < kHeadDim / 64; ++part) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32_t packed[8];
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    const float* const pair = x + 4 * (8 * part + n) + 2 * r;
                    packed[n] = pack<Element>(pair[0] * factor, pair[1] * factor);
                }
                store_rows(staged, r, packed);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                const int row = warp_ * 16 + i + lane_ / 8, key = half * kHalfTileKeys + KeyOrder<kHalfTileKeys>()(row);
                const uint4 eight = load_shared(staged + row * 128 + ((lane_ % 8 ^ row % 8) << 4));
                store_global_if(key < of.tile_keys, key_row<Element>(to, of, key) + part * 64 + lane_ % 8 * 8, eight);
            }
            __syncwarp();
        }
    }
    template <class Out>
    __device__ __forceinline__ Out* key_row(const Rows<void*>& to, const Step& of, int key) const {
        return static_cast<Out*>(to.data) + of.batch * to.batch_stride + of.kv_head * to.head_stride +
               (of.k_row + key) * to.row_stride;
    }

    // Two neighbours. Nobody else accumulates_gradients to them meanwhile: the addition needs no answer, and so no
    // wait.
    __device__ __forceinline__ static void write_pair(float* to, float x, float y) {
        reduce_add_global(to, x, y);
    }
    __device__ __forceinline__ static void write_pair(Element* to, float x, float y) {
        *reinterpret_cast<uint32_t*>(to) = pack<Element>(x, y);
    }
    __device__ __forceinline__ bool accumulates_gradients() const {
        return args_.params.grad_dtype == Dtype::kFloat32;
    }

  protected:
    BackwardControl& control_;
    const BackwardArguments& args_;
    const int warp_, lane_;

  private:
    uint32_t store_offset_;  // this lane's place in a tile of 64 rows of 64 columns
};

// A thread that makes A and dz of a step with half a key tile.
template <class T>
class HalfScan : protected BackwardThread<T> {
  protected:
    using Base = BackwardThread<T>;
    using Base::args_, Base::control_, Base::lane_, Base::row, Base::step, Base::warp_;
    using Base::kPanel, Base::kHeadDim, Base::kTile;
    using typename Base::Element;

    __device__ __forceinline__ HalfScan(typename T::Shared& shared, const BackwardArguments& arguments, int half)
        : Base(shared, arguments), half_(half) {
        k_low_ = descriptor_low(shared_address(shared.k[0][half]), 0);
        v_low_ = descriptor_low(shared_address(shared.v[0][half]), 0);
        qdo_low_ = descriptor_low(shared_address(shared.qdo[0][0]), 0);
        weights_ = shared_address(shared.weights[0][half]);
        dz_ = shared_address(shared.dz[0][half]);
    }

    __device__ __forceinline__ static void multiply_rows(float (&d)[32], uint32_t rows, uint32_t keys) {
        wgmma_overwrite(Element{}, d, descriptor(rows), descriptor(keys));
#pragma unroll
        for (int i = 1; i < kHeadDim / 16; ++i) {
            const int at = i / 4 * kPanel + i % 4 * 2;
            wgmma_accumulate(Element{}, d, descriptor(rows + at), descriptor(keys + at));
        }
        wgmma_commit();
    }

    // Scores of keys that a row does not see become what gives e = 0.
    __device__ __forceinline__ void mask(uint32_t number, int flags) {
        if (!(flags & kMasked << half_)) return;
        const int visible = step(number).visible - half_ * kHalfTileKeys;
        const int num_keys = step(number).num_keys - half_ * kHalfTileKeys;
        const float hidden = copysignf(INFINITY, -args_.scale_log2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int num_visible = min(visible + row(r), num_keys) - lane_ % 4 * kBackwardKeysPerThread;
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k)
                if (k >= num_visible) s_[accumulator_register(r, k)] = hidden;
        }
    }

    template <class Scan>
    __device__ __forceinline__ void load_carries(Scan& scan, uint32_t number, const StageCursor& cursor) {
        mbarrier_wait(&control_.carry_in_full[cursor.stage], cursor.parity);
        if (half_ == 1)
            mbarrier_wait(&control_.carry_out_full[0][number % kCarryOutSlots][warp_], number / kCarryOutSlots & 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Carry carry = control_.carry_in[cursor.stage][row(r)];
            if (half_ == 1) {
                const float2 between = control_.carry_out[0][number % kCarryOutSlots][row(r)];
                carry.mass = between.x;
                carry.prefix = between.y;
            }
            scan.start(r, carry);
        }
        if (half_ == 1) mbarrier_arrive(&control_.carry_out_empty[0][number % kCarryOutSlots]);
    }

    // A and dz to the tiles of those names in shared memory, from e and dP in s_ and dp_; the carries to whoever is
    // next. What comes before each of the tiles is written waits until its place is free; whoever calls makes them
    // visible.
    template <class Scan, class BeforeWeights, class BeforeDz>
    __device__ __forceinline__ void write_weights_and_dz(Scan& scan, uint32_t number, int stage, uint32_t weights,
                                                         uint32_t dz, BeforeWeights before_weights,
                                                         BeforeDz before_dz) {
        uint32_t packed[8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scan.template weights<Element>(r, s_, dp_, packed);
            if (r == 0) before_weights();
            this->store_rows(weights, r, packed);
        }
        scan.prefixes(lane_ % 4);
        store_carry_out(scan, number);
        clear_nan_queries(scan, stage);
        before_dz();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scan.template logit_gradients<Element>(r, s_, dp_, packed);
            this->store_rows(dz, r, packed);
        }
    }
    // dK takes dz^T Q, and zeros of dz times a NaN would still be NaN. The stage is not given back before dK is done;
    // if the other half's scores still read the row, it does not matter to them what it is.
    template <class Scan>
    __device__ __forceinline__ void clear_nan_queries(const Scan& scan, int stage) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!scan.has_unstarted_nan(r)) continue;
            const uint32_t queries = (this->opaque(qdo_low_) + stage * 2 * kTile) << 4;
#pragma unroll
            for (int i = 0; i < 2 * T::kPanels; ++i)
                store_shared(queries + i / 2 * T::kPanelBytes + row(r) * 128 + lane_ % 4 * 32 + i % 2 * 16,
                             make_uint4(0, 0, 0, 0));
        }
    }
    template <class Scan>
    __device__ __forceinline__ void store_carry_out(const Scan& scan, uint32_t number) {
        float prefix[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)  // what is newer than a NaN's tile stays clean
            prefix[r] = isnan(scan.newer_prefix[r]) ? 0.f : scan.newer_prefix[r];
        mbarrier_wait(&control_.carry_out_empty[half_][number % kCarryOutSlots], number / kCarryOutSlots & 1 ^ 1);
        if (lane_ % 4 == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                control_.carry_out[half_][number % kCarryOutSlots][row(r)] = make_float2(scan.newer_mass[r], prefix[r]);
            mbarrier_arrive(&control_.carry_out_full[half_][number % kCarryOutSlots][warp_]);
        }
    }

    const int half_;
    uint32_t k_low_, v_low_, qdo_low_;  // descriptors of the first buffer
    uint32_t weights_, dz_;             // A and dz of this half, the first slot
    float s_[32], dp_[32];
};

}  // namespace megatron_sb::hopper
