// The step loader, warp 0 of the backward. It takes key tiles in the order of bwd_order.h and finds the steps of each.
// It writes descriptions of the steps for all other warps, and loads Q, dO, K and V. If key tiles have several parts
// (bwd_parts.h), a ticket is for one part, and a CTA treats the part as a key tile.
//
// Synchronisation. Lane 0 of the loader arrives on each `full` barrier; the loader waits on each `empty` barrier.
//     barrier           the other side
//     qdo.full          consumers wait
//     qdo.empty         every consumer thread arrives after its products
//     kv.full           consumers wait
//     kv.empty          consumers arrive at the end of a key tile
//     steps.full        warps 1 to 3 wait (bwd_carries.cuh, bwd_additions.cuh)
//     steps.empty       warps 1 to 3 arrive when they no longer need the description
// Consumers have no barrier for step descriptions. They wait on qdo.full, on which lane 0 arrives after it has written
// the description. kStepRing (bwd_traits.h) explains why the loader does not overwrite one too early.
#pragma once

#include "kernels/hopper/bwd_common.cuh"
#include "kernels/hopper/tile_copy.cuh"

namespace megatron_sb::hopper {

template <class T>
class StepLoader {
  public:
    __device__ StepLoader(typename T::Shared& shared, const BackwardArguments& arguments)
        : shared_(shared), control_(shared.control), args_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() {
        while (next_key_tile()) {
            if (key_tile_.is_whole && part_ > 0) continue;  // part 0 has all steps
            // The slow steps (kSlow) come first, because the consumers run them in a separate loop. They are the newest
            // ones, so all key tiles process their steps in the same order. Otherwise a tile would wait for steps that
            // the older one does later.
            push_steps(true);
            push_steps(false);
            // The consumers write zeros to the gradients of a key tile without steps. If the tile has several parts,
            // add_parts() does.
            if (!have_pending_ && key_tile_.is_whole) fill_empty_step();
            if (have_pending_) publish_pending(kLastStepOfTile);
        }
        pending_.flags = 0;
        publish_pending(kEndOfWork);
    }

  private:
    // Takes tickets until one has work, and finds its key tile, KV head and part. Returns false if no work is left.
    __device__ bool next_key_tile() {
        const Sizes& z = args_.params.sizes;
        const TicketOrder order(args_.plan.head_order, z.batch * z.num_kv_heads, args_.plan.counters[kNumKeyTiles],
                                args_.plan.parts.count());
        Work work;
        int ticket = 0;
        do {
            if (lane_ == 0) ticket = atomicAdd(&args_.plan.counters[kTicket], 1);
            ticket = __shfl_sync(~0u, ticket, 0);
            if (!order.is_before_end(ticket)) return false;
        } while (!order.find(ticket, &work));
        key_tile_ = args_.plan.key_tiles[work.key_tile];
        part_ = work.part;
        batch_ = work.head / z.num_kv_heads;
        kv_head_ = work.head % z.num_kv_heads;
        new_key_tile_ = true;
        return true;
    }

    __device__ void push_steps(bool slow) {
        const Sizes& z = args_.params.sizes;
        const int group = z.num_heads / z.num_kv_heads, first = batch_ * z.num_heads + kv_head_ * group;
        const PartRange heads = args_.plan.parts.heads_of(part_, group);
        for (int i = key_tile_.segment; i >= 0; i = args_.plan.segments[i].next)
            for (int h = heads.begin; h < heads.end; h += 32)  // one lane per head
                push_steps_of_heads(clamped(args_.params.segments[i], z), args_.plan.segments[i].first_step, first + h,
                                    min(32, heads.end - h), slow);
    }

    // Pushes the steps of this part, for up to 32 query heads, that need this key tile: only slow steps, or only fast
    // ones. The order is from the newest step to the oldest, and each step is pushed for all heads before the next
    // older one. So neighbouring key tiles stay a constant number of steps apart, although an older tile has more steps
    // for each head.
    __device__ void push_steps_of_heads(const Segment& s, int first_step, int first_head, int heads, bool slow) {
        const bool attend_current = args_.params.options.attend_current;
        const int offset = s.q_pos_minus_k_pos + (attend_current ? 1 : 0);
        const int tile_begin = key_tile_.tile * T::kKeyTile;
        if (s.k_len <= tile_begin || s.q_len - 1 + offset <= tile_begin) return;
        const auto [oldest, end] =
            args_.plan.parts.steps_of(part_, num_steps(s), oldest_step(s, attend_current, tile_begin));
        const StepStarts* const starts = args_.plan.starts + int64_t(first_head) * args_.plan.max_steps + first_step;
        int newest = oldest - 1;  // newest step of this lane's head that needs the tile
        for (int h = 0; h < heads; ++h) {
            const StepStarts* const head_starts = starts + int64_t(h) * args_.plan.max_steps;
            const int found = find_newest_step(head_starts, oldest, end);
            const bool some =
                found >= oldest && (!slow || head_starts[found].newest_half_so_far >= T::kHalves * key_tile_.tile);
            if (lane_ == h && some) newest = found;
        }
        for (int top = __reduce_max_sync(~0u, newest); top >= oldest; top -= 32) {
            // Bit n is for step top - n of this lane's head: whether to push it, and whether it gets kOldestKeyTile.
            uint32_t to_push = 0, is_oldest = 0;
            for (int h = 0; h < heads; ++h) {
                const int step = top - lane_, newest_of_head = __shfl_sync(~0u, newest, h);
                StepStarts step_starts = {kNeverStarts, kNeverStarts, -1, 0};
                if (step >= oldest && step <= newest_of_head)
                    step_starts = starts[int64_t(h) * args_.plan.max_steps + step];
                const bool is_slow = step_starts.newest_half_so_far >= T::kHalves * key_tile_.tile;
                const uint32_t needed =
                    __ballot_sync(~0u, step_starts.oldest_tile <= key_tile_.tile && is_slow == slow);
                const uint32_t oldest_here = __ballot_sync(~0u, step_starts.oldest_tile == key_tile_.tile);
                if (lane_ == h) to_push = needed, is_oldest = oldest_here;
            }
            for (int n = 0; n < 32; ++n)
                for (uint32_t left = __ballot_sync(~0u, to_push >> n & 1); left != 0; left &= left - 1) {
                    const int h = __ffs(left) - 1;
                    if (have_pending_) publish_pending(next_flags(s, top - n, offset, slow));
                    fill_pending(s, first_step, first_head + h, top - n, offset);
                    const bool is_oldest_tile = __shfl_sync(~0u, is_oldest, h) >> n & 1;
                    pending_.flags |= (slow ? kSlow : 0) | (is_oldest_tile ? kOldestKeyTile : 0);
                }
        }
    }
    // Describes a step in pending_. publish_pending() adds the flags and fields that are not known here.
    __device__ void fill_pending(const Segment& s, int first_step, int head, int step, int offset) {
        const int tile_begin = key_tile_.tile * T::kKeyTile;
        const int row = step * kStepRows, rows = min(kStepRows, s.q_len - row);
        const int newest_tile =
            (visible_keys(s, args_.params.options.attend_current, row + rows - 1) - 1) / T::kKeyTile;
        pending_.row_index = int64_t(head) * args_.params.sizes.q_rows + s.q_begin + row;
        pending_.dq_index = head * args_.plan.max_steps + first_step + step;
        pending_.row = s.q_begin + row;
        pending_.head = head - batch_ * args_.params.sizes.num_heads;
        pending_.offset = args_.reach.offset_of(pending_.head);
        pending_.num_rows = rows;
        pending_.visible = row + offset - tile_begin;
        pending_.num_keys = min(T::kKeyTile, s.k_len - tile_begin);
        pending_.flags = (newest_tile == key_tile_.tile ? kNewestKeyTile : 0) |
                         kMasked * masked_halves(rows, pending_.visible, pending_.num_keys);
        have_pending_ = true;
    }
    // What a step must know of the next one of its key tile.
    __device__ int next_flags(const Segment& s, int next, int offset, bool slow) const {
        const int row = next * kStepRows, tile_begin = key_tile_.tile * T::kKeyTile;
        return (slow ? kSlowNext : 0) |
               kMaskedNext * masked_halves(s.q_len - row, row + offset - tile_begin, s.k_len - tile_begin);
    }
    // Describes a step without rows, for a key tile that no row needs. With it, the consumers write zeros to the
    // gradients of the tile. Its dQ goes to a place that nothing reads.
    __device__ void fill_empty_step() {
        pending_ = {};
        pending_.dq_index = args_.plan.max_steps * args_.params.sizes.batch * args_.params.sizes.num_heads;
        pending_.flags = kOldestKeyTile | kNewestKeyTile | kSlow | kMasked | kMasked << 1;
        pending_.visible = -kStepRows;
        have_pending_ = true;
    }
    // The halves of the key tile of which some row does not see all keys: bit 0 is the older half. A step has at most
    // kStepRows of `rows`, the first one sees `visible` keys without clamping, and the tile has at most T::kKeyTile of
    // `keys`.
    __device__ static int masked_halves(int rows, int visible, int keys) {
        if (rows < kStepRows) return 3;
        const int num_visible = min(visible, keys);
        return (num_visible < kHalfTileKeys ? 1 : 0) | (num_visible < 2 * kHalfTileKeys ? 2 : 0);
    }

    // Returns the newest step in [oldest, end) that needs this key tile, or oldest - 1 if no step needs it. A step
    // needs the tile if a row of this step starts in this tile or in an older one. All 32 lanes search together.
    __device__ int find_newest_step(const StepStarts* starts, int oldest, int end) const {
        // Invariant: step `low` or a newer one needs the tile, or low = oldest - 1; step `high` and all newer ones do
        // not, or high = end.
        int low = oldest - 1, high = end;
        while (high - low > 1) {
            const int stride = max((high - low + 31) / 32, 1), step = low + (lane_ + 1) * stride;
            const bool needed = step < high && starts[step].oldest_from_here <= key_tile_.tile;
            const int count = __popc(__ballot_sync(~0u, needed));
            high = min(high, low + (count + 1) * stride);
            low += count * stride;
        }
        return low;
    }

    // Hands the pending step to the other warps. Waits on qdo.empty (consumers arrive) and steps.empty (warps 1 to 3
    // arrive). With the first step of a key tile it also loads K and V. Their buffer is the last to become free, so K
    // and V are loaded after Q and dO.
    __device__ void publish_pending(int flags) {
        const StepPlace place = StepPlace::of(number_);
        const bool more = !(flags & kEndOfWork), begins_tile = more && new_key_tile_;
        if (begins_tile) {
            const int first = key_tile_.tile * T::kKeyTile;
            new_key_tile_ = false;
            tile_row_ = clamped(args_.params.segments[key_tile_.segment], args_.params.sizes).k_begin + first;
            tile_keys_ = min(T::kKeyTile, key_tile_.num_keys - first);
        }
        control_.qdo.wait_empty(stage_);
        control_.steps.wait_empty(place);
        if (lane_ == 0) {
            Step step = pending_;
            step.flags |= flags | (key_tile_.is_whole ? 0 : kPartialSums);
            step.tile = key_tile_.tile;
            step.batch = batch_;
            step.kv_head = kv_head_;
            step.k_row = tile_row_;
            step.tile_keys = tile_keys_;
            step.part = part_;
            control_.step_info[place.slot] = step;
            control_.steps.full.arrive(place);
        }
        if (more)
            load_rows_of_step();
        else if (lane_ == 0)
            control_.qdo.full.arrive(stage_);
        if (begins_tile) load_tile();
        stage_ = stage_.next();
        ++number_;
        have_pending_ = false;
    }

    // Loads Q and dO of the pending step. Lane 0 arrives on qdo.full, and on d_o.full if dO has a ring of its own; the
    // consumers wait.
    __device__ void load_rows_of_step() {
        uint64_t* const barrier = &control_.qdo.full.barriers[stage_.slot];
        uint8_t* const q = shared_.qdo[stage_.slot];
        if (pending_.num_rows < kStepRows) return copy_rows_of_step(q);
        if (lane_ == 0) {
            control_.qdo.full.arrive_with_bytes(stage_, T::kStageBytes + kStepRows * 2 * T::kBiases);
#pragma unroll
            for (int panel = 0; panel < T::kPanels; ++panel) {
                load_columns(q + panel * T::kPanelBytes, args_.q, 64 * panel, barrier);
                if (!T::kSeparateDo && panel < T::kValuePanels)
                    load_columns(q + T::kTileBytes + panel * T::kPanelBytes, args_.d_o, 64 * panel, barrier);
            }
            if constexpr (T::kBiases > 0)
                load_columns(shared_.q_biases[stage_.slot], args_.q_biases, T::kHeadDim, barrier);
        }
        if constexpr (T::kSeparateDo) {
            const auto place = Place<1>::of(number_);
            control_.d_o.wait_empty(place);
            if (lane_ != 0) return;
            control_.d_o.full.arrive_with_bytes(place, T::kValueTileBytes);
#pragma unroll
            for (int panel = 0; panel < T::kValuePanels; ++panel)
                load_columns(shared_.d_o + panel * T::kPanelBytes, args_.d_o, 64 * panel,
                             &control_.d_o.full.barriers[place.slot]);
        }
    }
    __device__ void load_columns(uint8_t* to, const TensorMap& map, int column, uint64_t* barrier) const {
        tma_load_3d(to, &map.map, barrier, column, pending_.row, map.heads(batch_, pending_.head));
    }
    // The same without TMA, for the last rows of a segment.
    __device__ void copy_rows_of_step(uint8_t* q) {
        const BackwardParams& p = args_.params;
        const auto same = [](int row) { return row; };
        const auto first = [&](const auto& tensor) { return offset_of(tensor, batch_, pending_.head, pending_.row); };
        copy_rows<kStepRows, T::kPanels>(q, p.q, first(p.q), pending_.num_rows, p.sizes.head_dim, same);
        if constexpr (T::kBiases > 0)
            copy_bias_columns<kStepRows>(shared_.q_biases[stage_.slot], p.q, first(p.q) + 2 * T::kHeadDim,
                                         pending_.num_rows, same);
        if constexpr (T::kSeparateDo) {
            finish_copy(control_.qdo.full, stage_);
            control_.d_o.wait_empty(Place<1>::of(number_));
        }
        uint8_t* const d_o = T::kSeparateDo ? shared_.d_o : q + T::kTileBytes;
        copy_rows<kStepRows, T::kValuePanels>(d_o, p.d_o, first(p.d_o), pending_.num_rows, p.sizes.head_dim_v, same);
        if constexpr (T::kSeparateDo)
            finish_copy(control_.d_o.full, Place<1>::of(number_));
        else
            finish_copy(control_.qdo.full, stage_);
    }

    // Loads K and V of the key tile. Waits on kv.empty, on which the consumer warps arrive. Lane 0 arrives on kv.full,
    // on which the consumers wait.
    __device__ void load_tile() {
        const auto place = Place<T::kTileBuffers>::of(tiles_++);
        const int buffer = place.slot;
        uint64_t* const barrier = &control_.kv.full.barriers[buffer];
        control_.kv.wait_empty(place);
        if (tile_keys_ == T::kKeyTile) {
            if (lane_ != 0) return;
            control_.kv.full.arrive_with_bytes(
                place, T::kHalves * (T::kTileBytes + T::kValueTileBytes + kHalfTileKeys * 2 * T::kBiases));
#pragma unroll
            for (int w = 0; w < T::kHalves; ++w) {
                const int row = tile_row_ + w * kHalfTileKeys;
#pragma unroll
                for (int panel = 0; panel < T::kPanels; ++panel) {
                    tma_load_5d(shared_.k[buffer][w] + panel * T::kPanelBytes, &args_.k.map, barrier, 64 * panel, row,
                                0, 0, args_.k.heads(batch_, kv_head_));
                    if (panel < T::kValuePanels)
                        tma_load_5d(shared_.v[buffer][w] + panel * T::kPanelBytes, &args_.v.map, barrier, 64 * panel,
                                    row, 0, 0, args_.v.heads(batch_, kv_head_));
                }
                if constexpr (T::kBiases > 0)
                    tma_load_5d(shared_.k_biases[buffer][w], &args_.k_biases.map, barrier, T::kHeadDim, row, 0, 0,
                                args_.k_biases.heads(batch_, kv_head_));
            }
            return;
        }
        for (int w = 0; w < T::kHalves; ++w) {
            const BackwardParams& p = args_.params;
            const KeyOrder<kHalfTileKeys> order;
            const int row = tile_row_ + w * kHalfTileKeys, count = tile_keys_ - w * kHalfTileKeys;
            const auto first = [&](const auto& tensor) { return offset_of(tensor, batch_, kv_head_, row); };
            copy_rows<kHalfTileKeys, T::kPanels>(shared_.k[buffer][w], p.k, first(p.k), count, p.sizes.head_dim, order);
            if constexpr (T::kBiases > 0)
                copy_bias_columns<kHalfTileKeys>(shared_.k_biases[buffer][w], p.k, first(p.k) + 2 * T::kHeadDim, count,
                                                 order);
            copy_rows<kHalfTileKeys, T::kValuePanels>(shared_.v[buffer][w], p.v, first(p.v), count, p.sizes.head_dim_v,
                                                      order);
        }
        finish_copy(control_.kv.full, place);
    }

    typename T::Shared& shared_;
    BackwardControl<T>& control_;
    const BackwardArguments& args_;
    const int lane_;
    KeyTile key_tile_;
    int batch_ = 0, kv_head_ = 0, part_ = 0;
    int tile_row_ = 0, tile_keys_ = 0;
    uint32_t tiles_ = 0;
    bool new_key_tile_ = false, have_pending_ = false;
    Step pending_;  // not published yet: its flags depend on the next step of the tile
    Stage<T> stage_;
    uint32_t number_ = 0;
};

}  // namespace megatron_sb::hopper
