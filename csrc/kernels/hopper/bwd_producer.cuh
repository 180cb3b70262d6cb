// The warps beside the consumers. One hands out the work and loads it; one brings the carries; two keep the additions
// to dq in order.
//
// What orders what. In the block: `qdo_full` says that Q, dO and the step's description are has_row, `qdo_empty` that
// they and the carries' place may be written; `step_info_full` and `step_info_empty` are the same for the descriptions
// alone, for the warps here; `carry_out_full` and `carry_out_empty` for what a half of the tile leaves to newer keys.
// Whoever reads or writes what these hand over arrives itself. Between blocks: a carry slot is read and written as one
// transaction and says by `tile` for whom it is; `dq_added` is stored after a fence that follows the additions
// (dq_added -> mbarrier -> fence -> store), and read with acquire before the next additions (load -> mbarrier ->
// additions). Key tiles are handed out by tickets, older tiles of a run first, so what a block waits for is the work of
// a block that already key_ranges, and never of a later ticket: the oldest waits for nobody. For that, what a finished
// tile has to tell must not wait for anything of the block's next one.
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

// The place in a ring of kQdoStages and the parity of its use.
struct StageCursor {
    int stage = 0, parity = 0;
    __device__ __forceinline__ StageCursor next() const {
        return stage + 1 == kQdoStages ? StageCursor{0, parity ^ 1} : StageCursor{stage + 1, parity};
    }
};

__device__ __forceinline__ void wait_for_step_info(BackwardControl& c, int number) {
    mbarrier_wait(&c.step_info_full[number % kStepRing], number / kStepRing & 1);
}

template <class T>
class StepLoader {
  public:
    __device__ StepLoader(typename T::Shared& shared, const BackwardArguments& arguments)
        : shared_(shared), control_(shared.control), args_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() {
        while (next_key_tile()) {
            // First all steps in which a row may start in this tile, then the others: the consumers have a loop of
            // each.
            push_steps(true);
            push_steps(false);
            if (!have_pending_ && args_.params.grad_dtype != Dtype::kFloat32) fill_empty_step();
            if (have_pending_) publish_pending(kLastStepOfTile);
        }
        pending_.flags = 0;
        publish_pending(kEndOfWork);
    }

  private:
    __device__ bool next_key_tile() {
        int ticket = 0;
        if (lane_ == 0) ticket = atomicAdd(&args_.plan.counters[kTicket], 1);
        ticket = __shfl_sync(~0u, ticket, 0);
        const Sizes& z = args_.params.sizes;
        const int key_tiles = args_.plan.counters[kNumKeyTiles], heads = z.batch * z.num_kv_heads;
        const int64_t of_group = int64_t(args_.heads_in_flight) * key_tiles;
        if (ticket >= int64_t(heads) * key_tiles) return false;
        const int group = int(ticket / of_group), in_group = int(ticket % of_group);
        const int first = group * args_.heads_in_flight, count = min(args_.heads_in_flight, heads - first);
        key_tile_ = args_.plan.key_tiles[in_group / count];
        const int head = first + in_group % count;
        batch_ = head / z.num_kv_heads;
        kv_head_ = head % z.num_kv_heads;
        new_key_tile_ = true;
        return true;
    }

    __device__ void push_steps(bool slow) {
        const Sizes& z = args_.params.sizes;
        const int group = z.num_heads / z.num_kv_heads, first = batch_ * z.num_heads + kv_head_ * group;
        for (int i = key_tile_.segment; i >= 0; i = args_.plan.segments[i].next)
            for (int h = 0; h < group; h += 32)  // a lane for each
                push_steps_of_heads(clamped(args_.params.segments[i], z), args_.plan.segments[i].first_step, first + h,
                                    min(32, group - h), slow);
    }

    // The steps of some query heads that see this key tile and need it: those in which a row may start in this tile, or
    // the others. The newest first, and of all heads before the next older: a tile's neighbours in the chain keep their
    // distance although each has fewer steps of a head than the older one.
    __device__ void push_steps_of_heads(const Segment& s, int first_step, int first_head, int heads, bool slow) {
        const int current = args_.params.options.attend_current ? 1 : 0, offset = s.q_pos_minus_k_pos + current;
        const int tile_begin = key_tile_.tile * kBackwardKeyTile, steps = num_steps(s);
        if (s.k_len <= tile_begin || s.q_len - 1 + offset <= tile_begin) return;
        const int oldest = max(0, (tile_begin - offset + 1) >> 6);
        const StepStarts* const starts = args_.plan.starts + int64_t(first_head) * args_.plan.max_steps + first_step;
        int newest = oldest - 1;  // of this lane's head
        for (int h = 0; h < heads; ++h) {
            const StepStarts* const of_head = starts + int64_t(h) * args_.plan.max_steps;
            const int found = find_newest_step(of_head, oldest, steps);
            const bool some = found >= oldest && (!slow || of_head[found].newest_half_so_far >= 2 * key_tile_.tile);
            if (lane_ == h && some) newest = found;
        }
        for (int top = __reduce_max_sync(~0u, newest); top >= oldest; top -= 32) {
            uint32_t mine = 0,
                     first = 0;  // of this lane's head, bit n: if step top - n is one of these; kOldestKeyTile
            for (int h = 0; h < heads; ++h) {
                const int step = top - lane_, newest_of_head = __shfl_sync(~0u, newest, h);
                StepStarts own = {kNever, -1, -1};
                if (step >= oldest && step <= newest_of_head) own = starts[int64_t(h) * args_.plan.max_steps + step];
                const bool is_slow = own.newest_half >= 2 * key_tile_.tile;
                const uint32_t those = __ballot_sync(~0u, own.oldest_tile <= key_tile_.tile && is_slow == slow);
                const uint32_t begin = __ballot_sync(~0u, own.oldest_tile == key_tile_.tile);
                if (lane_ == h) mine = those, first = begin;
            }
            for (int n = 0; n < 32; ++n)
                for (uint32_t left = __ballot_sync(~0u, mine >> n & 1); left != 0; left &= left - 1) {
                    const int h = __ffs(left) - 1;
                    if (have_pending_) publish_pending(slow ? kSlowNext : 0);
                    fill_pending(s, first_step, first_head + h, top - n, offset);
                    const bool begins = __shfl_sync(~0u, first, h) >> n & 1;
                    pending_.flags |= (slow ? kSlow : 0) | (begins ? kOldestKeyTile : 0);
                }
        }
    }
    __device__ void fill_pending(const Segment& s, int first_step, int head, int step, int offset) {
        const int tile_begin = key_tile_.tile * kBackwardKeyTile;
        const int row = step * kStepRows, rows = min(kStepRows, s.q_len - row);
        const int last_tile = (clamp_row(row + rows - 1 + offset, 0, s.k_len) - 1) / kBackwardKeyTile;
        pending_.first_row = int64_t(head) * args_.params.sizes.q_rows + s.q_begin + row;
        pending_.sum = head * args_.plan.max_steps + first_step + step;
        pending_.row = s.q_begin + row;
        pending_.head = head - batch_ * args_.params.sizes.num_heads;
        pending_.num_rows = rows;
        pending_.visible = row + offset - tile_begin;
        pending_.num_keys = min(kBackwardKeyTile, s.k_len - tile_begin);
        pending_.flags = (last_tile == key_tile_.tile ? kNewestKeyTile : 0) | masked_halves();
        have_pending_ = true;
    }
    // A step without rows, for a tile that no row reaches: its gradients are zeros.
    __device__ void fill_empty_step() {
        pending_ = {};
        pending_.flags = kOldestKeyTile | kNewestKeyTile | kSlow | kMasked | kMasked << 1;
        pending_.visible = -kStepRows;
        have_pending_ = true;
    }
    __device__ int masked_halves() const {
        const int num_visible = min(pending_.visible, pending_.num_keys);
        return (num_visible < kHalfTileKeys ? kMasked : 0) | (num_visible < 2 * kHalfTileKeys ? kMasked << 1 : 0);
    }

    // The newest step from `oldest` on that needs this tile, as a row of it or of a newer one starts here or in older
    // keys; oldest - 1 for none.
    __device__ int find_newest_step(const StepStarts* starts, int oldest, int steps) const {
        int low = oldest - 1, high = steps;  // `low` is so, or is none; `high` is not
        while (high - low > 1) {
            const int stride = max((high - low + 31) / 32, 1), step = low + (lane_ + 1) * stride;
            const bool so = step < high && starts[step].oldest_tile <= key_tile_.tile;
            const int count = __popc(__ballot_sync(~0u, so));
            high = min(high, low + (count + 1) * stride);
            low += count * stride;
        }
        return low;
    }

    // The pending step goes to the consumers, and with the first one of a tile its keys and values: last, as their
    // place is the last to become free.
    __device__ void publish_pending(int flags) {
        const int stage = cursor_.stage;
        const bool more = !(flags & kEndOfWork), begins_tile = more && new_key_tile_;
        if (begins_tile) locate_tile();
        mbarrier_wait(&control_.qdo_empty[stage], cursor_.parity ^ 1);
        mbarrier_wait(&control_.step_info_empty[number_ % kStepRing], number_ / kStepRing & 1 ^ 1);
        if (lane_ == 0) {
            Step step = pending_;
            step.flags |= flags;
            step.tile = key_tile_.tile;
            step.batch = batch_;
            step.kv_head = kv_head_;
            step.k_row = tile_row_;
            step.tile_keys = tile_keys_;
            control_.step_info[number_ % kStepRing] = step;
            mbarrier_arrive(&control_.step_info_full[number_ % kStepRing]);
        }
        if (more)
            load_rows_of_step(stage);
        else if (lane_ == 0)
            mbarrier_arrive(&control_.qdo_full[stage]);
        if (begins_tile) load_tile();
        cursor_ = cursor_.next();
        ++number_;
        have_pending_ = false;
    }

    __device__ void load_rows_of_step(int stage) {
        const int batch = batch_, head = pending_.head;
        uint8_t* const q = shared_.qdo[stage][0];
        uint8_t* const d_o = shared_.qdo[stage][1];
        if (pending_.num_rows == kStepRows) {
            if (lane_ != 0) return;
            mbarrier_arrive_expect_tx(&control_.qdo_full[stage], 2 * T::kTileBytes);
#pragma unroll
            for (int half = 0; half < T::kPanels; ++half) {
                tma_load_3d(q + half * T::kPanelBytes, &args_.q.map, &control_.qdo_full[stage], 64 * half, pending_.row,
                            args_.q.heads(batch, head));
                tma_load_3d(d_o + half * T::kPanelBytes, &args_.d_o.map, &control_.qdo_full[stage], 64 * half,
                            pending_.row, args_.d_o.heads(batch, head));
            }
            return;
        }
        const auto same = [](int row) { return row; };
        const auto copy = [&](uint8_t* to, const Rows<const void*>& from) {
            copy_rows<kStepRows, T::kPanels>(to, from, offset_of(from, batch, head, pending_.row), pending_.num_rows,
                                             same);
        };
        copy(q, args_.params.q);
        copy(d_o, args_.params.d_o);
        finish_copy(&control_.qdo_full[stage]);
    }

    __device__ void locate_tile() {
        const int first = key_tile_.tile * kBackwardKeyTile;
        new_key_tile_ = false;
        tile_row_ = clamped(args_.params.segments[key_tile_.segment], args_.params.sizes).k_begin + first;
        tile_keys_ = min(kBackwardKeyTile, key_tile_.num_keys - first);
    }
    __device__ void load_tile() {
        const int buffer = tiles_ % T::kTileBuffers;
        uint64_t* const full = &control_.kv_full[buffer];
        mbarrier_wait(&control_.kv_empty[buffer], (tiles_++ / T::kTileBuffers & 1) ^ 1);
        if (tile_keys_ == kBackwardKeyTile) {
            if (lane_ != 0) return;
            mbarrier_arrive_expect_tx(full, 4 * T::kTileBytes);
#pragma unroll
            for (int w = 0; w < 2; ++w)
#pragma unroll
                for (int half = 0; half < T::kPanels; ++half) {
                    const int row = tile_row_ + w * kHalfTileKeys;
                    tma_load_5d(shared_.k[buffer][w] + half * T::kPanelBytes, &args_.k.map, full, 64 * half, row, 0, 0,
                                args_.k.heads(batch_, kv_head_));
                    tma_load_5d(shared_.v[buffer][w] + half * T::kPanelBytes, &args_.v.map, full, 64 * half, row, 0, 0,
                                args_.v.heads(batch_, kv_head_));
                }
            return;
        }
        for (int w = 0; w < 2; ++w) {
            const int first = w * kHalfTileKeys;
            const auto copy = [&](uint8_t* to, const Rows<const void*>& from) {
                copy_rows<kHalfTileKeys, T::kPanels>(to, from, offset_of(from, batch_, kv_head_, tile_row_ + first),
                                                     tile_keys_ - first, KeyOrder<kHalfTileKeys>());
            };
            copy(shared_.k[buffer][w], args_.params.k);
            copy(shared_.v[buffer][w], args_.params.v);
        }
        finish_copy(full);
    }

    typename T::Shared& shared_;
    BackwardControl& control_;
    const BackwardArguments& args_;
    const int lane_;
    KeyTile key_tile_;
    int batch_ = 0, kv_head_ = 0;
    int tile_row_ = 0, tile_keys_ = 0, tiles_ = 0;
    bool new_key_tile_ = false, have_pending_ = false;
    Step pending_;  // what comes next decides whether it is the last of its tile
    StageCursor cursor_;
    int number_ = 0;
};

// Brings each step's carries: from the next older key tile, or for the first one from the restarts.
class CarryReader {
  public:
    __device__ CarryReader(BackwardControl& control, const BackwardArguments& arguments)
        : control_(control), args_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() const {
        StageCursor cursor;
        for (int number = 0;; ++number, cursor = cursor.next()) {
            wait_for_step_info(control_, number);
            const Step& step = control_.step_info[number % kStepRing];
            if (step.flags & kEndOfWork) return;
            mbarrier_wait(&control_.qdo_empty[cursor.stage], cursor.parity ^ 1);
            Carry carries[2];  // of rows lane_ and lane_ + 32: all that is read for them is under way at once
            read_starts(step, carries);
            if (step.flags & kOldestKeyTile)
                read_first(step, carries);
            else
                wait_for_carries(step, carries);
#pragma unroll
            for (int i = 0; i < 2; ++i) control_.carry_in[cursor.stage][lane_ + 32 * i] = carries[i];
            mbarrier_arrive(&control_.carry_in_full[cursor.stage]);
            mbarrier_arrive(&control_.step_info_empty[number % kStepRing]);
        }
    }

  private:
    __device__ int64_t index(const Step& step, int i) const {
        return step.first_row + lane_ + 32 * i;
    }
    __device__ bool has_row(const Step& step, int i) const {
        return lane_ + 32 * i < step.num_rows;
    }

    // Rows that are not has_row never start.
    __device__ void read_starts(const Step& step, Carry (&carries)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) carries[i] = {0.f, 0.f, has_row(step, i) ? -1 : kNever, 0.f};
        if (!(step.flags & kSlow)) return;  // all have started in older tiles
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!has_row(step, i)) continue;
            const int64_t at = index(step, i);
            const int begin = step.tile * kBackwardKeyTile;
            const int visible = min(step.visible + lane_ + 32 * i, step.num_keys) + begin;
            carries[i].restart_mass = restart_mass<float>(args_.params, at);
            carries[i].start =
                start_of(args_.params.restart.edge[at], carries[i].restart_mass, max(visible, 0)) - 2 * step.tile;
        }
    }
    // What a row brings that starts before all keys; the mass of others counts from where they start.
    __device__ void read_first(const Step& step, Carry (&carries)[2]) const {
        const float* const prefix_in = static_cast<const float*>(args_.params.prefix_in);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!has_row(step, i)) continue;
            carries[i].mass = restart_mass<float>(args_.params, index(step, i));
            if (prefix_in != nullptr) carries[i].prefix = prefix_in[index(step, i)];
        }
    }
    __device__ void wait_for_carries(const Step& step, Carry (&carries)[2]) const {
        uint4 slots[2];
        for (uint32_t tries = 0;; ++tries) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                slots[i] = make_uint4(0, 0, step.tile, 0);
                if (has_row(step, i)) slots[i] = load_relaxed_b128(args_.plan.carries + index(step, i));
            }
            if (int(slots[0].z) == step.tile && int(slots[1].z) == step.tile) break;
            if (tries == kMaxTries) abort_launch();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            carries[i].mass = __uint_as_float(slots[i].x);
            carries[i].prefix = __uint_as_float(slots[i].y);
        }
    }

    static constexpr uint32_t kMaxTries = 1 << 24;

    BackwardControl& control_;
    const BackwardArguments& args_;
    const int lane_;
};

// Lets the additions of a step begin when those of the next older key tile are in. One thread.
__device__ inline void wait_for_turns(BackwardControl& c, const BackwardArguments& a) {
    constexpr uint32_t kMaxTries = 1 << 24;
    for (int number = 0;; ++number) {
        wait_for_step_info(c, number);
        const Step& step = c.step_info[number % kStepRing];
        if (step.flags & kEndOfWork) return;
        const int turn = number % kDqTurns;
        if (number >= kDqTurns) mbarrier_wait(&c.dq_published[turn], (number / kDqTurns - 1) & 1);
        if (!(step.flags & kOldestKeyTile)) {
            const int32_t* const dq_added = a.plan.dq_added + step.sum;
            for (uint32_t tries = 0; load_acquire(dq_added) != step.tile; ++tries)
                if (tries == kMaxTries) abort_launch();
        }
        mbarrier_arrive(&c.dq_turn[turn]);
        mbarrier_arrive(&c.step_info_empty[number % kStepRing]);
    }
}

// Tells the next newer key tile what a step's carries are, and later that its additions are in. A tile's additions are
// told of before the next one's carries are waited for: other blocks may wait for those, and these for other blocks.
template <class T>
class Publisher {
  public:
    __device__ Publisher(BackwardControl& control, const BackwardArguments& arguments)
        : control_(control), args_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() {
        // The additions of the step so far back are in before the carries of this one are made.
        constexpr int kLag = T::kDzSlots;
        for (int number = 0;; ++number) {
            wait_for_step_info(control_, number);
            const int flags = step(number).flags;
            if (flags & kEndOfWork) return;
            publish_additions_before(number - kLag + 1);
            publish_carries(number);
            if (flags & kLastStepOfTile) publish_additions_before(number + 1);
        }
    }

  private:
    __device__ const Step& step(int number) const { return control_.step_info[number % kStepRing]; }

    __device__ void publish_carries(int number) const {
        const Step& of = step(number);
        for (uint64_t& of_warp : control_.carry_out_full[1][number % kCarryOutSlots])
            mbarrier_wait(&of_warp, number / kCarryOutSlots & 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane_ + 32 * i;
            const float2 carry = control_.carry_out[1][number % kCarryOutSlots][row];
            if (row >= of.num_rows) continue;
            if (of.flags & kNewestKeyTile)
                static_cast<float*>(args_.params.prefix_out)[of.first_row + row] = carry.y;
            else
                store_relaxed_b128(args_.plan.carries + of.first_row + row,
                                   make_uint4(__float_as_uint(carry.x), __float_as_uint(carry.y), of.tile + 1, 0));
        }
        mbarrier_arrive(&control_.carry_out_empty[1][number % kCarryOutSlots]);
    }
    __device__ void publish_additions_before(int end) {
        for (; next_addition_ < end; ++next_addition_) {
            if (lane_ == 0) {
                const Step& of = step(next_addition_);
                const int turn = next_addition_ % kDqTurns;
                mbarrier_wait(&control_.dq_added[turn], next_addition_ / kDqTurns & 1);
                fence_acq_rel_gpu();
                if (!(of.flags & kNewestKeyTile)) store_relaxed(args_.plan.dq_added + of.sum, of.tile + 1);
                mbarrier_arrive(&control_.dq_published[turn]);
            }
            __syncwarp();
            mbarrier_arrive(&control_.step_info_empty[next_addition_ % kStepRing]);
        }
    }

    BackwardControl& control_;
    const BackwardArguments& args_;
    const int lane_;
    int next_addition_ = 0;  // the first step whose additions nobody has been told of
};

}  // namespace megatron_sb::hopper
