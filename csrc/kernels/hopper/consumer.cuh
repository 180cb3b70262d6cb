// A consumer warpgroup: 64 query rows of a work tile, newest key tile to oldest.
//
// S of the next key tile and O += A V of this one are in flight while the weights of the next are waited for, and the
// first S of the next work tile is in flight while this one's output is written.
#pragma once

#include "kernels/hopper/producer.cuh"
#include "kernels/hopper/scan.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace megatron_sb::hopper {

// fp16 has few bits left for a weight of 1e-5: there the stick has length 2^15, and O is scaled back.
template <class Element>
constexpr float kStick = std::is_same_v<Element, __half> ? 32768.f : 1.f;

template <class T>
class Consumer {
  public:
    using Element = typename T::Element;

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
            attend();
            wait_for_values();
            issue_output();
            ++number_;
            more = next_work();
            issue_scores();  // after the last work tile: of what lies there, and never looked at
            wgmma_wait<1>();
            pin(o_);
            release(c_.v_empty, v_uses_);
            finish(c_.work[(number_ - 1) % kWorkTiles]);
        }
        wgmma_wait<0>();
    }

  private:
    // Waits for the queries of work tile number_ and its first keys. False if there is no such tile.
    __device__ __forceinline__ bool next_work() {
        mbarrier_wait(&c_.q_full[number_ % kStages], number_ / kStages & 1);
        const bool more = __shfl_sync(~0u, work().queries.num_rows, 0) > 0, ragged = work().ragged;
        if (!more) return false;
        wait_for_keys();
        if (ragged) fence_async_proxy();
        return true;
    }
    __device__ __forceinline__ void wait_for_keys() {
        mbarrier_wait(&c_.k_full[k_uses_ % kStages], k_uses_ / kStages & 1);
    }
    __device__ __forceinline__ void wait_for_values() {
        mbarrier_wait(&c_.v_full[v_uses_ % kStages], v_uses_ / kStages & 1);
    }

    // S = Q K^T of the tile in K slot k_uses_.
    __device__ __forceinline__ void issue_scores() {
        const uint32_t q = q_low_ + number_ % kStages * (T::kQueryBytes >> 4);
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

    // One thread speaks for the warpgroup: wgmma runs for all four of its warps together.
    __device__ __forceinline__ void release(uint64_t* empty, int& uses) {
        if (threadIdx.x % 128 == 0) mbarrier_arrive(&empty[uses % kStages]);
        ++uses;
    }
    // Each warp has read `work` by itself.
    __device__ __forceinline__ void release_queries() {
        if (lane_ == 0) mbarrier_arrive(&c_.q_empty[number_ % kStages]);
    }

    // Read from shared memory wherever it is needed: registers are scarcer.
    __device__ __forceinline__ const WorkTile& work() const {
        return c_.work[number_ % kWorkTiles];
    }
    __device__ __forceinline__ int row(int r) const {
        return warpgroup_ * 64 + warp_ * 16 + lane_ / 4 + 8 * r;
    }
    __device__ __forceinline__ int64_t row_index(const WorkTile& work, int r) const {
        const Sizes& z = a_.params.sizes;
        return (int64_t(work.batch) * z.num_heads + work.head) * z.q_rows + work.queries.q_row + row(r);
    }

    // Rows that do not exist have no stick.
    __device__ __forceinline__ void start() {
        const float* mass_in = static_cast<const float*>(a_.params.mass_in);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows_.mass[r] = 0.f;
            if (row(r) < work().queries.num_rows)
                rows_.mass[r] = kStick<Element> * (mass_in == nullptr ? 1.f : mass_in[row_index(work(), r)]);
            rows_.restart_mass[r] = 0.f;
            rows_.restart_tile[r] = -1;
        }
    }

    // Ends with the weights of the last tile in registers and their product with V still to be issued.
    __device__ __forceinline__ void attend() {
        // Newest tile first. Those before `first_partial` are seen whole by all rows of this warpgroup.
        int i = __shfl_sync(~0u, num_key_tiles(work().queries), 0) - 1;
        const int first_partial = __shfl_sync(~0u, visible_keys(work().queries, warpgroup_ * 64), 0) / kKeyTile;
        wgmma_wait<0>();
        pin(s_);
        release(c_.k_empty, k_uses_);
#pragma unroll
        for (int n = 0; n < T::kHeadDim / 2; ++n) o_[n] = 0.f;
        pin(o_);
        if (i == 0) release_queries();
        weigh(i, true);
        bool may_end = false;
        pack_weights();
        if (work().ragged) {
            wait_for_values();
            fence_async_proxy();
        }
        for (--i; i >= 0; --i)
            if (!attend_next(i, may_end, first_partial)) return;
    }

    // False where the work tile ends before tile i, because all sticks are used up.
    __device__ __forceinline__ bool attend_next(int i, bool& may_end, int first_partial) {
        wait_for_keys();
        if (may_end && ended_early()) return false;
        issue_scores();
        wait_for_values();
        issue_output();
        may_end = used_up();
        wgmma_wait<1>();
        pin(s_);
        release(c_.k_empty, k_uses_);
        if (i == 0) release_queries();
        weigh(i, i >= first_partial);
        wgmma_wait<0>();
        pin(o_);
        release(c_.v_empty, v_uses_);
        pack_weights();
        return true;
    }

    // Scores to weights.
    __device__ __forceinline__ void weigh(int i, bool partial) {
        if (partial) mask(i);
        Scan(s_, a_.scale_log2, lane_ % 4, a_.floor, i, rows_).run();
    }

    // True where no row of this warp has any stick left, which the producer is told.
    __device__ __forceinline__ bool used_up() {
        const bool all = __all_sync(~0u, !(fmaxf(rows_.mass[0], rows_.mass[1]) >= a_.used_up));
        if (all && lane_ == 0) *const_cast<volatile int32_t*>(&c_.used_up_in[4 * warpgroup_ + warp_]) = number_;
        return all;
    }

    // True where the K slot that has just been waited for ends the work tile. All warps then come here: the producer
    // saw each of them used up. The slot is given back when all have read what it says.
    __device__ __forceinline__ bool ended_early() {
        if (*const_cast<volatile int32_t*>(&c_.end_slot) != k_uses_) return false;
        asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup_) : "memory");
        release(c_.k_empty, k_uses_);
        release_queries();
        return true;
    }

    // Scores of keys that a row does not see become what gives e = 0.
    __device__ __forceinline__ void mask(int i) {
        const float unseen = copysignf(INFINITY, -a_.scale_log2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int seen = visible_keys(work().queries, row(r)) - i * kKeyTile - lane_ % 4 * kKeysPerThread;
#pragma unroll
            for (int k = 0; k < kKeysPerThread; ++k)
                if (k >= seen) s_[at(r, k)] = unseen;
        }
    }

    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int i = 0; i < 32; ++i) weights_[i] = pack(Element{}, s_[2 * i], s_[2 * i + 1]);
    }

    __device__ __forceinline__ void finish(const WorkTile& work) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            write_restart(work, r);
            if (row(r) >= work.queries.num_rows) continue;
            write_output(work, r);
            if (lane_ % 4 == 0)
                static_cast<float*>(a_.params.mass_out)[row_index(work, r)] = rows_.mass[r] * (1.f / kStick<Element>);
        }
    }

    // Threads 1 and 3 of a quad hold the keys up to the edges 64 and 128 of a tile: the restart is the older of theirs.
    __device__ __forceinline__ void write_restart(const WorkTile& work, int r) {
        constexpr int kNone = 0x7fffffff;
        const int found = rows_.restart_tile[r];
        const int edge = found < 0 ? kNone : found * kKeyTile + (lane_ % 4 + 1) * kKeysPerThread;
        const int other_edge = __shfl_xor_sync(~0u, edge, 2);
        const float other_mass = __shfl_xor_sync(~0u, rows_.restart_mass[r], 2);
        if (lane_ % 4 != 1 || row(r) >= work.queries.num_rows) return;
        const int oldest = min(edge, other_edge);
        a_.params.restart.edge[row_index(work, r)] = oldest == kNone ? 0 : min(oldest, work.queries.k_len);
        static_cast<float*>(a_.params.restart.mass)[row_index(work, r)] =
            oldest == kNone ? 0.f : (edge < other_edge ? rows_.restart_mass[r] : other_mass) * (1.f / kStick<Element>);
    }

    __device__ __forceinline__ void write_output(const WorkTile& work, int r) {
        const Rows<void*>& o = a_.params.o;
        const int64_t offset = work.batch * o.batch_stride + (int64_t(work.queries.q_row) + row(r)) * o.row_stride +
                               work.head * o.head_stride + lane_ % 4 * 2;
        constexpr float kScale = 1.f / kStick<Element>;
        if (a_.params.o_dtype == Dtype::kFloat32) {
            float* to = static_cast<float*>(o.data) + offset;
#pragma unroll
            for (int n = 0; n < T::kHeadDim / 8; ++n)
                *reinterpret_cast<float2*>(to + 8 * n) = {o_[4 * n + 2 * r] * kScale, o_[4 * n + 2 * r + 1] * kScale};
        } else {
            uint16_t* to = static_cast<uint16_t*>(o.data) + offset;
#pragma unroll
            for (int n = 0; n < T::kHeadDim / 8; ++n)
                *reinterpret_cast<uint32_t*>(to + 8 * n) =
                    pack(Element{}, o_[4 * n + 2 * r] * kScale, o_[4 * n + 2 * r + 1] * kScale);
        }
    }

    typename T::Shared& shared_;
    Control& c_;
    const Arguments& a_;
    const int warpgroup_, warp_, lane_;
    uint32_t q_low_, k_low_, v_low_;
    int number_ = 0, k_uses_ = 0, v_uses_ = 0;
    RowPair rows_;
    float s_[64], o_[T::kHeadDim / 2];
    uint32_t weights_[32];
};

}  // namespace megatron_sb::hopper
