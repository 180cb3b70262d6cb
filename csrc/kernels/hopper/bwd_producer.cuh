// The warps beside the consumers. One hands out the work and loads it; one brings the carries; two keep the additions
// to dq in order.
//
// What orders what. In the block: `step_full` says that Q, dO and the step's description are there, `step_empty` that
// they and the carries' place may be written; `described` and `forgotten` are the same for the descriptions alone, for
// the warps here; `passed_full` and `passed_empty` for what a half of the tile leaves to newer keys. Whoever reads or
// writes what these hand over arrives itself.
// Between blocks: a carry slot is read and written as one transaction and says by `tile` for whom it is; `added` is
// stored after a fence that follows the additions (added -> mbarrier -> fence -> store), and read with acquire before
// the next additions (load -> mbarrier -> additions). Key tiles are handed out by tickets, older tiles of a run first,
// so what a block waits for is the work of a block that already runs, and never of a later ticket: the oldest waits for
// nobody. For that, what a finished tile has to tell must not wait for anything of the block's next one.
#pragma once

#include "kernels/hopper/bwd_plan.h"
#include "kernels/hopper/ptx.cuh"
#include "kernels/hopper/tensor_maps.h"
#include "kernels/hopper/tile_copy.cuh"

namespace megatron_sb::hopper {

struct BackwardArguments {
    BackwardParams params;
    BackwardPlan plan;
    TensorMap q, d_o, k, v;
    int32_t heads_in_flight;  // key heads
    float scale, scale_log2;
};

// The place in a ring of kStepStages and the parity of its use.
struct StageCursor {
    int stage = 0, parity = 0;
    __device__ __forceinline__ StageCursor next() const {
        return stage + 1 == kStepStages ? StageCursor{0, parity ^ 1} : StageCursor{stage + 1, parity};
    }
};

__device__ __forceinline__ void wait_for_description(BackwardControl& c, int number) {
    mbarrier_wait(&c.described[number % kStepRing], number / kStepRing & 1);
}

template <class T>
class StepLoader {
  public:
    __device__ StepLoader(typename T::Shared& shared, const BackwardArguments& arguments)
        : shared_(shared), c_(shared.control), a_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() {
        while (next_item()) {
            // First all steps in which a row may start in this tile, then the others: the consumers have a loop of
            // each.
            walk_all(true);
            walk_all(false);
            if (!have_pending_ && a_.params.grad_dtype != Dtype::kFloat32) describe_nothing();
            if (have_pending_) push(kLastOfTile);
        }
        pending_.flags = 0;
        push(kNoMore);
    }

  private:
    __device__ bool next_item() {
        int ticket = 0;
        if (lane_ == 0) ticket = atomicAdd(&a_.plan.counters[kTicket], 1);
        ticket = __shfl_sync(~0u, ticket, 0);
        const Sizes& z = a_.params.sizes;
        const int items = a_.plan.counters[kNumItems], heads = z.batch * z.num_kv_heads;
        const int64_t of_group = int64_t(a_.heads_in_flight) * items;
        if (ticket >= int64_t(heads) * items) return false;
        const int group = int(ticket / of_group), in_group = int(ticket % of_group);
        const int first = group * a_.heads_in_flight, count = min(a_.heads_in_flight, heads - first);
        item_ = a_.plan.items[in_group / count];
        const int head = first + in_group % count;
        batch_ = head / z.num_kv_heads;
        kv_head_ = head % z.num_kv_heads;
        new_item_ = true;
        return true;
    }

    __device__ void walk_all(bool slow) {
        const Sizes& z = a_.params.sizes;
        const int group = z.num_heads / z.num_kv_heads, first = batch_ * z.num_heads + kv_head_ * group;
        for (int i = item_.segment; i >= 0; i = a_.plan.segments[i].next)
            for (int h = 0; h < group; h += 32)  // a lane for each
                walk(clamped(a_.params.segments[i], z), a_.plan.segments[i].first_step, first + h, min(32, group - h),
                     slow);
    }

    // The steps of some query heads that see this key tile and need it: those in which a row may start in this tile, or
    // the others. The newest first, and of all heads before the next older: a tile's neighbours in the chain keep their
    // distance although each has fewer steps of a head than the older one.
    __device__ void walk(const Segment& s, int first_step, int first_head, int heads, bool slow) {
        const int current = a_.params.options.attend_current ? 1 : 0, offset = s.q_pos_minus_k_pos + current;
        const int tile_begin = item_.tile * kBackwardKeys, steps = num_steps(s);
        if (s.k_len <= tile_begin || s.q_len - 1 + offset <= tile_begin) return;
        const int oldest = max(0, (tile_begin - offset + 1) >> 6);
        const Starts* const starts = a_.plan.starts + int64_t(first_head) * a_.plan.max_steps + first_step;
        int newest = oldest - 1;  // of this lane's head
        for (int h = 0; h < heads; ++h) {
            const Starts* const of_head = starts + int64_t(h) * a_.plan.max_steps;
            const int found = find_newest(of_head, oldest, steps);
            const bool some = found >= oldest && (!slow || of_head[found].newest_older >= 2 * item_.tile);
            if (lane_ == h && some) newest = found;
        }
        for (int top = __reduce_max_sync(~0u, newest); top >= oldest; top -= 32) {
            uint32_t mine = 0, first = 0;  // of this lane's head, bit n: if step top - n is one of these; kFirstOfRows
            for (int h = 0; h < heads; ++h) {
                const int step = top - lane_, newest_of_head = __shfl_sync(~0u, newest, h);
                Starts own = {kNever, -1, -1};
                if (step >= oldest && step <= newest_of_head) own = starts[int64_t(h) * a_.plan.max_steps + step];
                const bool is_slow = own.newest_half >= 2 * item_.tile;
                const uint32_t those = __ballot_sync(~0u, own.first_tile <= item_.tile && is_slow == slow);
                const uint32_t begin = __ballot_sync(~0u, own.first_tile == item_.tile);
                if (lane_ == h) mine = those, first = begin;
            }
            for (int n = 0; n < 32; ++n)
                for (uint32_t left = __ballot_sync(~0u, mine >> n & 1); left != 0; left &= left - 1) {
                    const int h = __ffs(left) - 1;
                    if (have_pending_) push(slow ? kSlowNext : 0);
                    describe(s, first_step, first_head + h, top - n, offset);
                    const bool begins = __shfl_sync(~0u, first, h) >> n & 1;
                    pending_.flags |= (slow ? kSlow : 0) | (begins ? kFirstOfRows : 0);
                }
        }
    }
    __device__ void describe(const Segment& s, int first_step, int head, int step, int offset) {
        const int tile_begin = item_.tile * kBackwardKeys;
        const int row = step * kStepRows, rows = min(kStepRows, s.q_len - row);
        const int last_tile = (clamp_row(row + rows - 1 + offset, 0, s.k_len) - 1) / kBackwardKeys;
        pending_.first_row = int64_t(head) * a_.params.sizes.q_rows + s.q_begin + row;
        pending_.sum = head * a_.plan.max_steps + first_step + step;
        pending_.row = s.q_begin + row;
        pending_.head = head - batch_ * a_.params.sizes.num_heads;
        pending_.num_rows = rows;
        pending_.visible = row + offset - tile_begin;
        pending_.num_keys = min(kBackwardKeys, s.k_len - tile_begin);
        pending_.flags = (last_tile == item_.tile ? kLastOfRows : 0) | masked_halves();
        have_pending_ = true;
    }
    // A step without rows, for a tile that no row reaches: its gradients are zeros.
    __device__ void describe_nothing() {
        pending_ = {};
        pending_.flags = kFirstOfRows | kLastOfRows | kSlow | kMasked | kMasked << 1;
        pending_.visible = -kStepRows;
        have_pending_ = true;
    }
    __device__ int masked_halves() const {
        const int seen = min(pending_.visible, pending_.num_keys);
        return (seen < kSubtileKeys ? kMasked : 0) | (seen < 2 * kSubtileKeys ? kMasked << 1 : 0);
    }

    // The newest step from `oldest` on that needs this tile, as a row of it or of a newer one starts here or in older
    // keys; oldest - 1 for none.
    __device__ int find_newest(const Starts* starts, int oldest, int steps) const {
        int low = oldest - 1, high = steps;  // `low` is so, or is none; `high` is not
        while (high - low > 1) {
            const int stride = max((high - low + 31) / 32, 1), step = low + (lane_ + 1) * stride;
            const bool so = step < high && starts[step].first_tile <= item_.tile;
            const int count = __popc(__ballot_sync(~0u, so));
            high = min(high, low + (count + 1) * stride);
            low += count * stride;
        }
        return low;
    }

    // The pending step goes to the consumers, and with the first one of a tile its keys and values: last, as their
    // place is the last to become free.
    __device__ void push(int flags) {
        const int stage = cursor_.stage;
        const bool more = !(flags & kNoMore), begins_tile = more && new_item_;
        if (begins_tile) find_tile();
        mbarrier_wait(&c_.step_empty[stage], cursor_.parity ^ 1);
        mbarrier_wait(&c_.forgotten[number_ % kStepRing], number_ / kStepRing & 1 ^ 1);
        if (lane_ == 0) {
            Step step = pending_;
            step.flags |= flags;
            step.tile = item_.tile;
            step.batch = batch_;
            step.kv_head = kv_head_;
            step.k_row = tile_row_;
            step.tile_keys = tile_keys_;
            c_.steps[number_ % kStepRing] = step;
            mbarrier_arrive(&c_.described[number_ % kStepRing]);
        }
        if (more)
            load_rows_of_step(stage);
        else if (lane_ == 0)
            mbarrier_arrive(&c_.step_full[stage]);
        if (begins_tile) load_tile();
        cursor_ = cursor_.next();
        ++number_;
        have_pending_ = false;
    }

    __device__ void load_rows_of_step(int stage) {
        const int batch = batch_, head = pending_.head;
        uint8_t* const q = shared_.steps[stage][0];
        uint8_t* const d_o = shared_.steps[stage][1];
        if (pending_.num_rows == kStepRows) {
            if (lane_ != 0) return;
            mbarrier_arrive_expect(&c_.step_full[stage], 2 * T::kTileBytes);
#pragma unroll
            for (int half = 0; half < T::kHalves; ++half) {
                tma_load_3d(q + half * T::kHalfBytes, &a_.q.map, &c_.step_full[stage], 64 * half, pending_.row,
                            a_.q.heads(batch, head));
                tma_load_3d(d_o + half * T::kHalfBytes, &a_.d_o.map, &c_.step_full[stage], 64 * half, pending_.row,
                            a_.d_o.heads(batch, head));
            }
            return;
        }
        const auto same = [](int row) { return row; };
        const auto copy = [&](uint8_t* to, const Rows<const void*>& from) {
            copy_rows<kStepRows, T::kHalves>(to, from, offset_of(from, batch, head, pending_.row), pending_.num_rows,
                                             same);
        };
        copy(q, a_.params.q);
        copy(d_o, a_.params.d_o);
        finish_copies(&c_.step_full[stage]);
    }

    __device__ void find_tile() {
        const int first = item_.tile * kBackwardKeys;
        new_item_ = false;
        tile_row_ = clamped(a_.params.segments[item_.segment], a_.params.sizes).k_begin + first;
        tile_keys_ = min(kBackwardKeys, item_.num_keys - first);
    }
    __device__ void load_tile() {
        const int buffer = tiles_ % T::kTileBuffers;
        uint64_t* const full = &c_.kv_full[buffer];
        mbarrier_wait(&c_.kv_empty[buffer], (tiles_++ / T::kTileBuffers & 1) ^ 1);
        if (tile_keys_ == kBackwardKeys) {
            if (lane_ != 0) return;
            mbarrier_arrive_expect(full, 4 * T::kTileBytes);
#pragma unroll
            for (int w = 0; w < 2; ++w)
#pragma unroll
                for (int half = 0; half < T::kHalves; ++half) {
                    const int row = tile_row_ + w * kSubtileKeys;
                    tma_load_5d(shared_.k[buffer][w] + half * T::kHalfBytes, &a_.k.map, full, 64 * half, row, 0, 0,
                                a_.k.heads(batch_, kv_head_));
                    tma_load_5d(shared_.v[buffer][w] + half * T::kHalfBytes, &a_.v.map, full, 64 * half, row, 0, 0,
                                a_.v.heads(batch_, kv_head_));
                }
            return;
        }
        for (int w = 0; w < 2; ++w) {
            const int first = w * kSubtileKeys;
            const auto copy = [&](uint8_t* to, const Rows<const void*>& from) {
                copy_rows<kSubtileKeys, T::kHalves>(to, from, offset_of(from, batch_, kv_head_, tile_row_ + first),
                                                    tile_keys_ - first, KeyOrder<kSubtileKeys>());
            };
            copy(shared_.k[buffer][w], a_.params.k);
            copy(shared_.v[buffer][w], a_.params.v);
        }
        finish_copies(full);
    }

    typename T::Shared& shared_;
    BackwardControl& c_;
    const BackwardArguments& a_;
    const int lane_;
    KeyItem item_;
    int batch_ = 0, kv_head_ = 0;
    int tile_row_ = 0, tile_keys_ = 0, tiles_ = 0;
    bool new_item_ = false, have_pending_ = false;
    Step pending_;  // what comes next decides whether it is the last of its tile
    StageCursor cursor_;
    int number_ = 0;
};

// Brings each step's carries: from the next older key tile, or for the first one from the restarts.
class CarryReader {
  public:
    __device__ CarryReader(BackwardControl& control, const BackwardArguments& arguments)
        : c_(control), a_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() const {
        StageCursor cursor;
        for (int number = 0;; ++number, cursor = cursor.next()) {
            wait_for_description(c_, number);
            const Step& step = c_.steps[number % kStepRing];
            if (step.flags & kNoMore) return;
            mbarrier_wait(&c_.step_empty[cursor.stage], cursor.parity ^ 1);
            Carry carries[2];  // of rows lane_ and lane_ + 32: all that is read for them is under way at once
            read_starts(step, carries);
            if (step.flags & kFirstOfRows)
                read_first(step, carries);
            else
                read_slots(step, carries);
#pragma unroll
            for (int i = 0; i < 2; ++i) c_.carries[cursor.stage][lane_ + 32 * i] = carries[i];
            mbarrier_arrive(&c_.carry_full[cursor.stage]);
            mbarrier_arrive(&c_.forgotten[number % kStepRing]);
        }
    }

  private:
    __device__ int64_t index(const Step& step, int i) const {
        return step.first_row + lane_ + 32 * i;
    }
    __device__ bool there(const Step& step, int i) const {
        return lane_ + 32 * i < step.num_rows;
    }

    // Rows that are not there never start.
    __device__ void read_starts(const Step& step, Carry (&carries)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) carries[i] = {0.f, 0.f, there(step, i) ? -1 : kNever, 0.f};
        if (!(step.flags & kSlow)) return;  // all have started in older tiles
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!there(step, i)) continue;
            const int64_t at = index(step, i);
            const int begin = step.tile * kBackwardKeys;
            const int visible = min(step.visible + lane_ + 32 * i, step.num_keys) + begin;
            carries[i].restart_mass = restart_mass(at);
            carries[i].start =
                start_of(a_.params.restart.edge[at], carries[i].restart_mass, max(visible, 0)) - 2 * step.tile;
        }
    }
    // What a row brings that starts before all keys; the mass of others counts from where they start.
    __device__ void read_first(const Step& step, Carry (&carries)[2]) const {
        const float* const prefix_in = static_cast<const float*>(a_.params.prefix_in);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!there(step, i)) continue;
            carries[i].mass = restart_mass(index(step, i));
            if (prefix_in != nullptr) carries[i].prefix = prefix_in[index(step, i)];
        }
    }
    __device__ float restart_mass(int64_t at) const {
        const float mass = static_cast<const float*>(a_.params.restart.mass)[at];
        return a_.params.mass_in == nullptr ? mass : mass * static_cast<const float*>(a_.params.mass_in)[at];
    }
    __device__ void read_slots(const Step& step, Carry (&carries)[2]) const {
        uint4 slots[2];
        for (uint32_t tries = 0;; ++tries) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                slots[i] = make_uint4(0, 0, step.tile, 0);
                if (there(step, i)) slots[i] = load_relaxed_16(a_.plan.carries + index(step, i));
            }
            if (int(slots[0].z) == step.tile && int(slots[1].z) == step.tile) break;
            if (tries == kMostTries) fail();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            carries[i].mass = __uint_as_float(slots[i].x);
            carries[i].prefix = __uint_as_float(slots[i].y);
        }
    }

    static constexpr uint32_t kMostTries = 1 << 24;

    BackwardControl& c_;
    const BackwardArguments& a_;
    const int lane_;
};

// Lets the additions of a step begin when those of the next older key tile are in. One thread.
__device__ inline void wait_for_turns(BackwardControl& c, const BackwardArguments& a) {
    constexpr uint32_t kMostTries = 1 << 24;
    for (int number = 0;; ++number) {
        wait_for_description(c, number);
        const Step& step = c.steps[number % kStepRing];
        if (step.flags & kNoMore) return;
        const int turn = number % kTurns;
        if (number >= kTurns) mbarrier_wait(&c.published[turn], (number / kTurns - 1) & 1);
        if (!(step.flags & kFirstOfRows)) {
            const int32_t* const added = a.plan.added + step.sum;
            for (uint32_t tries = 0; load_acquire(added) != step.tile; ++tries)
                if (tries == kMostTries) fail();
        }
        mbarrier_arrive(&c.turn[turn]);
        mbarrier_arrive(&c.forgotten[number % kStepRing]);
    }
}

// Tells the next newer key tile what a step's carries are, and later that its additions are in. A tile's additions are
// told of before the next one's carries are waited for: other blocks may wait for those, and these for other blocks.
template <class T>
class Publisher {
  public:
    __device__ Publisher(BackwardControl& control, const BackwardArguments& arguments)
        : c_(control), a_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() {
        // The additions of the step so far back are in before the carries of this one are made.
        constexpr int kLag = T::kSlots;
        for (int number = 0;; ++number) {
            wait_for_description(c_, number);
            const int flags = step(number).flags;
            if (flags & kNoMore) return;
            publish_additions_before(number - kLag + 1);
            publish_carries(number);
            if (flags & kLastOfTile) publish_additions_before(number + 1);
        }
    }

  private:
    __device__ const Step& step(int number) const { return c_.steps[number % kStepRing]; }

    __device__ void publish_carries(int number) const {
        const Step& of = step(number);
        for (uint64_t& of_warp : c_.passed_full[1][number % kPassed]) mbarrier_wait(&of_warp, number / kPassed & 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane_ + 32 * i;
            const float2 carry = c_.passed[1][number % kPassed][row];
            if (row >= of.num_rows) continue;
            if (of.flags & kLastOfRows)
                static_cast<float*>(a_.params.prefix_out)[of.first_row + row] = carry.y;
            else
                store_relaxed_16(a_.plan.carries + of.first_row + row,
                                 make_uint4(__float_as_uint(carry.x), __float_as_uint(carry.y), of.tile + 1, 0));
        }
        mbarrier_arrive(&c_.passed_empty[1][number % kPassed]);
    }
    __device__ void publish_additions_before(int end) {
        for (; next_added_ < end; ++next_added_) {
            if (lane_ == 0) {
                const Step& of = step(next_added_);
                const int turn = next_added_ % kTurns;
                mbarrier_wait(&c_.added[turn], next_added_ / kTurns & 1);
                fence_gpu();
                if (!(of.flags & kLastOfRows)) store_relaxed(a_.plan.added + of.sum, of.tile + 1);
                mbarrier_arrive(&c_.published[turn]);
            }
            __syncwarp();
            mbarrier_arrive(&c_.forgotten[next_added_ % kStepRing]);
        }
    }

    BackwardControl& c_;
    const BackwardArguments& a_;
    const int lane_;
    int next_added_ = 0;  // the first step whose additions nobody has been told of
};

}  // namespace megatron_sb::hopper
