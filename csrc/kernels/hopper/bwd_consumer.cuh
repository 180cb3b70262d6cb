// A consumer warpgroup of the backward: 64 keys of the tile, all rows of a step. In a round
//
//   S = Q K^T of the next step;  dQ = dz K of the step before;  dV += A^T dO, dK += dz^T Q of this one
//   dP = dO V^T of the next step, in the registers of dQ;  its A and dz to shared memory
//
// dQ takes the dz of both warpgroups, and each makes half of its columns; the rest is a warpgroup's own. The carries of
// a step pass from the older half of the tile to the newer one, and from there to the next key tile.
#pragma once

#include "kernels/hopper/bwd_producer.cuh"
#include "kernels/hopper/bwd_scan.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

template <class T>
class BackwardConsumer {
    using Element = typename T::Element;
    static constexpr int kHeadDim = T::kHeadDim;
    static constexpr int kTile = T::kTileBytes >> 4, kHalf = T::kHalfBytes >> 4;  // in units of descriptors

  public:
    __device__ __forceinline__ BackwardConsumer(typename T::Shared& shared, const BackwardArguments& arguments,
                                                int warpgroup)
        : c_(shared.control),
          a_(arguments),
          warpgroup_(warpgroup),
          warp_(__shfl_sync(~0u, int(threadIdx.x / 32 % 4), 0)),
          lane_(threadIdx.x % 32) {
        k_low_ = descriptor_low(shared_address(shared.k[warpgroup]), 0);
        v_low_ = descriptor_low(shared_address(shared.v[warpgroup]), 0);
        // The columns of dQ that this warpgroup makes: a half of the tile's, or of its rows.
        k_columns_low_ =
            descriptor_low(shared_address(shared.k[0]) + warpgroup * (kHeadDim == 128 ? T::kHalfBytes : 64), 0);
        steps_low_ = descriptor_low(shared_address(shared.steps[0][0]), 0);
        weights_low_ = descriptor_low(shared_address(shared.weights[warpgroup]), 0);
        dz_low_ = descriptor_low(shared_address(shared.dz[0][0]), 0);
        const int row = warp_ * 16 + lane_ % 8;
        const int swizzled = row * 128 + ((lane_ / 8) ^ (lane_ % 8)) * 16;
        to_weights_ = shared_address(shared.weights[warpgroup]) + swizzled;
        to_dz_ = shared_address(shared.dz[0][warpgroup]) + swizzled;
    }

    __device__ __forceinline__ void run() {
        for (int tiles = 0;; ++tiles) {
            mbarrier_wait(&c_.step_full[cursor_.stage], cursor_.parity);
            if (step(number_).flags & kNoMore) return;
            mbarrier_wait(&c_.kv_full, tiles & 1);
            begin_tile();
            // One after the other, not one in the other or side by side: only so does ptxas see what is uniform.
            while (step(number_).flags & kSlowNext) advance(SlowScan(warpgroup_));
            while (!(step(number_).flags & kLastOfTile)) advance(FastScan());
            end_tile();
        }
    }

  private:
    __device__ __forceinline__ const Step& step(uint32_t number) const { return c_.steps[number % kStepRing]; }

    // ---- products -----------------------------------------------------------------------------------------------

    __device__ __forceinline__ void issue_scores(int stage) {
        multiply_rows(s_, fresh(steps_low_) + stage * 2 * kTile, fresh(k_low_));
    }
    __device__ __forceinline__ void issue_dp(int stage) {
        multiply_rows(dp_, fresh(steps_low_) + stage * 2 * kTile + kTile, fresh(v_low_));
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
    // dQ = dz K
    __device__ __forceinline__ void issue_dq(int turn) {
        const uint32_t dz = fresh(dz_low_) + turn * 2 * kHalf, k_columns = fresh(k_columns_low_);
        wgmma_first<0, 1>(Element{}, dq(), descriptor(dz), descriptor(k_columns));
#pragma unroll
        for (int i = 1; i < kBackwardKeys / 16; ++i)
            wgmma_add<0, 1>(Element{}, dq(), descriptor(dz + i / 4 * kHalf + i % 4 * 2),
                            descriptor(k_columns + i / 4 * kTile + i % 4 * 128));
        wgmma_commit();
    }
    // dV += A^T dO, dK += dz^T Q
    __device__ __forceinline__ void issue_dkv(int stage, int turn) {
        constexpr uint32_t kNextColumns = uint32_t(kHalf) << 16;
        const uint32_t q = (fresh(steps_low_) + stage * 2 * kTile) | kNextColumns, d_o = q + kTile;
        const uint32_t dz = fresh(dz_low_) + turn * 2 * kHalf + warpgroup_ * kHalf, weights = fresh(weights_low_);
#pragma unroll
        for (int i = 0; i < kStepRows / 16; ++i)
            wgmma_add<1, 1>(Element{}, dv_, descriptor(weights + i * 128), descriptor(d_o + i * 128));
#pragma unroll
        for (int i = 0; i < kStepRows / 16; ++i)
            wgmma_add<1, 1>(Element{}, dk_, descriptor(dz + i * 128), descriptor(q + i * 128));
        wgmma_commit();
    }
    // dQ's registers are the first of dP's: the two are never needed at once.
    // Not to be computed once for all loops and kept: there are not enough uniform registers.
    __device__ __forceinline__ static uint32_t fresh(uint32_t x) {
        uint32_t y;
        asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
        return y;
    }
    using Dq = float[kHeadDim / 4];
    __device__ __forceinline__ Dq& dq() {
        return reinterpret_cast<Dq&>(dp_);
    }

    // ---- rounds -------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void begin_tile() {
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) dk_[i] = dv_[i] = 0.f;
        pin(dk_);
        pin(dv_);
        wgmma_fence();
        issue_scores(cursor_.stage);
        issue_dp(cursor_.stage);
        wgmma_wait<0>();
        pin(s_);
        pin(dp_);
        SlowScan scan(warpgroup_);
        mask(number_);
        scan.exponentials(s_, a_.scale_log2, lane_ % 4);
        take_carries(scan, number_, cursor_);
        make_gradients(scan, number_);
        first_round_ = true;
    }

    template <class Scan>
    __device__ __forceinline__ void advance(Scan scan) {
        const StageCursor next = cursor_.next();
        wait_for_dz(number_ - 1);
        mbarrier_wait(&c_.step_full[next.stage], next.parity);
        wgmma_fence();
        issue_scores(next.stage);
        issue_dq((number_ - 1) & 1);  // of nothing in a tile's first round
        issue_dkv(cursor_.stage, number_ & 1);
        wgmma_wait<2>();
        pin(s_);
        mask(number_ + 1);
        scan.exponentials(s_, a_.scale_log2, lane_ % 4);
        wgmma_wait<1>();
        pin(dq());
        if (!first_round_) add_dq(number_ - 1);
        first_round_ = false;
        wgmma_fence();
        issue_dp(next.stage);
        take_carries(scan, number_ + 1, next);
        wgmma_wait<0>();
        pin(dp_);
        release(&c_.step_empty[cursor_.stage]);
        make_gradients(scan, number_ + 1);
        cursor_ = next;
        ++number_;
    }

    __device__ __forceinline__ void end_tile() {
        const Step last = step(number_);
        wait_for_dz(number_ - 1);
        wgmma_fence();
        issue_dq((number_ - 1) & 1);
        issue_dkv(cursor_.stage, number_ & 1);
        wgmma_wait<1>();
        pin(dq());
        if (!first_round_) add_dq(number_ - 1);
        wgmma_wait<0>();
        pin(dk_);
        pin(dv_);
        release(&c_.step_empty[cursor_.stage]);
        wait_for_dz(number_);
        wgmma_fence();
        issue_dq(number_ & 1);
        wgmma_wait<0>();
        pin(dq());
        release(&c_.kv_empty);
        add_dq(number_);
        cursor_ = cursor_.next();
        ++number_;
        adds() ? write_tile<float>(last) : write_tile<Element>(last);
    }

    // ---- scans --------------------------------------------------------------------------------------------------

    // Scores of keys that a row does not see become what gives e = 0.
    __device__ __forceinline__ void mask(uint32_t number) {
        if (!(step(number).flags & kMasked << warpgroup_)) return;
        const int visible = step(number).visible - warpgroup_ * kSubtileKeys;
        const int num_keys = step(number).num_keys - warpgroup_ * kSubtileKeys;
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
        if (warpgroup_ == 1) mbarrier_wait(&c_.between_full[number % kTurns][warp_], number / kTurns & 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Carry carry = c_.carries[cursor.stage][row(r)];
            if (warpgroup_ == 1) {
                const float2 between = c_.between[number % kTurns][row(r)];
                carry.mass = between.x;
                carry.prefix = between.y;
            }
            scan.start(r, carry);
        }
    }

    // A and dz to shared memory, from e and dP in s_ and dp_; the carries to whoever is next.
    template <class Scan>
    __device__ __forceinline__ void make_gradients(Scan& scan, uint32_t number) {
        uint32_t packed[8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scan.template weights<Element>(r, s_, dp_, packed);
            store_rows(to_weights_, r, packed);
        }
        scan.prefixes(lane_ % 4);
        pass_on(scan, number);
        mbarrier_wait(&c_.dz_empty[number & 1], (number >> 1) - 1 & 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scan.template logit_gradients<Element>(r, s_, dp_, packed);
            store_rows(to_dz_ + (number & 1) * 2 * T::kHalfBytes, r, packed);
        }
        fence_async_proxy();
        warpgroup_barrier(1 + warpgroup_);
        if (warp_ == 0 && lane_ == 0) mbarrier_arrive(&c_.dz_full[number & 1]);
    }
    // 16 keys of row r as they are in the accumulator; the lanes give the addresses of 8 rows by 4 columns of 8.
    __device__ __forceinline__ static void store_rows(uint32_t to, int r, const uint32_t (&x)[8]) {
        store_matrices(to + r * 8 * 128, {x[0], x[1], x[2], x[3]});
        store_matrices((to ^ 64) + r * 8 * 128, {x[4], x[5], x[6], x[7]});
    }

    template <class Scan>
    __device__ __forceinline__ void pass_on(const Scan& scan, uint32_t number) {
        float prefix[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)  // what is newer than a NaN's tile stays clean
            prefix[r] = isnan(scan.newer_prefix[r]) ? 0.f : scan.newer_prefix[r];
        if (warpgroup_ == 0) {
            if (lane_ % 4 == 0)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    c_.between[number % kTurns][row(r)] = make_float2(scan.newer_mass[r], prefix[r]);
            __syncwarp();
            if (lane_ == 0) mbarrier_arrive(&c_.between_full[number % kTurns][warp_]);
            return;
        }
        if (lane_ % 4 != 0) return;
        const Step& of = step(number);
        const int64_t index = of.first_row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row(r) >= of.num_rows) continue;
            if (of.flags & kLastOfRows)
                static_cast<float*>(a_.params.prefix_out)[index + row(r)] = prefix[r];
            else
                store_relaxed_16(a_.plan.carries + index + row(r),
                                 make_uint4(__float_as_uint(scan.newer_mass[r]), __float_as_uint(prefix[r]),
                                            uint32_t(of.tile + 1), 0));
        }
    }

    // ---- results ------------------------------------------------------------------------------------------------

    // Adds this key tile's part of a step's dq to that of the older ones, in their order; the newest tile adds all to
    // the result.
    __device__ __forceinline__ void add_dq(uint32_t number) {
        release(&c_.dz_empty[number & 1]);
        mbarrier_wait(&c_.turn[number % kTurns], number / kTurns & 1);
        const Step& of = step(number);
        const int thread = warp_ * 32 + lane_;
        float* const sum = a_.plan.dq + (int64_t(of.sum) * 2 + warpgroup_) * (kStepRows * kHeadDim / 2) + thread * 4;
        if (of.flags & kLastOfRows) {
            adds() ? write_dq<float>(of, sum) : write_dq<Element>(of, sum);
        } else if (of.flags & kFirstOfRows) {
#pragma unroll
            for (int v = 0; v < kHeadDim / 16; ++v)
                *reinterpret_cast<float4*>(sum + v * 512) =
                    make_float4(dq()[4 * v], dq()[4 * v + 1], dq()[4 * v + 2], dq()[4 * v + 3]);
        } else {
#pragma unroll
            for (int v = 0; v < kHeadDim / 16; ++v)
                add_global(sum + v * 512, dq()[4 * v], dq()[4 * v + 1], dq()[4 * v + 2], dq()[4 * v + 3]);
        }
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(&c_.added[number % kTurns]);
    }
    template <class Out>
    __device__ __forceinline__ void write_dq(const Step& of, const float* sum) {
        const Rows<void*>& to = a_.params.dq;
        Out* const first = static_cast<Out*>(to.data) + of.batch * to.batch_stride + of.head * to.head_stride +
                           (of.row + row(0)) * to.row_stride + warpgroup_ * (kHeadDim / 2) + lane_ % 4 * 2;
        const bool alone = of.flags & kFirstOfRows;
        constexpr int kAtOnce = 2;  // loads under way
#pragma unroll
        for (int u = 0; u < kHeadDim / 16; u += kAtOnce) {
            float4 older[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                older[i] = alone ? make_float4(0.f, 0.f, 0.f, 0.f)
                                 : __ldcg(reinterpret_cast<const float4*>(sum + (u + i) * 512));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int v = u + i;
                if (row(0) < of.num_rows)
                    put(first + 8 * v, (dq()[4 * v] + older[i].x) * a_.scale,
                        (dq()[4 * v + 1] + older[i].y) * a_.scale);
                if (row(1) < of.num_rows)
                    put(first + 8 * to.row_stride + 8 * v, (dq()[4 * v + 2] + older[i].z) * a_.scale,
                        (dq()[4 * v + 3] + older[i].w) * a_.scale);
            }
        }
    }

    // Rows of dk_ and dv_ are keys in the order of shared memory.
    template <class Out>
    __device__ __forceinline__ void write_tile(const Step& of) {
        constexpr float kOutputScale = 1.f / portable::kWeightScale<Element>;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = warpgroup_ * kSubtileKeys + KeyOrder<kSubtileKeys>()(row(r));
            if (key >= of.tile_keys) continue;
            Out* const dk = key_row<Out>(a_.params.dk, of, of.k_row + key);
            Out* const dv = key_row<Out>(a_.params.dv, of, of.k_row + key);
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                put(dk + 8 * n, dk_[4 * n + 2 * r] * a_.scale, dk_[4 * n + 2 * r + 1] * a_.scale);
                put(dv + 8 * n, dv_[4 * n + 2 * r] * kOutputScale, dv_[4 * n + 2 * r + 1] * kOutputScale);
            }
        }
    }
    template <class Out>
    __device__ __forceinline__ Out* key_row(const Rows<void*>& to, const Step& of, int key) const {
        return static_cast<Out*>(to.data) + of.batch * to.batch_stride + of.kv_head * to.head_stride +
               key * to.row_stride + lane_ % 4 * 2;
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

    // ---- hand-overs ---------------------------------------------------------------------------------------------

    __device__ __forceinline__ void wait_for_dz(uint32_t number) {
        mbarrier_wait(&c_.dz_full[number & 1], number >> 1 & 1);
    }
    // Each warp speaks for itself.
    __device__ __forceinline__ void release(uint64_t* empty) {
        if (lane_ == 0) mbarrier_arrive(empty);
    }
    __device__ __forceinline__ int row(int r) const {
        return warp_ * 16 + lane_ / 4 + 8 * r;
    }

    BackwardControl& c_;
    const BackwardArguments& a_;
    const int warpgroup_, warp_, lane_;
    uint32_t k_low_, v_low_, k_columns_low_, steps_low_, weights_low_, dz_low_;
    uint32_t to_weights_, to_dz_;
    StageCursor cursor_;  // of step number_
    uint32_t number_ = 0;
    bool first_round_ = true;
    float s_[32], dp_[32], dk_[kHeadDim / 2], dv_[kHeadDim / 2];
};

}  // namespace megatron_sb::hopper
