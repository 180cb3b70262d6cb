// Shared by all consumer threads of the backward: addresses, barriers, and the output of dq, dk and dv.
// bwd_additions.cuh describes the barriers of the additions to dq.
#pragma once

#include "kernels/common/scalars.h"
#include "kernels/hopper/bwd_common.cuh"
#include "kernels/hopper/tile_copy.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

// A thread of a consumer warpgroup. The accumulators of a warpgroup have 64 rows: query rows for dQ, keys for dK and
// dV.
template <class T>
class BackwardThread {
  protected:
    using Element = typename T::Element;
    // In units of a descriptor, 16 bytes.
    static constexpr int kTile = T::kTileBytes >> 4, kValueTile = T::kValueTileBytes >> 4;
    static constexpr int kPanel = T::kPanelBytes >> 4, kStage = T::kStageBytes >> 4;

    __device__ __forceinline__ BackwardThread(typename T::Shared& shared, const BackwardArguments& arguments)
        : shared_(shared),
          control_(shared.control),
          args_(arguments),
          warp_(__shfl_sync(~0u, int(threadIdx.x / 32 % 4), 0)),
          lane_(__shfl_sync(~0u, int(threadIdx.x % 32), int(threadIdx.x % 32))),  // ptxas cannot read it again
          store_offset_((warp_ * 16 + lane_ % 8) * 128 + ((lane_ / 8) ^ (lane_ % 8)) * 16) {}

    __device__ __forceinline__ const Step& step(uint32_t number) const {
        return control_.step_info[number % kStepRing];
    }
    __device__ __forceinline__ int row(int r) const { return warp_ * 16 + lane_ / 4 + 8 * r; }
    // Releases a slot of a ring: lane 0 of each reading warp arrives on `empty`, the writer of the slot waits. Products
    // have read the slot for the whole warp when wgmma_wait returns. Sums of dz are read by each lane.
    template <class Ring, class Place>
    __device__ __forceinline__ void release(Ring& ring, const Place& item) const {
        if constexpr (T::kBiases > 0) __syncwarp();
        if (lane_ == 0) ring.empty.arrive(item);
    }
    // Signals that the data of this warp is ready, after each lane has written and fenced its part. Lane 0 arrives on
    // `full`; the warps that read the data wait.
    template <class Ring, class Place>
    __device__ __forceinline__ void signal(Ring& ring, const Place& item) const {
        __syncwarp();
        if (lane_ == 0) ring.full.arrive(item);
    }
    // Returns x as a value that the compiler cannot trace. It then recomputes derived values in each round. If it
    // hoisted them out of the loops, it would run out of uniform registers.
    __device__ __forceinline__ static uint32_t opaque(uint32_t x) {
        uint32_t y;
        asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
        return y;
    }

    // ---- products. Operands in shared memory are given by their descriptors.

    // Issues dQ = dz K for 64 columns of K.
    __device__ __forceinline__ static void issue_dq(float (&dq)[32], uint32_t dz, uint32_t k) {
        wgmma_overwrite<0, 1>(Element{}, dq, descriptor(dz), descriptor(k));
#pragma unroll
        for (int i = 1; i < T::kKeyTile / 16; ++i)
            wgmma_accumulate<0, 1>(Element{}, dq, descriptor(dz + i / 4 * kPanel + i % 4 * 2),
                                   descriptor(k + i / 4 * kTile + i % 4 * 128));
        wgmma_commit();
    }
    // Adds a^T b, a sum over the rows of a step, to d.
    template <int N>
    __device__ __forceinline__ static void add_product_over_rows(float (&d)[N], uint32_t a, uint32_t b) {
#pragma unroll
        for (int i = 0; i < kStepRows / 16; ++i)
            wgmma_accumulate<1, 1>(Element{}, d, descriptor(a + i * 128), descriptor(b + i * 128));
    }

    // ---- gradients of biases: sums of the rounded dz

    // Returns the sum of dz over the key tile, for the query row whose number is that of this thread. `slot` is that of
    // dz. Threads from kStepRows on have no row.
    __device__ __forceinline__ float dz_sum(int slot) const {
        const int row = warp_ * 32 + lane_;
        if constexpr (T::kBiases > 0)
            if (row < kStepRows) return shared_.dz_sums[slot][0][row] + shared_.dz_sums[slot][1][row];
        return 0.f;
    }
    // Issues dk += dz^T Q in the bias columns, a product with eight columns, for the keys of a half tile and the rows
    // of a stage.
    __device__ __forceinline__ void issue_bias_dk(float (&dk)[4], uint32_t dz, int stage) const {
        const uint32_t queries = shared_address(shared_.q_biases[stage]);
#pragma unroll
        for (int i = 0; i < kStepRows / 16; ++i)
            wgmma_accumulate<1, 1>(Element{}, dk, descriptor(dz + i * 128),
                                   bias_rows_descriptor(queries + i * 2 * kBiasMatrixBytes));
    }
    // Writes the bias columns of dk of a half tile: the rows of the accumulator are its keys, in the order of shared
    // memory.
    __device__ __forceinline__ void write_bias_dk(const Step& step, int half, const float (&sums)[4]) const {
        const int column = T::kHeadDim + lane_ % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = half * kHalfTileKeys + KeyOrder<kHalfTileKeys>()(row(r));
            if (key >= step.tile_keys) continue;
            const float x = sums[2 * r] * args_.scale, y = sums[2 * r + 1] * args_.scale;
            if (writes_fp32(step)) {
                const Fp32Rows to = fp32_rows(dk(), step);
                store_global(to.first + key * to.row_stride + column, x, y);
            } else {
                Element* const to = key_row<Element>(dk().rows, step, key) + column;
                *reinterpret_cast<uint32_t*>(to) = pack<Element>(x, y);
            }
        }
    }

    // Where a thread adds its part of dq of a step. `part` is the index of a group of 64 columns.
    struct DqTarget {
        float* sum;
        int flags;  // of the step
    };
    __device__ __forceinline__ DqTarget dq_target(uint32_t number, int part) const {
        const Step& step = this->step(number);
        const int thread = warp_ * 32 + lane_;
        return {args_.plan.dq + (int64_t(step.dq_index) * T::kPanels + part) * (kStepRows * 64) +
                    int64_t(step.dq_index) * T::kBiasSums + thread * 4,
                step.flags};
    }
    // Whether this thread adds to the gradient of a query's bias, which comes after the 64 columns of the last part.
    __device__ __forceinline__ bool adds_bias(int part) const {
        return T::kBiases > 0 && part == T::kPanels - 1 && warp_ < kStepRows / 32;
    }
    // Adds what this key tile contributes to 64 columns of dq of a step, at head_dim 128. Key tiles add in order, the
    // oldest first: it stores, the next ones add. `dz_sum` is dz_sum() of the step.
    __device__ __forceinline__ void add_dq(uint32_t number, const DqTarget& target, const float (&dq)[32], int part,
                                           float dz_sum) const {
        const auto turn = TurnPlace<T>::of(number);
        control_.dq_turn.wait(turn);
        float* const sum = target.sum;
        float* const bias = sum + kStepRows * 64 - 3 * (warp_ * 32 + lane_);
        if (target.flags & kOldestKeyTile) {
#pragma unroll
            for (int v = 0; v < kDqVectors; ++v)
                if (is_computed(part * 64 + 8 * v))
                    *reinterpret_cast<float4*>(sum + v * 4 * kDqThreads) =
                        make_float4(dq[4 * v], dq[4 * v + 1], dq[4 * v + 2], dq[4 * v + 3]);
            if (adds_bias(part)) store_global(bias, dz_sum);
        } else {
#pragma unroll
            for (int v = 0; v < kDqVectors; ++v)
                if (is_computed(part * 64 + 8 * v))
                    reduce_add_global(sum + v * 4 * kDqThreads, dq[4 * v], dq[4 * v + 1], dq[4 * v + 2], dq[4 * v + 3]);
            if (adds_bias(part)) reduce_add_global(bias, dz_sum);
        }
        __syncwarp();
        if (lane_ == 0) control_.dq_added.arrive(turn);
    }
    // Hands 64 columns of dQ of a step to BulkAdder through shared memory, at head_dim 64 and in the wide kernels.
    // `staged` is the address of the first slot. Waits on dq_staged.empty, on which BulkAdder arrives. Arrives on
    // dq_staged.full, on which it waits.
    __device__ __forceinline__ void pass_on_dq(uint32_t number, const float (&dq)[32], int part, uint32_t staged,
                                               float dz_sum = 0.f) const {
        const auto slot = Place<T::kDqSlots>::of(number * T::kPanels + part);
        control_.dq_staged.wait_empty(slot);
        const uint32_t first = staged + slot.slot * sizeof(float) * T::kDqFloats;
        const uint32_t to = first + (warp_ * 32 + lane_) * 16;
#pragma unroll
        for (int v = 0; v < kDqVectors; ++v) {
            const float* const x = dq + 4 * v;
            store_shared(to + v * 16 * kDqThreads, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                                              __float_as_uint(x[2]), __float_as_uint(x[3])));
        }
        if (adds_bias(part)) store_shared(first + (kStepRows * 64 + warp_ * 32 + lane_) * sizeof(float), dz_sum);
        fence_async_proxy();
        signal(control_.dq_staged, slot);
    }
    // dk or dv: where it is written, and the factor of the sums in the accumulators.
    struct KeyGradient {
        const Rows<void*>& rows;
        int columns;     // of the head
        float* partial;  // sums of the parts of a key tile
        float factor;
    };
    __device__ __forceinline__ KeyGradient dk() const {
        return {args_.params.dk, args_.params.sizes.head_dim, args_.plan.partial_dk, args_.scale};
    }
    __device__ __forceinline__ KeyGradient dv() const {
        constexpr float kOutputScale = 1.f / common::kWeightScale<Element>;
        return {args_.params.dv, args_.params.sizes.head_dim_v, args_.plan.partial_dv, kOutputScale};
    }
    // Writes columns of a gradient for a half tile, from `column` on, which is a multiple of 64. The rows of the
    // accumulator x are its keys, in the order of shared memory. `staged` is the address of shared memory for 64 rows
    // of 64 columns. The caller guarantees that nothing else uses this memory and that all products that read it are
    // done, in all warps.
    template <int N>
    __device__ __forceinline__ void write_keys(const KeyGradient& to, const Step& step, int half, uint32_t staged,
                                               const float (&x)[N], int column = 0) const {
        if (writes_fp32(step))
            write_fp32(to, step, half, x, column);
        else
            write_rows(to, step, half, staged, x, column);
    }
    // The same for both halves, at head_dim 64, from transposed accumulators: their rows are the columns of the head
    // dimension, their columns are the keys in the order of shared memory. Staging takes 128 rows of 64 columns for
    // each. All 128 threads call it together; products may read the staging space until they do.
    __device__ __forceinline__ void write_transposed_dk_dv(const Step& step, uint32_t staged_dk, uint32_t staged_dv,
                                                           const float (&dk_sums)[64],
                                                           const float (&dv_sums)[64]) const {
        if (writes_fp32(step)) {
            write_transposed_fp32(dk(), step, dk_sums);
            write_transposed_fp32(dv(), step, dv_sums);
            return;
        }
        warpgroup_barrier(NamedBarrier::kConsumer2);
        stage_transposed(staged_dk, dk_sums, dk().factor);
        stage_transposed(staged_dv, dv_sums, dv().factor);
        warpgroup_barrier(NamedBarrier::kConsumer2);
        write_staged_keys(dk(), step, staged_dk);
        write_staged_keys(dv(), step, staged_dv);
    }
    // Writes the gradient of the gate of a key to the columns of dk after the key, or stores it as that of a part of
    // the key tile.
    __device__ __forceinline__ void write_gate_gradient(const Step& step, int key, float gradient) const {
        if (step.flags & kPartialSums)
            args_.plan.partial_gates[partial_row(step) + key] = gradient;
        else if (has_fp32_gradients())
            write_gate_columns(key_row<float>(dk().rows, step, key) + dk().columns, gradient);
        else
            write_gate_columns(key_row<Element>(dk().rows, step, key) + dk().columns, gradient);
    }
    // Stores 64 columns of row r of the accumulator with stmatrix. Each lane passes the address of 8 columns of one
    // row.
    __device__ __forceinline__ void store_rows(uint32_t tile, int r, const uint32_t (&x)[8]) const {
        stmatrix_x4(tile + store_offset_ + r * 8 * 128, {x[0], x[1], x[2], x[3]});
        stmatrix_x4(tile + (store_offset_ ^ 64) + r * 8 * 128, {x[4], x[5], x[6], x[7]});
    }

  private:
    // Whether a column of dq belongs to the head. At head_dim 96, dQ has zeros in the columns from 96 to 127.
    __device__ __forceinline__ static bool is_computed(int column) {
        return T::kHeadDim % 64 == 0 || column < T::kHeadDim;
    }

    // dk or dv of a key tile in fp32: the gradients, or the sums of a part of the tile.
    struct Fp32Rows {
        float* first;  // row of the first key
        int64_t row_stride;
        int columns;
    };
    __device__ __forceinline__ bool writes_fp32(const Step& step) const {
        return step.flags & kPartialSums || has_fp32_gradients();
    }
    __device__ __forceinline__ Fp32Rows fp32_rows(const KeyGradient& to, const Step& step) const {
        if (!(step.flags & kPartialSums)) return {key_row<float>(to.rows, step, 0), to.rows.row_stride, to.columns};
        return {to.partial + partial_row(step) * T::kStored, T::kStored, T::kStored};
    }
    // Index of the first key of a tile in the partial sums of the part.
    __device__ __forceinline__ int64_t partial_row(const Step& step) const {
        const Sizes& sizes = args_.params.sizes;
        return args_.plan.partial_row(sizes, step.part, step.batch * sizes.num_kv_heads + step.kv_head, step.k_row);
    }
    template <int N>
    __device__ __forceinline__ void write_fp32(const KeyGradient& gradient, const Step& step, int half,
                                               const float (&x)[N], int column) const {
        const Fp32Rows to = fp32_rows(gradient, step);
        const int lane = opaque(lane_);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = half * kHalfTileKeys + KeyOrder<kHalfTileKeys>()(warp_ * 16 + lane / 4 + 8 * r);
            if (key >= step.tile_keys) continue;
            float* const first = to.first + key * to.row_stride + column + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < N / 4; ++n) {
                if (column + 8 * n >= to.columns) continue;
                const float* const pair = x + 4 * n + 2 * r;
                store_global(first + 8 * n, pair[0] * gradient.factor, pair[1] * gradient.factor);
            }
        }
    }
    // Each warp writes its own 16 rows through shared memory, so that global memory receives whole rows.
    template <int N>
    __device__ __forceinline__ void write_rows(const KeyGradient& to, const Step& step, int half, uint32_t staged,
                                               const float (&x)[N], int column) const {
        constexpr int kBlocks = N / 4;  // of eight columns
#pragma unroll
        for (int part = 0; part < (kBlocks + 7) / 8; ++part) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32_t packed[8] = {};
#pragma unroll
                for (int n = 0; n < 8 && 8 * part + n < kBlocks; ++n) {
                    const float* const pair = x + 4 * (8 * part + n) + 2 * r;
                    packed[n] = pack<Element>(pair[0] * to.factor, pair[1] * to.factor);
                }
                store_rows(staged, r, packed);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                const int row = warp_ * 16 + i + lane_ / 8, key = half * kHalfTileKeys + KeyOrder<kHalfTileKeys>()(row);
                const uint4 eight = load_shared(staged + row * 128 + ((lane_ % 8 ^ row % 8) << 4));
                const int first = column + part * 64 + lane_ % 8 * 8;
                store_global_if(key < step.tile_keys && first < to.columns,
                                key_row<Element>(to.rows, step, key) + first, eight);
            }
            __syncwarp();
        }
    }
    // The same for transposed accumulators. A thread has 16 neighbouring keys of each half. For each key, the lanes
    // of a warp write two groups of eight neighbouring columns, whole sectors.
    __device__ __forceinline__ void write_transposed_fp32(const KeyGradient& gradient, const Step& step,
                                                          const float (&x)[64]) const {
        const Fp32Rows to = fp32_rows(gradient, step);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first_key = half * kHalfTileKeys + lane_ % 4 * kBackwardKeysPerThread;
            float* at = to.first + first_key * to.row_stride + row(0);
#pragma unroll
            for (int k = 0; k < kBackwardKeysPerThread; ++k, at += to.row_stride) {
                if (first_key + k >= step.tile_keys) continue;
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (row(r) < to.columns)
                        store_global(at + 8 * r, x[32 * half + accumulator_register(r, k)] * gradient.factor);
            }
        }
    }
    // Stores the accumulator as rows of 64 columns, one for each key.
    __device__ __forceinline__ void stage_transposed(uint32_t to, const float (&x)[64], float factor) const {
        const int lane = opaque(lane_), group = lane / 16, columns = warp_ * 2 + lane / 8 % 2;
        const uint32_t first = to + (group * 8 + lane % 8) * 128 + (columns ^ (lane % 8)) * 16;
#pragma unroll
        for (int n = 0; n < T::kKeyTile / 8; n += 2) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                packed[i] = pack<Element>(x[4 * n + 2 * i] * factor, x[4 * n + 2 * i + 1] * factor);
            stmatrix_x4_transposed(first + n * 8 * 128, packed);
        }
    }
    __device__ __forceinline__ void write_staged_keys(const KeyGradient& to, const Step& step, uint32_t staged) const {
        const int lane = opaque(lane_);
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            const int row = warp_ * 32 + i + lane / 8;
            const int key = row / kHalfTileKeys * kHalfTileKeys + KeyOrder<kHalfTileKeys>()(row % kHalfTileKeys);
            const uint4 eight = load_shared(staged + row * 128 + ((lane % 8 ^ row % 8) << 4));
            store_global_if(key < step.tile_keys && lane % 8 * 8 < to.columns,
                            key_row<Element>(to.rows, step, key) + lane % 8 * 8, eight);
        }
    }
    template <class Out>
    __device__ __forceinline__ Out* key_row(const Rows<void*>& to, const Step& step, int key) const {
        return static_cast<Out*>(to.data) + step.batch * to.batch_stride + step.kv_head * to.head_stride +
               (step.k_row + key) * to.row_stride;
    }

    __device__ __forceinline__ bool has_fp32_gradients() const {
        return args_.params.grad_dtype == Dtype::kFloat32;
    }

  protected:
    typename T::Shared& shared_;
    BackwardControl<T>& control_;
    const BackwardArguments& args_;
    const int warp_, lane_;

  private:
    const uint32_t store_offset_;  // offset of the 8 columns that this lane passes to stmatrix
};

}  // namespace megatron_sb::hopper
