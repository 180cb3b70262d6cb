// A consumer warpgroup: 64 query rows of a work tile, newest key tile to oldest.
//
// O += A V of a key tile is in flight while the scores of the next become weights, and the first S = Q K^T of the next
// work tile while this one's output is written; the other warpgroups fill what is left of the tensor cores.
#pragma once

#include "kernels/hopper/fwd_producer.cuh"
#include "kernels/hopper/fwd_scan.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

using portable::kWeightScale;

template <class T>
class Consumer {
  public:
    using Element = typename T::Element;
    static constexpr float kOutputScale = 1.f / kWeightScale<Element>;

    __device__ Consumer(typename T::Shared& shared, const Arguments& arguments, int warpgroup)
        : shared_(shared),
          c_(shared.control),
          a_(arguments),
          warpgroup_(warpgroup),
          warp_(threadIdx.x % 128 / 32),
          lane_(threadIdx.x % 32) {
        q_low_ = descriptor_low(shared_address(shared.q[0]) + warpgroup * 64 * kRowBytes, 0);
        k_low_ = descriptor_low(shared_address(shared.k[0]), 0);
        v_low_ = descriptor_low(shared_address(shared.v[0]), T::kKeyHalfBytes);
    }

    __device__ __forceinline__ void run() {
        bool more = next_work();
        issue_scores();
        while (more) {
            start();
            const bool pending = attend();
            wait_for_values();
            if (pending) issue_output();
            ++number_;
            more = next_work();
            issue_scores();  // after the last work tile: of what lies there, and never looked at
            write_rows(number_ - 1);
            wgmma_wait<1>();
            pin(o_);
            release(c_.v_empty, v_uses_);
            write_output(number_ - 1);
            release_queries(number_ - 1);
        }
        wgmma_wait<0>();
    }

  private:
    // Waits for the queries of work tile number_ and its first keys. False if there is no such tile.
    __device__ __forceinline__ bool next_work() {
        mbarrier_wait(&c_.q_full[number_ % kQueryStages], number_ / kQueryStages & 1);
        const bool more = __shfl_sync(~0u, work(number_).queries.num_rows, 0) > 0;
        if (more) wait_for_keys();
        return more;
    }
    __device__ __forceinline__ void wait_for_keys() {
        mbarrier_wait(&c_.k_full[k_uses_ % kStages], k_uses_ / kStages & 1);
    }
    __device__ __forceinline__ void wait_for_values() {
        mbarrier_wait(&c_.v_full[v_uses_ % kStages], v_uses_ / kStages & 1);
    }

    // S = Q K^T of the tile in K slot k_uses_.
    __device__ __forceinline__ void issue_scores() {
        const uint32_t q = q_low_ + number_ % kQueryStages * (T::kQueryBytes >> 4);
        const uint32_t k = k_low_ + k_uses_ % kStages * (T::kKeyBytes >> 4);
        wgmma_fence();
        wgmma_first(Element{}, s_, descriptor(q), descriptor(k));
#pragma unroll
        for (int step = 1; step < T::kHeadDim / 16; ++step) {
            const int half = step / 4, column = step % 4 * 2;  // 16 elements are 32 bytes, 2 in a descriptor
            wgmma_add(Element{}, s_, descriptor(q + half * (T::kQueryHalfBytes >> 4) + column),
                      descriptor(k + half * (T::kKeyHalfBytes >> 4) + column));
        }
        wgmma_commit();
    }

    // O += A V of the tile in V slot v_uses_.
    __device__ __forceinline__ void issue_output() {
        const uint32_t v = v_low_ + v_uses_ % kStages * (T::kKeyBytes >> 4);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kKeyTile / 16; ++step)
            wgmma_add(Element{}, o_, weights_ + 4 * step, descriptor(v + step * (16 * kRowBytes >> 4)));
        wgmma_commit();
    }

    // Each warp speaks for itself.
    __device__ __forceinline__ void release(uint64_t* empty, int& uses) {
        if (lane_ == 0) mbarrier_arrive(&empty[uses % kStages]);
        ++uses;
    }
    __device__ __forceinline__ void release_queries(int number) {
        fence_async_proxy();
        mbarrier_arrive(&c_.q_empty[number % kQueryStages]);
    }

    // Read from shared memory wherever it is needed: registers are scarcer.
    __device__ __forceinline__ const WorkTile& work(int number) const {
        return c_.work[number % kQueryStages];
    }
    __device__ __forceinline__ int row(int r) const {
        return warpgroup_ * 64 + warp_ * 16 + lane_ / 4 + 8 * r;
    }
    // Of row 0 of this thread in tensors (batch, head, row).
    __device__ __forceinline__ int64_t row_index(const WorkTile& work) const {
        const Sizes& z = a_.params.sizes;
        return (int64_t(work.batch) * z.num_heads + work.head) * z.q_rows + work.queries.q_row + row(0);
    }

    // Rows that do not exist have no stick.
    __device__ __forceinline__ void start() {
        const float* mass_in = static_cast<const float*>(a_.params.mass_in);
        const WorkTile& work = this->work(number_);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows_.mass[r] = 0.f;
            if (row(r) < work.queries.num_rows)
                rows_.mass[r] = kWeightScale<Element> * (mass_in == nullptr ? 1.f : mass_in[row_index(work) + 8 * r]);
            rows_.restart_mass[r] = 0.f;
            rows_.restart_tile[r] = -1;
        }
    }

    // Ends with the weights of the last tile in registers and their product with V still to be issued. False if that is
    // not so because the sticks were used up before.
    __device__ __forceinline__ bool attend() {
        // Newest tile first. Those before `first_partial` are seen whole by all rows of this warpgroup.
        int i = __shfl_sync(~0u, num_key_tiles(work(number_).queries), 0) - 1;
        const int first_partial = __shfl_sync(~0u, visible_keys(work(number_).queries, warpgroup_ * 64), 0) / kKeyTile;
        wgmma_wait<0>();
        pin(s_);
        release(c_.k_empty, k_uses_);
#pragma unroll
        for (int n = 0; n < T::kHeadDim / 2; ++n) o_[n] = 0.f;
        pin(o_);
        weigh(i, true);
        pack_weights();
        if (i > 0 && used_up()) {  // as often happens after one tile: sooner than attend_next would find out
            wait_for_values();
            issue_output();
            wgmma_wait<0>();
            pin(o_);
            give_back(i);
            return false;
        }
        for (--i; i >= 0; --i)
            if (!attend_next(i, first_partial)) {
                give_back(i + 1);
                return false;
            }
        return true;
    }

    // Tile i. False, with its keys still to be given back, if the tiles before it used up all sticks of this warpgroup.
    __device__ __forceinline__ bool attend_next(int i, int first_partial) {
        wait_for_keys();
        issue_scores();
        const bool done = used_up();
        wait_for_values();
        issue_output();
        if (done) {
            wgmma_wait<0>();
            pin(s_);
            pin(o_);
            return false;
        }
        wgmma_wait<1>();
        pin(s_);
        release(c_.k_empty, k_uses_);
        weigh(i, i >= first_partial);
        wgmma_wait<0>();
        pin(o_);
        release(c_.v_empty, v_uses_);
        pack_weights();
        return true;
    }

    // True where no row of this warpgroup has any stick left. What the compiler cannot see to be the same in all lanes
    // must not decide about the loop over tiles, or it keeps descriptors in per-thread registers, which costs 5%. So
    // the votes of the warps go through shared memory, read at one address, also for the warp's own.
    __device__ __forceinline__ bool used_up() {
        const bool mine = __all_sync(~0u, !(fmaxf(rows_.mass[0], rows_.mass[1]) >= a_.used_up));
        int4& votes = c_.spent[votes_++ & 1][warpgroup_];
        if (lane_ == 0) reinterpret_cast<int*>(&votes)[warp_] = mine;
        sync_warpgroup();
        const int4 all = votes;
        return all.x & all.y & all.z & all.w;
    }
    // To the producer, with K slot k_uses_.
    __device__ __forceinline__ void tell_used_up() {
        if (lane_ == 0) c_.used_up_in[k_uses_ % kStages][4 * warpgroup_ + warp_] = number_;
    }

    // Gives back the `tiles` oldest tiles unread, as far as they are loaded, but for the last tile of values.
    __device__ __forceinline__ void give_back(int tiles) {
        for (; tiles > 0; --tiles) {
            wait_for_keys();
            const int slot = k_uses_ % kStages;
            const bool end = mbarrier_is_past(&c_.k_end[slot], ends_ >> slot & 1);
            tell_used_up();
            release(c_.k_empty, k_uses_);
            if (end) {
                ends_ ^= 1 << slot;
                return;
            }
            release(c_.v_empty, v_uses_);
            wait_for_values();
        }
    }

    // Scores to weights.
    __device__ __forceinline__ void weigh(int i, bool partial) {
        if (partial) mask(i);
        Scan(s_, a_.scale_log2, lane_ % 4, a_.floor, i, rows_).run();
    }

    // Scores of keys that a row does not see become what gives e = 0.
    __device__ __forceinline__ void mask(int i) {
        const float unseen = copysignf(INFINITY, -a_.scale_log2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int seen = visible_keys(work(number_).queries, row(r)) - i * kKeyTile - lane_ % 4 * kKeysPerThread;
#pragma unroll
            for (int k = 0; k < kKeysPerThread; ++k)
                if (k >= seen) s_[at(r, k)] = unseen;
        }
    }

    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int i = 0; i < 32; ++i) weights_[i] = pack<Element>(s_[2 * i], s_[2 * i + 1]);
    }

    // Mass and restart. Threads 1 and 3 of a quad hold the keys up to the edges 64 and 128 of a tile: the restart is
    // the older of theirs, or before all keys.
    __device__ __forceinline__ void write_rows(int number) {
        constexpr int kNone = 0x7fffffff;
        const QueryTile& queries = work(number).queries;
        const int64_t index = row_index(work(number));
        float* const mass_out = static_cast<float*>(a_.params.mass_out) + index;
        float* const restart_mass = static_cast<float*>(a_.params.restart.mass) + index;
        int32_t* const restart_edge = a_.params.restart.edge + index;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int found = rows_.restart_tile[r];
            const int edge = found < 0 ? kNone : found * kKeyTile + (lane_ % 4 + 1) * kKeysPerThread;
            const int other_edge = __shfl_xor_sync(~0u, edge, 2), oldest = min(edge, other_edge);
            const float other_mass = __shfl_xor_sync(~0u, rows_.restart_mass[r], 2);
            if (lane_ % 4 != 1 || row(r) >= queries.num_rows) continue;
            const bool live = rows_.mass[r] >= a_.floor, none = oldest == kNone;
            const float newer_mass = none ? 0.f : edge < other_edge ? rows_.restart_mass[r] : other_mass;
            mass_out[8 * r] = rows_.mass[r] * kOutputScale;
            restart_edge[8 * r] = live || none ? 0 : min(oldest, queries.k_len);
            restart_mass[8 * r] = (live ? rows_.mass[r] : newer_mass) * kOutputScale;
        }
    }

    // What is 16 bits wide goes through shared memory, where the queries were, so that a warp writes whole rows.
    __device__ __forceinline__ void write_output(int number) {
        const WorkTile& work = this->work(number);
        const Rows<void*>& o = a_.params.o;
        const int warp_row = warpgroup_ * 64 + warp_ * 16, rows = work.queries.num_rows - warp_row;
        const int64_t offset = work.batch * o.batch_stride + (int64_t(work.queries.q_row) + warp_row) * o.row_stride +
                               work.head * o.head_stride;
        if (a_.params.o_dtype == Dtype::kFloat32)
            write_float(static_cast<float*>(o.data) + offset, o.row_stride, rows);
        else
            write_packed(static_cast<uint16_t*>(o.data) + offset, o.row_stride, rows,
                         shared_address(shared_.q[number % kQueryStages]) + warp_row * kRowBytes);
    }
    __device__ __forceinline__ void write_float(float* to, int64_t row_stride, int rows) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane_ / 4 + 8 * r;
            if (row >= rows) continue;
            float* const first = to + row * row_stride + lane_ % 4 * 2;
#pragma unroll
            for (int n = 0; n < T::kHeadDim / 8; ++n)
                *reinterpret_cast<float2*>(first + 8 * n) = {o_[4 * n + 2 * r] * kOutputScale,
                                                             o_[4 * n + 2 * r + 1] * kOutputScale};
        }
    }
    // `staged`: this warp's 16 rows of the query tile, swizzled as it was. No wgmma reads it any more: all warps of the
    // warpgroup have waited for that.
    __device__ __forceinline__ void write_packed(uint16_t* to, int64_t row_stride, int rows, uint32_t staged) {
        sync_warpgroup();
        const int matrix = lane_ / 8, matrix_row = lane_ % 8;  // the rows that this lane gives the address of
        const uint32_t lane_to = staged + (matrix % 2 * 8 + matrix_row) * kRowBytes + ((matrix / 2 ^ matrix_row) << 4);
#pragma unroll
        for (int n = 0; n < T::kHeadDim / 8; n += 2) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const pair = &o_[4 * (n + i / 2) + i % 2 * 2];
                x[i] = pack<Element>(pair[0] * kOutputScale, pair[1] * kOutputScale);
            }
            store_matrices((lane_to ^ n % 8 * 16) + n / 8 * T::kQueryHalfBytes, x);
        }
        __syncwarp();
        constexpr int kChunks = T::kHeadDim / 8, kRowsAtOnce = 32 / kChunks;
        const int chunk = lane_ % kChunks, first = lane_ / kChunks;
        to += first * row_stride + chunk * 8;
        row_stride *= kRowsAtOnce;
        uint4 x[16 / kRowsAtOnce];  // all loads before the first store waits for one
#pragma unroll
        for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
            const int row = first + i * kRowsAtOnce;
            x[i] =
                load_shared(staged + chunk / 8 * T::kQueryHalfBytes + row * kRowBytes + ((chunk % 8 ^ row % 8) << 4));
        }
#pragma unroll
        for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
            store_global_if(first + i * kRowsAtOnce < rows, to, x[i]);
            to += row_stride;
        }
    }
    __device__ __forceinline__ void sync_warpgroup() const {
        warpgroup_barrier(1 + warpgroup_);
    }

    typename T::Shared& shared_;
    Control& c_;
    const Arguments& a_;
    const int warpgroup_, warp_, lane_;
    uint32_t q_low_, k_low_, v_low_;
    int number_ = 0, k_uses_ = 0, v_uses_ = 0, votes_ = 0;
    int ends_ = 0;  // a bit for each K slot: the phase of its `k_end`
    RowPair rows_;
    float s_[64], o_[T::kHeadDim / 2];
    uint32_t weights_[32];
};

}  // namespace megatron_sb::hopper
