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
    static constexpr int kTile = T::kTileBytes >> 4, kHalf = T::kHalfBytes >> 4;  // in units of descriptors

    __device__ __forceinline__ BackwardThread(typename T::Shared& shared, const BackwardArguments& arguments)
        : c_(shared.control),
          a_(arguments),
          warp_(__shfl_sync(~0u, int(threadIdx.x / 32 % 4), 0)),
          lane_(fresh(threadIdx.x % 32)) {
        const int first_row = warp_ * 16 + lane_ % 8;
        to_ = first_row * 128 + ((lane_ / 8) ^ (lane_ % 8)) * 16;
    }

    __device__ __forceinline__ const Step& step(uint32_t number) const { return c_.steps[number % kStepRing]; }
    __device__ __forceinline__ int row(int r) const { return warp_ * 16 + lane_ / 4 + 8 * r; }
    // Each warp speaks for itself.
    __device__ __forceinline__ void release(uint64_t* empty) const {
        if (lane_ == 0) mbarrier_arrive(empty);
    }
    // What this warp's threads have written and fenced is there.
    __device__ __forceinline__ void announce(uint64_t* full) const {
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(full);
    }
    // Not to be computed once for all loops and kept: there are not enough uniform registers.
    __device__ __forceinline__ static uint32_t fresh(uint32_t x) {
        uint32_t y;
        asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
        return y;
    }

    // Where a thread's part of 64 columns of a step's dq adds up.
    struct DqPlace {
        float* sum;
        int flags;  // of the step
    };
    __device__ __forceinline__ DqPlace dq_place(uint32_t number, int part) const {
        const Step& of = step(number);
        const int thread = warp_ * 32 + lane_;
        return {a_.plan.dq + (int64_t(of.sum) * (kHeadDim / 64) + part) * (kStepRows * 64) + thread * 4, of.flags};
    }
    // Adds this key tile's part of 64 columns of a step's dq to that of the older ones, in their order; the newest tile
    // adds all to the result.
    template <int kLoads>  // of the sum, under way at once
    __device__ __forceinline__ void add_dq(uint32_t number, const DqPlace& place, const float (&dq)[32],
                                           int part) const {
        mbarrier_wait(&c_.turn[number % kTurns], number / kTurns & 1);
        float* const sum = place.sum;
        if (place.flags & kLastOfRows) {
            const Step& of = step(number);
            adds() ? write_dq<float, kLoads>(of, sum, dq, part * 64)
                   : write_dq<Element, kLoads>(of, sum, dq, part * 64);
        } else if (place.flags & kFirstOfRows) {
#pragma unroll
            for (int v = 0; v < kDqVectors; ++v)
                *reinterpret_cast<float4*>(sum + v * 512) =
                    make_float4(dq[4 * v], dq[4 * v + 1], dq[4 * v + 2], dq[4 * v + 3]);
        } else {
#pragma unroll
            for (int v = 0; v < kDqVectors; ++v)
                add_global(sum + v * 512, dq[4 * v], dq[4 * v + 1], dq[4 * v + 2], dq[4 * v + 3]);
        }
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(&c_.added[number % kTurns]);
    }
    // Rows of dk and dv are the keys of half a tile in the order of shared memory. `staged`: 64 rows of 64 columns in
    // shared memory that nothing else uses, and no product of another warp still reads.
    __device__ __forceinline__ void write_keys(const Step& of, int half, uint32_t staged,
                                               const float (&dk)[kHeadDim / 2], const float (&dv)[kHeadDim / 2]) const {
        constexpr float kOutputScale = 1.f / portable::kWeightScale<Element>;
        if (adds()) {
            add_keys(a_.params.dk, of, half, dk, a_.scale);
            add_keys(a_.params.dv, of, half, dv, kOutputScale);
        } else {
            store_keys(a_.params.dk, of, half, staged, dk, a_.scale);
            store_keys(a_.params.dv, of, half, staged, dv, kOutputScale);
        }
    }
    // 64 columns of row r as they are in the accumulator; the lanes give the addresses of 8 rows by 4 columns of 8.
    __device__ __forceinline__ void store_rows(uint32_t tile, int r, const uint32_t (&x)[8]) const {
        store_matrices(tile + to_ + r * 8 * 128, {x[0], x[1], x[2], x[3]});
        store_matrices(tile + (to_ ^ 64) + r * 8 * 128, {x[4], x[5], x[6], x[7]});
    }

  private:
    template <class Out, int kLoads>
    __device__ __forceinline__ void write_dq(const Step& of, const float* sum, const float (&dq)[32],
                                             int first_column) const {
        const Rows<void*>& to = a_.params.dq;
        Out* const first = static_cast<Out*>(to.data) + of.batch * to.batch_stride + of.head * to.head_stride +
                           (of.row + row(0)) * to.row_stride + first_column + lane_ % 4 * 2;
        const bool alone = of.flags & kFirstOfRows;
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
                    put(first + 8 * v, (dq[4 * v] + older[i].x) * a_.scale, (dq[4 * v + 1] + older[i].y) * a_.scale);
                if (row(1) < of.num_rows)
                    put(first + 8 * to.row_stride + 8 * v, (dq[4 * v + 2] + older[i].z) * a_.scale,
                        (dq[4 * v + 3] + older[i].w) * a_.scale);
            }
        }
    }

    __device__ __forceinline__ void add_keys(const Rows<void*>& to, const Step& of, int half,
                                             const float (&x)[kHeadDim / 2], float factor) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = half * kSubtileKeys + KeyOrder<kSubtileKeys>()(row(r));
            if (key >= of.tile_keys) continue;
            float* const first = key_row<float>(to, of, key) + lane_ % 4 * 2;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                put(first + 8 * n, x[4 * n + 2 * r] * factor, x[4 * n + 2 * r + 1] * factor);
        }
    }
    // Each warp its own rows, through shared memory, so that a row is written as a whole.
    __device__ __forceinline__ void store_keys(const Rows<void*>& to, const Step& of, int half, uint32_t staged,
                                               const float (&x)[kHeadDim / 2], float factor) const {
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
                const int row = warp_ * 16 + i + lane_ / 8, key = half * kSubtileKeys + KeyOrder<kSubtileKeys>()(row);
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

    // Two neighbours. Nobody else adds to them meanwhile: the addition needs no answer, and so no wait.
    __device__ __forceinline__ static void put(float* to, float x, float y) {
        add_global(to, x, y);
    }
    __device__ __forceinline__ static void put(Element* to, float x, float y) {
        *reinterpret_cast<uint32_t*>(to) = pack<Element>(x, y);
    }
    __device__ __forceinline__ bool adds() const {
        return a_.params.grad_dtype == Dtype::kFloat32;
    }

  protected:
    BackwardControl& c_;
    const BackwardArguments& a_;
    const int warp_, lane_;

  private:
    uint32_t to_;  // this lane's place in a tile of 64 rows of 64 columns
};

// A thread that makes A and dz of a step with half a key tile.
template <class T>
class HalfScan : protected BackwardThread<T> {
  protected:
    using Base = BackwardThread<T>;
    using Base::a_, Base::c_, Base::lane_, Base::row, Base::step, Base::warp_;
    using Base::kHalf, Base::kHeadDim, Base::kTile;
    using typename Base::Element;

    __device__ __forceinline__ HalfScan(typename T::Shared& shared, const BackwardArguments& arguments, int half)
        : Base(shared, arguments), half_(half) {
        k_low_ = descriptor_low(shared_address(shared.k[0][half]), 0);
        v_low_ = descriptor_low(shared_address(shared.v[0][half]), 0);
        steps_low_ = descriptor_low(shared_address(shared.steps[0][0]), 0);
        weights_ = shared_address(shared.weights[0][half]);
        dz_ = shared_address(shared.dz[0][half]);
    }

    __device__ __forceinline__ static void multiply_rows(float (&d)[32], uint32_t rows, uint32_t keys) {
        wgmma_first(Element{}, d, descriptor(rows), descriptor(keys));
#pragma unroll
        for (int i = 1; i < kHeadDim / 16; ++i) {
            const int at = i / 4 * kHalf + i % 4 * 2;
            wgmma_add(Element{}, d, descriptor(rows + at), descriptor(keys + at));
        }
        wgmma_commit();
    }

    // Scores of keys that a row does not see become what gives e = 0.
    __device__ __forceinline__ void mask(uint32_t number, int flags) {
        if (!(flags & kMasked << half_)) return;
        const int visible = step(number).visible - half_ * kSubtileKeys;
        const int num_keys = step(number).num_keys - half_ * kSubtileKeys;
        const float unseen = copysignf(INFINITY, -a_.scale_log2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int seen = min(visible + row(r), num_keys) - lane_ % 4 * kStepKeys;
#pragma unroll
            for (int k = 0; k < kStepKeys; ++k)
                if (k >= seen) s_[key_register(r, k)] = unseen;
        }
    }

    template <class Scan>
    __device__ __forceinline__ void take_carries(Scan& scan, uint32_t number, const StageCursor& cursor) {
        mbarrier_wait(&c_.carry_full[cursor.stage], cursor.parity);
        if (half_ == 1) mbarrier_wait(&c_.passed_full[0][number % kPassed][warp_], number / kPassed & 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Carry carry = c_.carries[cursor.stage][row(r)];
            if (half_ == 1) {
                const float2 between = c_.passed[0][number % kPassed][row(r)];
                carry.mass = between.x;
                carry.prefix = between.y;
            }
            scan.start(r, carry);
        }
        if (half_ == 1) mbarrier_arrive(&c_.passed_empty[0][number % kPassed]);
    }

    // A and dz to the tiles of those names in shared memory, from e and dP in s_ and dp_; the carries to whoever is
    // next. What comes before each of the tiles is written waits until its place is free; whoever calls makes them
    // visible.
    template <class Scan, class BeforeWeights, class BeforeDz>
    __device__ __forceinline__ void make_gradients(Scan& scan, uint32_t number, int stage, uint32_t weights,
                                                   uint32_t dz, BeforeWeights before_weights, BeforeDz before_dz) {
        uint32_t packed[8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scan.template weights<Element>(r, s_, dp_, packed);
            if (r == 0) before_weights();
            this->store_rows(weights, r, packed);
        }
        scan.prefixes(lane_ % 4);
        pass_on(scan, number);
        clear_queries(scan, stage);
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
    __device__ __forceinline__ void clear_queries(const Scan& scan, int stage) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!scan.is_idle_nan(r)) continue;
            const uint32_t queries = (this->fresh(steps_low_) + stage * 2 * kTile) << 4;
#pragma unroll
            for (int i = 0; i < 2 * T::kHalves; ++i)
                store_shared(queries + i / 2 * T::kHalfBytes + row(r) * 128 + lane_ % 4 * 32 + i % 2 * 16,
                             make_uint4(0, 0, 0, 0));
        }
    }
    template <class Scan>
    __device__ __forceinline__ void pass_on(const Scan& scan, uint32_t number) {
        float prefix[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)  // what is newer than a NaN's tile stays clean
            prefix[r] = isnan(scan.newer_prefix[r]) ? 0.f : scan.newer_prefix[r];
        mbarrier_wait(&c_.passed_empty[half_][number % kPassed], number / kPassed & 1 ^ 1);
        if (lane_ % 4 == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                c_.passed[half_][number % kPassed][row(r)] = make_float2(scan.newer_mass[r], prefix[r]);
            mbarrier_arrive(&c_.passed_full[half_][number % kPassed][warp_]);
        }
    }

    const int half_;
    uint32_t k_low_, v_low_, steps_low_;  // descriptors of the first buffer
    uint32_t weights_, dz_;               // A and dz of this half, the first slot
    float s_[32], dp_[32];
};

}  // namespace megatron_sb::hopper
