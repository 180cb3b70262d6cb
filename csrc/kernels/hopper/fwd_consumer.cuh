// A consumer warpgroup of the forward. It owns 64 query rows of each work tile and reads the key tiles from the newest
// to the oldest:
//
//     S = Q K^T (wgmma)  ->  weights A (fwd_scan.cuh)  ->  O += A V (wgmma)
//
// While the scan turns the scores of one key tile into weights, O += A V of the previous tile runs on the tensor cores.
// While the output of a work tile is written, the first S of the next work tile runs. In the remaining time, the tensor
// cores run products of the other warpgroups.
//
// Synchronisation. Consumers wait on `q.full`, on which the producer arrives, and on `k.full` and `v.full`, on which
// the producer or a tail loader arrives. Consumers arrive on `q.empty`, `k.empty` and `v.empty`; the producer waits on
// them. A warp releases a slot only after wgmma_wait has returned for all its products that read the slot. It releases
// the Q slot only after it has also read back the output that it staged there. Wide heads have one Q slot and stage the
// output elsewhere: a warp releases Q after its last S, so the next Q arrives during the last scan. Consumers must not
// wait for the next work tile before that.
#pragma once

#include "kernels/hopper/fwd_gated_scan.cuh"
#include "kernels/hopper/fwd_producer.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

using common::kWeightScale;

template <class T>
class ForwardConsumer {
  public:
    using Element = typename T::Element;
    using KvPlace = Place<kKvStages>;
    static constexpr float kOutputScale = 1.f / kWeightScale<Element>;

    __device__ ForwardConsumer(typename T::Shared& shared, const ForwardArguments& arguments, int warpgroup)
        : shared_(shared),
          control_(shared.control),
          args_(arguments),
          warpgroup_(warpgroup),
          warp_(threadIdx.x % 128 / 32),
          lane_(threadIdx.x % 32) {
        q_low_ = descriptor_low(shared_address(shared.q[0]) + warpgroup * 64 * kRowBytes, 0);
        k_low_ = descriptor_low(shared_address(shared.k[0]), 0);
        v_low_ = descriptor_low(shared_address(shared.v[0]), T::kKeyPanelBytes);
    }

    __device__ __forceinline__ void run() {
        bool more = wait_for_work_tile();
        issue_scores();
        while (more) {
            init_rows();
            const bool pending = attend();
            wait_for_values();
            if (pending) issue_output();
            ++work_number_;
            more = wait_for_work_tile();
            issue_scores();  // after the last work tile this multiplies stale data; the result is not used
            write_mass_and_restart(work_number_ - 1);
            wgmma_wait<1>();
            fence_accumulator(o_);
            release(control_.v, v_uses_);
            write_output(work_number_ - 1);
            if constexpr (!T::kWide) release_queries(work_number_ - 1);
        }
        wgmma_wait<0>();
    }

  private:
    // Waits for work tile work_number_: on q.full for Q, then on k.full for the newest K tile. Returns false if there
    // is no such work tile; it then waits on q.full only.
    __device__ __forceinline__ bool wait_for_work_tile() {
        control_.q.wait_full(Place<T::kQueryStages>::of(work_number_));
        const bool more = __shfl_sync(~0u, work(work_number_).queries.num_rows, 0) > 0;
        if (more) wait_for_keys();
        return more;
    }
    __device__ __forceinline__ void wait_for_keys() { control_.k.wait_full(KvPlace::of(k_uses_)); }
    __device__ __forceinline__ void wait_for_values() { control_.v.wait_full(KvPlace::of(v_uses_)); }

    // Returns where the Q slot of the current work tile begins, in units of a descriptor. With one slot this is 0,
    // since no CTA gets 2^30 work tiles. But ptxas must not know: it would compute the descriptors of all steps once
    // for all work tiles, and spill them.
    __device__ __forceinline__ int query_offset() const {
        if constexpr (T::kWide)
            return work_number_ >> 30;
        else
            return work_number_ % T::kQueryStages * (T::kQueryBytes >> 4);
    }

    // Issues S = Q K^T for the tile in K slot k_uses_.
    __device__ __forceinline__ void issue_scores() {
        const uint32_t q = q_low_ + query_offset();
        const uint32_t k = k_low_ + k_uses_ % kKvStages * (T::kKeyBytes >> 4);
        wgmma_fence();
        wgmma_overwrite(Element{}, s_, descriptor(q), descriptor(k));
#pragma unroll
        for (int step = 1; step < T::kHeadDim / 16; ++step) {
            const int panel = step / 4, column = step % 4 * 2;  // 16 elements are 32 bytes, or 2 units of a descriptor
            wgmma_accumulate(Element{}, s_, descriptor(q + panel * (T::kQueryPanelBytes >> 4) + column),
                             descriptor(k + panel * (T::kKeyPanelBytes >> 4) + column));
        }
        if constexpr (T::kBiases > 0) {
            const uint32_t zeros = shared_address(shared_.zeros);
            const uint32_t q_biases =
                shared_address(shared_.q_biases[work_number_ % T::kQueryStages]) + warpgroup_ * 64 * kBiasRowBytes;
            const uint32_t k_biases = shared_address(shared_.k_biases[k_uses_ % kKvStages]);
            wgmma_accumulate(Element{}, s_, bias_descriptor(q_biases, zeros), bias_descriptor(k_biases, zeros));
        }
        wgmma_commit();
    }

    // Issues O += A V for the tile in V slot v_uses_.
    __device__ __forceinline__ void issue_output() {
        const uint32_t v = v_low_ + v_uses_ % kKvStages * (T::kValueBytes >> 4);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < T::kKeyTile / 16; ++step)
            wgmma_accumulate(Element{}, o_, weights_ + 4 * step, descriptor(v + step * (16 * kRowBytes >> 4)));
        wgmma_commit();
    }

    // Releases a slot of K or V: lane 0 of each consumer warp arrives, the producer waits. No warpgroup barrier is
    // needed, because each warp arrives for its own part of the products.
    template <class Ring>
    __device__ __forceinline__ void release(Ring& ring, int& uses) {
        if (lane_ == 0) ring.empty.arrive(KvPlace::of(uses));
        ++uses;
    }
    // Releases the Q slot of work tile `number`: every consumer thread arrives on q.empty, the producer waits. The
    // fence orders the output that was staged in the slot before the next TMA load into it.
    __device__ __forceinline__ void release_queries(int number) {
        if constexpr (!T::kWide) fence_async_proxy();
        control_.q.empty.arrive(Place<T::kQueryStages>::of(number));
    }

    // Releases K tile i, whose S is done. With one Q slot it also releases Q after tile 0, the last that needs it.
    __device__ __forceinline__ void release_keys(int i) {
        release(control_.k, k_uses_);
        if constexpr (T::kWide)
            if (i == 0) release_queries(work_number_);
    }

    // Read from shared memory at each use, because registers are scarce.
    __device__ __forceinline__ const WorkTile& work(int number) const {
        return control_.work[number % T::kWorkSlots];
    }
    __device__ __forceinline__ int row(int r) const {
        return warpgroup_ * 64 + warp_ * 16 + lane_ / 4 + 8 * r;
    }
    // Index of this thread's row 0 in a tensor (batch, head, row).
    __device__ __forceinline__ int64_t row_index(const WorkTile& work) const {
        const Sizes& z = args_.params.sizes;
        return (int64_t(work.batch) * z.num_heads + work.head) * z.q_rows + work.queries.q_row + row(0);
    }

    // Rows beyond the end of the query tile start with mass 0.
    __device__ __forceinline__ void init_rows() {
        const float* mass_in = static_cast<const float*>(args_.params.mass_in);
        const WorkTile& work = this->work(work_number_);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows_.mass[r] = 0.f;
            if (row(r) < work.queries.num_rows)
                rows_.mass[r] = kWeightScale<Element> * (mass_in == nullptr ? 1.f : mass_in[row_index(work) + 8 * r]);
            rows_.restart_mass[r] = 0.f;
            rows_.restart_tile[r] = -1;
        }
    }

    // Processes all key tiles of a work tile. Returns true if the caller must still issue O += A V for the oldest tile,
    // with the weights in registers. Returns false if the warpgroup exited early and all its products are done.
    __device__ __forceinline__ bool attend() {
        // i runs from the newest tile to the oldest, tile 0. All rows of this warpgroup see every key of the tiles
        // below `first_partial`.
        int i = __shfl_sync(~0u, num_key_tiles<T::kKeyTile>(work(work_number_).queries), 0) - 1;
        const int first_partial =
            __shfl_sync(~0u, visible_keys(work(work_number_).queries, warpgroup_ * 64), 0) / T::kKeyTile;
        wait_for_gates();
        wgmma_wait<0>();
        fence_accumulator(s_);
        release_keys(i);
        clear_accumulator(o_);
        scan_scores(i, true);
        pack_weights();
        if (i > 0 && used_up()) {  // exits one tile earlier than attend_tile would; common with short sticks
            wait_for_values();
            issue_output();
            wgmma_wait<0>();
            fence_accumulator(o_);
            release_unread(i);
            return false;
        }
        for (--i; i >= 0; --i)
            if (!attend_tile(i, first_partial)) {
                release_unread(i + 1);
                return false;
            }
        return true;
    }

    // Processes tile i. Returns false if the newer tiles used up all rows of this warpgroup. The caller must then
    // release K slot k_uses_.
    __device__ __forceinline__ bool attend_tile(int i, int first_partial) {
        wait_for_keys();
        issue_scores();
        const bool done = used_up();
        wait_for_values();
        issue_output();
        if (done) {
            wgmma_wait<0>();
            fence_accumulator(s_);
            fence_accumulator(o_);
            return false;
        }
        wait_for_gates();
        wgmma_wait<1>();
        fence_accumulator(s_);
        release_keys(i);
        scan_scores(i, i >= first_partial);
        wgmma_wait<0>();
        fence_accumulator(o_);
        release(control_.v, v_uses_);
        pack_weights();
        return true;
    }

    // Returns true if all rows of this warpgroup are used up. The result must look uniform to ptxas, because it ends
    // the loop over tiles. Otherwise ptxas keeps the wgmma descriptors in per-thread registers, which costs 5%. A load
    // from one shared address looks uniform; the result of a vote, or a shuffle of it, does not. So every warp reads
    // all four votes from shared memory. The named barrier of the warpgroup separates the writes from the reads. The
    // next vote uses the other buffer, so it cannot overwrite a vote that a warp has yet to read.
    __device__ __forceinline__ bool used_up() {
        const bool mine = __all_sync(~0u, !(fmaxf(rows_.mass[0], rows_.mass[1]) >= args_.min_mass));
        int4& votes = control_.used_up_votes[votes_++ & 1][warpgroup_];
        if (lane_ == 0) reinterpret_cast<int*>(&votes)[warp_] = mine;
        warpgroup_barrier(barrier_of_consumer(warpgroup_));
        const int4 all = votes;
        return all.x & all.y & all.z & all.w;
    }

    // Waits for and releases the `tiles` oldest K tiles without reading them, until the producer sends the end of keys.
    // Also releases the V slots, except the last one: run() releases it. Wide heads also release Q, which no later S
    // reads.
    __device__ __forceinline__ void release_unread(int tiles) {
        if constexpr (T::kWide) release_queries(work_number_);
        for (; tiles > 0; --tiles) {
            wait_for_keys();
            const int slot = KvPlace::of(k_uses_).slot;
            const bool end = control_.end_of_keys.has_happened({slot, end_of_keys_phases_ >> slot & 1});
            // Tells the producer that this warp has stopped computing: lane 0 writes and then arrives on k.empty; the
            // producer waits on k.empty and then reads.
            if (lane_ == 0) control_.used_up_work[slot][4 * warpgroup_ + warp_] = work_number_;
            release(control_.k, k_uses_);
            if (end) {
                end_of_keys_phases_ ^= 1 << slot;
                return;
            }
            release(control_.v, v_uses_);
            wait_for_values();
            skip_gates();
        }
    }

    // Replaces the scores of tile i by weights.
    __device__ __forceinline__ void scan_scores(int i, bool partial) {
        if (partial) mask(i);
        const HeadLogits logits = {args_.scale_log2, work(work_number_).offset};
        ForwardScan<T::kKeysPerThread> scan(s_, logits, lane_ % 4, args_.restart_floor, i, rows_);
        if constexpr (T::kGated) {
            const auto place = Place<kGateStages>::of(gate_uses_++);
            GatedForwardScan(scan, control_.gates_of_slot[place.slot]).run();
            control_.gates.empty.arrive(place);
        } else {
            scan.run();
        }
    }
    // Waits for the gates of the next tile.
    __device__ __forceinline__ void wait_for_gates() {
        if constexpr (T::kGated) control_.gates.wait_full(Place<kGateStages>::of(gate_uses_));
    }
    // Releases the gates of a tile that is not scanned.
    __device__ __forceinline__ void skip_gates() {
        wait_for_gates();
        if constexpr (T::kGated) control_.gates.empty.arrive(Place<kGateStages>::of(gate_uses_++));
    }

    // Hides the keys that a row does not see: e of a hidden key is 0.
    __device__ __forceinline__ void mask(int i) {
        const float hidden = copysignf(INFINITY, -args_.scale_log2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int num_visible =
                visible_keys(work(work_number_).queries, row(r)) - i * T::kKeyTile - lane_ % 4 * T::kKeysPerThread;
#pragma unroll
            for (int k = 0; k < T::kKeysPerThread; ++k)
                if (k >= num_visible) s_[accumulator_register(r, k)] = hidden;
        }
    }

    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int i = 0; i < T::kKeyTile / 4; ++i) weights_[i] = pack<Element>(s_[2 * i], s_[2 * i + 1]);
    }

    // Writes the mass and the restart record of each row. In each tile of 128 keys, the keys of threads 1 and 3 of a
    // quad end at the edges 64 and 128, so each of the two threads has a candidate. In a tile of 64 keys, only thread 3
    // has one. The record is the oldest candidate. It is edge 0 (before all keys) if the row still has mass at the end.
    __device__ __forceinline__ void write_mass_and_restart(int number) {
        constexpr int kNone = 0x7fffffff;
        constexpr bool kTwoEdges = T::kKeyTile == 2 * kRestartTile;
        static_assert(kTwoEdges || T::kKeyTile == kRestartTile,
                      "threads must have their candidates at edges of the grid");
        const QueryTile& queries = work(number).queries;
        const int64_t index = row_index(work(number));
        float* const mass_out = static_cast<float*>(args_.params.mass_out) + index;
        float* const restart_mass = static_cast<float*>(args_.params.restart.mass) + index;
        int32_t* const restart_edge = args_.params.restart.edge + index;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int found = rows_.restart_tile[r];
            const int edge = found < 0 ? kNone : found * T::kKeyTile + (lane_ % 4 + 1) * T::kKeysPerThread;
            const int other_edge = kTwoEdges ? __shfl_xor_sync(~0u, edge, 2) : kNone, oldest = min(edge, other_edge);
            const float other_mass = kTwoEdges ? __shfl_xor_sync(~0u, rows_.restart_mass[r], 2) : 0.f;
            if (lane_ % 4 != (kTwoEdges ? 1 : 3) || row(r) >= queries.num_rows) continue;
            const bool live = rows_.mass[r] >= args_.restart_floor, none = oldest == kNone;
            const float newer_mass = none ? 0.f : edge < other_edge ? rows_.restart_mass[r] : other_mass;
            mass_out[8 * r] = rows_.mass[r] * kOutputScale;
            restart_edge[8 * r] = live || none ? 0 : min(oldest, queries.k_len);
            restart_mass[8 * r] = (live ? rows_.mass[r] : newer_mass) * kOutputScale;
        }
    }

    // Writes the output. A 16-bit output goes through shared memory, so that a warp writes whole rows: through the Q
    // slot, or at wide heads through memory of the warp.
    __device__ __forceinline__ void write_output(int number) {
        const WorkTile& work = this->work(number);
        const Rows<void*>& o = args_.params.o;
        const int warp_row = warpgroup_ * 64 + warp_ * 16, rows = work.queries.num_rows - warp_row;
        const int64_t offset = work.batch * o.batch_stride + (int64_t(work.queries.q_row) + warp_row) * o.row_stride +
                               work.head * o.head_stride;
        if (args_.params.o_dtype == Dtype::kFloat32)
            write_float(static_cast<float*>(o.data) + offset, o.row_stride, rows);
        else
            write_packed(static_cast<uint16_t*>(o.data) + offset, o.row_stride, rows, staging(number, warp_row));
    }
    // Returns the address at which this warp stages its 16 rows of the output.
    __device__ __forceinline__ uint32_t staging(int number, int warp_row) const {
        if constexpr (T::kWide)
            return shared_address(shared_.o[warp_row / 16]);
        else
            return shared_address(shared_.q[number % T::kQueryStages]) + warp_row * kRowBytes;
    }
    // With add_o it adds. One thread of a launch adds to each element, and launches are ordered by the stream, so
    // results are repeatable. Atomics are used because a thread that read, added and wrote would wait for the values.
    __device__ __forceinline__ void write_float(float* to, int64_t row_stride, int rows) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane_ / 4 + 8 * r;
            if (row >= rows) continue;
            float* const first = to + row * row_stride + lane_ % 4 * 2;
#pragma unroll
            for (int n = 0; n < T::kHeadDimV / 8; ++n) {
                if (8 * n >= args_.params.sizes.head_dim_v) continue;
                const float x = o_[4 * n + 2 * r] * kOutputScale, y = o_[4 * n + 2 * r + 1] * kOutputScale;
                args_.params.add_o ? reduce_add_global(first + 8 * n, x, y) : store_global(first + 8 * n, x, y);
            }
        }
    }
    // `staged` is where this warp stages its 16 rows, with the swizzle of TMA. In the Q slot, products of the other
    // warps may still read these rows, until each warp has waited for its own products before the barrier.
    __device__ __forceinline__ void write_packed(uint16_t* to, int64_t row_stride, int rows, uint32_t staged) {
        if constexpr (!T::kWide) warpgroup_barrier(barrier_of_consumer(warpgroup_));
#pragma unroll
        for (int panel = 0; panel < T::kValuePanels; panel += T::kStagedPanels) {
            if constexpr (T::kWide) __syncwarp();  // the lanes have read the panel that was staged before
            stage(panel, staged);
            __syncwarp();
            write_staged(to + panel * 64, row_stride, args_.params.sizes.head_dim_v - panel * 64, rows, staged);
        }
    }
    // Writes kStagedPanels panels of the output to shared memory, from `panel` on.
    __device__ __forceinline__ void stage(int panel, uint32_t staged) {
        const int matrix = lane_ / 8, matrix_row = lane_ % 8;  // stmatrix takes the address of this row from the lane
        const uint32_t lane_to = staged + (matrix % 2 * 8 + matrix_row) * kRowBytes + ((matrix / 2 ^ matrix_row) << 4);
#pragma unroll
        for (int n = 0; n < min(8 * T::kStagedPanels, T::kHeadDimV / 8); n += 2) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const pair = &o_[4 * (8 * panel + n + i / 2) + i % 2 * 2];
                x[i] = pack<Element>(pair[0] * kOutputScale, pair[1] * kOutputScale);
            }
            stmatrix_x4((lane_to ^ n % 8 * 16) + n / 8 * T::kQueryPanelBytes, x);
        }
    }
    // Copies the staged panels to `to`, where only the first `columns` columns exist.
    __device__ __forceinline__ void write_staged(uint16_t* to, int64_t row_stride, int columns, int rows,
                                                 uint32_t staged) {
        constexpr int kChunks = T::kStagedPanels * 8, kRowsAtOnce = 32 / kChunks;
        const int chunk = lane_ % kChunks, first = lane_ / kChunks;
        if (chunk * 8 >= columns) rows = 0;
        to += first * row_stride + chunk * 8;
        row_stride *= kRowsAtOnce;
        uint4 x[16 / kRowsAtOnce];  // all loads are issued before the first store waits for one
#pragma unroll
        for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
            const int row = first + i * kRowsAtOnce;
            x[i] =
                load_shared(staged + chunk / 8 * T::kQueryPanelBytes + row * kRowBytes + ((chunk % 8 ^ row % 8) << 4));
        }
#pragma unroll
        for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
            store_global_if(first + i * kRowsAtOnce < rows, to, x[i]);
            to += row_stride;
        }
    }

    typename T::Shared& shared_;
    ForwardControl<T>& control_;
    const ForwardArguments& args_;
    const int warpgroup_, warp_, lane_;
    uint32_t q_low_, k_low_, v_low_;
    int work_number_ = 0, votes_ = 0;
    int k_uses_ = 0, v_uses_ = 0;  // uses of the rings so far; with unsigned numbers the scan at head_dim 64 spills
    int gate_uses_ = 0;
    int end_of_keys_phases_ = 0;  // bit i: phase of the next end of keys in slot i
    RowState rows_;
    float s_[T::kKeyTile / 2], o_[T::kHeadDimV / 2];
    uint32_t weights_[T::kKeyTile / 4];
};

}  // namespace megatron_sb::hopper
