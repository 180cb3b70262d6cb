// The producer warp: hands out work, fills the rings of Q, K and V tiles. The tiles in which a segment ends it leaves
// to two more warps (fwd_tail_loader.cuh).
//
// What orders what: a slot is written after its `empty` barrier says that every reader is done with it, and read after
// its `full` barrier says that the bytes (and `work` and `edge`, written before the arrival) are there.
// Whoever arrives did the reading and writing itself: what one lane writes, lane 0 does, and what all lanes read, all
// give back.
#pragma once

#include "kernels/hopper/fwd_traits.h"
#include "kernels/hopper/ptx.cuh"
#include "kernels/hopper/tensor_maps.h"

namespace megatron_sb::hopper {

using portable::QueryTiles;

// Passed by value, as the copy engine wants its maps.
struct ForwardArguments {
    ForwardParams params;
    QueryTiles* tiles;
    TensorMap q, k, v;
    int32_t heads_in_flight;
    float scale_log2;     // not 0
    float min_mass;       // a row whose mass is below gains nothing from older keys
    float restart_floor;  // the least mass of a restart
};

// How many keys of the segment row `row` of a query tile sees.
__device__ __forceinline__ int visible_keys(const QueryTile& tile, int row) {
    return min(max(tile.visible + row, 0), tile.k_len);
}
// Tiles of keys that a query tile walks: accumulator_register least one, so that every work tile goes the same way.
__device__ __forceinline__ int num_key_tiles(const QueryTile& tile) {
    return max(1, (visible_keys(tile, tile.num_rows - 1) + kKeyTile - 1) / kKeyTile);
}

template <class T>
class ForwardProducer {
  public:
    __device__ ForwardProducer(typename T::Shared& shared, const ForwardArguments& arguments)
        : shared_(shared), control_(shared.control), args_(arguments), lane_(threadIdx.x % 32) {}

    // All 32 lanes run this; one of them talks to the copy engine.
    __device__ void run() {
        num_tiles_ = args_.tiles->count;
        prefetch_work_tile(kPrefetchSteps);
        for (bool more = start_work_tile(); more;) more = load_work_tile();
        send_to_tail_loader(0, -1, {}, 0);
        send_to_tail_loader(1, -1, {}, 0);
    }

  private:
    // The keys, or values, of a segment and head.
    struct KeyRange {
        int batch, head, row, len;
    };

    static constexpr int kTileWords = 5;  // of a QueryTile, without its padding

    // The parity of a ring's `empty` barrier that says use `n` may start_work_tile; the first use of a slot finds it
    // free.
    __device__ static int empty_parity(int n) { return (n / kKvStages & 1) ^ 1; }

    // The next work tile is come by in three steps, each some time before what it brings is needed: a ticket, the tile
    // that it stands for, its announcement to the consumers. Not sooner: who has a ticket keeps others from the work.
    static constexpr int kPrefetchSteps = 3;
    __device__ void prefetch_work_tile(int steps) {
        if (prefetch_steps_done_ < 1 && steps >= 1) take_ticket();
        if (prefetch_steps_done_ < 2 && steps >= 2) read_work_tile();
        if (prefetch_steps_done_ < 3 && steps >= 3) publish_work_tile();
        prefetch_steps_done_ = max(prefetch_steps_done_, steps);
    }
    __device__ void take_ticket() {
        if (lane_ == 0) ticket_ = atomicAdd(&args_.tiles->ticket, 1);
    }
    __device__ void read_work_tile() {
        const int num_heads = args_.params.sizes.batch * args_.params.sizes.num_heads;
        const int ticket = __shfl_sync(~0u, ticket_, 0), per_group = num_tiles_ * args_.heads_in_flight;
        next_index_ = -1;
        if (int64_t(ticket) >= int64_t(num_tiles_) * num_heads) return;
        const int first_head = ticket / per_group * args_.heads_in_flight;
        const int group_size = min(args_.heads_in_flight, num_heads - first_head);
        const int rank = ticket % per_group / group_size;
        next_index_ = first_head + ticket % per_group % group_size;
        // A lane a word.
        next_word_ = reinterpret_cast<const int32_t*>(&args_.tiles->entries()[rank])[lane_ % kTileWords];
    }
    __device__ QueryTile next_tile() const {
        const auto word = [&](int i) { return __shfl_sync(~0u, next_word_, i); };
        return {word(0), word(1), word(2), word(3), word(4)};
    }

    // What was looked up goes to the consumers, with its queries.
    __device__ void publish_work_tile() {
        const int slot = num_published_ % kQueryStages;
        mbarrier_wait(&control_.q_empty[slot], num_published_ / kQueryStages & 1 ^ 1);
        ++num_published_;
        const Sizes& z = args_.params.sizes;
        const QueryTile tile = next_tile();
        const int batch = next_index_ / z.num_heads, head = next_index_ % z.num_heads;
        if (lane_ != 0) return;
        control_.work[slot] = {tile, batch, head};
        if (next_index_ < 0) control_.work[slot].queries.num_rows = 0;
        mbarrier_arrive(&control_.q_full[slot]);
        if (next_index_ < 0) {
            mbarrier_arrive(&control_.q_full[slot]);
            return;
        }
        mbarrier_arrive_expect_tx(&control_.q_full[slot], T::kQueryBytes);
#pragma unroll
        for (int half = 0; half < T::kPanels; ++half)
            tma_load_3d(shared_.q[slot] + half * T::kQueryPanelBytes, &args_.q.map, &control_.q_full[slot], 64 * half,
                        tile.q_row, args_.q.heads(batch, head));
    }

    // Turns to the work tile that was announced and loads its first keys; false if there is none.
    __device__ bool start_work_tile() {
        if (next_index_ < 0) return false;
        const Sizes& z = args_.params.sizes;
        const QueryTile tile = next_tile();
        keys_.batch = next_index_ / z.num_heads;
        keys_.head = next_index_ % z.num_heads / (z.num_heads / z.num_kv_heads);
        keys_.row = tile.k_row;
        keys_.len = tile.k_len;
        newest_ = num_key_tiles(tile) - 1;
        ++work_number_;
        prefetch_steps_done_ = 0;
        load_keys(newest_);
        return true;
    }

    // From the second keys on, newest first, always a tile of keys and then the tile of values before it: K1 V0 K2 V1
    // ... and, after the first keys of the next work tile, the last values. False if there is no next work tile.
    __device__ bool load_work_tile() {
        // As after an early end another one is likely, the next work tile is then prepared accumulator_register once.
        const int last_tiles = ended_early_ ? newest_ : min(newest_, kPrefetchSteps);
        ended_early_ = false;
        int tile = newest_;
        for (; tile > 0; --tile) {
            prefetch_work_tile(min(last_tiles - tile + 1, kPrefetchSteps));
            if (!load_keys(tile - 1)) break;
            load_values(keys_, tile);
        }
        prefetch_work_tile(kPrefetchSteps);
        const KeyRange values = keys_;
        const bool more = start_work_tile();
        load_values(values, tile);
        return more;
    }

    // False where the consumers need no more keys, which they are told.
    __device__ bool load_keys(int tile) {
        const int slot = k_uses_ % kKvStages;
        mbarrier_wait(&control_.k_empty[slot], empty_parity(k_uses_++));
        if (tile < newest_ && all_consumers_used_up(slot)) {
            send_end_of_keys(slot);
            return false;
        }
        load(0, shared_.k[slot], &control_.k_full[slot], args_.k, keys_, tile, slot);
        return true;
    }
    __device__ void load_values(const KeyRange& values, int tile) {
        const int slot = v_uses_ % kKvStages;
        mbarrier_wait(&control_.v_empty[slot], empty_parity(v_uses_++));
        load(1, shared_.v[slot], &control_.v_full[slot], args_.v, values, tile, slot);
    }

    // As they were when they gave back K slot `slot`.
    __device__ bool all_consumers_used_up(int slot) const {
        bool all = true;
        if (lane_ == 0)
            for (int warp = 0; warp < 4 * T::kWarpgroups; ++warp)
                all = all && control_.used_up_work[slot][warp] == work_number_;
        return __shfl_sync(~0u, all, 0);
    }

    // A K slot without a tile.
    __device__ void send_end_of_keys(int slot) {
        ended_early_ = true;
        if (lane_ != 0) return;
        mbarrier_arrive(&control_.end_of_keys[slot]);
        mbarrier_arrive(&control_.k_full[slot]);
    }

    // Rows [128 tile, 128 tile + 128) of the segment.
    __device__ void load(int loader, uint8_t* to, uint64_t* full, const TensorMap& map, const KeyRange& keys, int tile,
                         int slot) {
        if (keys.len - tile * kKeyTile < kKeyTile) {
            send_to_tail_loader(loader, slot, keys, tile);
        } else if (lane_ == 0) {
            mbarrier_arrive_expect_tx(full, T::kKeyBytes);
#pragma unroll
            for (int half = 0; half < T::kPanels; ++half)
                tma_load_5d(to + half * T::kKeyPanelBytes, &map.map, full, 64 * half, keys.row + tile * kKeyTile, 0, 0,
                            map.heads(keys.batch, keys.head));
        }
    }
    // A tile in which the segment ends; slot -1 sends the loader home.
    __device__ void send_to_tail_loader(int loader, int slot, const KeyRange& keys, int tile) {
        mbarrier_wait(&control_.tail_empty[loader], (tail_parity_ >> loader & 1) ^ 1);
        tail_parity_ ^= 1 << loader;
        if (lane_ != 0) return;
        const int count = max(keys.len - tile * kKeyTile, 0);
        control_.tail[loader] = {keys.batch, keys.head, keys.row + tile * kKeyTile, count, slot};
        mbarrier_arrive(&control_.tail_full[loader]);
    }

    typename T::Shared& shared_;
    ForwardControl& control_;
    const ForwardArguments& args_;
    const int lane_;
    int num_tiles_;
    int prefetch_steps_done_ = 0;  // steps towards the next work tile
    bool ended_early_ = false;
    int ticket_ = 0;                  // of the next work tile, in lane 0
    int next_index_, next_word_ = 0;  // batch * num_heads + head of the next work tile, or -1; its QueryTile by lanes
    int num_published_ = 0;
    int work_number_ = -1, newest_;  // of the work tile accumulator_register hand, and its newest tile of keys
    KeyRange keys_;
    int k_uses_ = 0, v_uses_ = 0;
    int tail_parity_ = 0;  // how many each loader had, the last bit
};

}  // namespace megatron_sb::hopper
