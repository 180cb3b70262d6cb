// The producer warp: hands out work, fills the rings of Q, K and V tiles. The tiles in which a segment ends it leaves
// to two more warps (fwd_edge_loader.cuh).
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
struct Arguments {
    ForwardParams params;
    QueryTiles* tiles;
    TensorMap q, k, v;
    int32_t heads_in_flight;
    float scale_log2;  // not 0
    float used_up;     // a row whose mass is below gains nothing from older keys
    float floor;       // the least mass of a restart
};

// How many keys of the segment row `row` of a query tile sees.
__device__ __forceinline__ int visible_keys(const QueryTile& tile, int row) {
    return min(max(tile.visible + row, 0), tile.k_len);
}
// Tiles of keys that a query tile walks: at least one, so that every work tile goes the same way.
__device__ __forceinline__ int num_key_tiles(const QueryTile& tile) {
    return max(1, (visible_keys(tile, tile.num_rows - 1) + kKeyTile - 1) / kKeyTile);
}

template <class T>
class Producer {
  public:
    __device__ Producer(typename T::Shared& shared, const Arguments& arguments)
        : shared_(shared), c_(shared.control), a_(arguments), lane_(threadIdx.x % 32) {}

    // All 32 lanes run this; one of them talks to the copy engine.
    __device__ void run() {
        num_tiles_ = a_.tiles->count;
        prepare_next(kSteps);
        for (bool more = begin(); more;) more = load_work_tile();
        send_to_loader(0, -1, {}, 0);
        send_to_loader(1, -1, {}, 0);
    }

  private:
    // The keys, or values, of a segment and head.
    struct Keys {
        int batch, head, row, len;
    };

    static constexpr int kTileWords = 5;  // of a QueryTile, without its padding

    // The parity of a ring's `empty` barrier that says use `n` may begin; the first use of a slot finds it free.
    __device__ static int parity_before(int n) { return (n / kStages & 1) ^ 1; }

    // The next work tile is come by in three steps, each some time before what it brings is needed: a ticket, the tile
    // that it stands for, its announcement to the consumers. Not sooner: who has a ticket keeps others from the work.
    static constexpr int kSteps = 3;
    __device__ void prepare_next(int steps) {
        if (prepared_ < 1 && steps >= 1) take_ticket();
        if (prepared_ < 2 && steps >= 2) look_up_ticket();
        if (prepared_ < 3 && steps >= 3) announce();
        prepared_ = max(prepared_, steps);
    }
    __device__ void take_ticket() {
        if (lane_ == 0) ticket_ = atomicAdd(&a_.tiles->ticket, 1);
    }
    __device__ void look_up_ticket() {
        const int num_heads = a_.params.sizes.batch * a_.params.sizes.num_heads;
        const int ticket = __shfl_sync(~0u, ticket_, 0), per_group = num_tiles_ * a_.heads_in_flight;
        next_index_ = -1;
        if (int64_t(ticket) >= int64_t(num_tiles_) * num_heads) return;
        const int first_head = ticket / per_group * a_.heads_in_flight;
        const int group_size = min(a_.heads_in_flight, num_heads - first_head);
        const int rank = ticket % per_group / group_size;
        next_index_ = first_head + ticket % per_group % group_size;
        // A lane a word.
        next_word_ = reinterpret_cast<const int32_t*>(&a_.tiles->entries()[rank])[lane_ % kTileWords];
    }
    __device__ QueryTile next_tile() const {
        const auto word = [&](int i) { return __shfl_sync(~0u, next_word_, i); };
        return {word(0), word(1), word(2), word(3), word(4)};
    }

    // What was looked up goes to the consumers, with its queries.
    __device__ void announce() {
        const int slot = announced_ % kQueryStages;
        mbarrier_wait(&c_.q_empty[slot], announced_ / kQueryStages & 1 ^ 1);
        ++announced_;
        const Sizes& z = a_.params.sizes;
        const QueryTile tile = next_tile();
        const int batch = next_index_ / z.num_heads, head = next_index_ % z.num_heads;
        if (lane_ != 0) return;
        c_.work[slot] = {tile, batch, head};
        if (next_index_ < 0) c_.work[slot].queries.num_rows = 0;
        mbarrier_arrive(&c_.q_full[slot]);
        if (next_index_ < 0) {
            mbarrier_arrive(&c_.q_full[slot]);
            return;
        }
        mbarrier_arrive_expect(&c_.q_full[slot], T::kQueryBytes);
#pragma unroll
        for (int half = 0; half < T::kHalves; ++half)
            tma_load_3d(shared_.q[slot] + half * T::kQueryHalfBytes, &a_.q.map, &c_.q_full[slot], 64 * half, tile.q_row,
                        a_.q.heads(batch, head));
    }

    // Turns to the work tile that was announced and loads its first keys; false if there is none.
    __device__ bool begin() {
        if (next_index_ < 0) return false;
        const Sizes& z = a_.params.sizes;
        const QueryTile tile = next_tile();
        keys_.batch = next_index_ / z.num_heads;
        keys_.head = next_index_ % z.num_heads / (z.num_heads / z.num_kv_heads);
        keys_.row = tile.k_row;
        keys_.len = tile.k_len;
        newest_ = num_key_tiles(tile) - 1;
        ++number_;
        prepared_ = 0;
        load_keys(newest_);
        return true;
    }

    // From the second keys on, newest first, always a tile of keys and then the tile of values before it: K1 V0 K2 V1
    // ... and, after the first keys of the next work tile, the last values. False if there is no next work tile.
    __device__ bool load_work_tile() {
        // As after an early end another one is likely, the next work tile is then prepared at once.
        const int last_tiles = ended_early_ ? newest_ : min(newest_, kSteps);
        ended_early_ = false;
        int tile = newest_;
        for (; tile > 0; --tile) {
            prepare_next(min(last_tiles - tile + 1, kSteps));
            if (!load_keys(tile - 1)) break;
            load_values(keys_, tile);
        }
        prepare_next(kSteps);
        const Keys values = keys_;
        const bool more = begin();
        load_values(values, tile);
        return more;
    }

    // False where the consumers need no more keys, which they are told.
    __device__ bool load_keys(int tile) {
        const int slot = k_uses_ % kStages;
        mbarrier_wait(&c_.k_empty[slot], parity_before(k_uses_++));
        if (tile < newest_ && consumers_are_used_up(slot)) {
            end_early(slot);
            return false;
        }
        load(0, shared_.k[slot], &c_.k_full[slot], a_.k, keys_, tile, slot);
        return true;
    }
    __device__ void load_values(const Keys& values, int tile) {
        const int slot = v_uses_ % kStages;
        mbarrier_wait(&c_.v_empty[slot], parity_before(v_uses_++));
        load(1, shared_.v[slot], &c_.v_full[slot], a_.v, values, tile, slot);
    }

    // As they were when they gave back K slot `slot`.
    __device__ bool consumers_are_used_up(int slot) const {
        bool all = true;
        if (lane_ == 0)
            for (int warp = 0; warp < 4 * T::kWarpgroups; ++warp) all = all && c_.used_up_in[slot][warp] == number_;
        return __shfl_sync(~0u, all, 0);
    }

    // A K slot without a tile.
    __device__ void end_early(int slot) {
        ended_early_ = true;
        if (lane_ != 0) return;
        mbarrier_arrive(&c_.k_end[slot]);
        mbarrier_arrive(&c_.k_full[slot]);
    }

    // Rows [128 tile, 128 tile + 128) of the segment.
    __device__ void load(int loader, uint8_t* to, uint64_t* full, const TensorMap& map, const Keys& keys, int tile,
                         int slot) {
        if (keys.len - tile * kKeyTile < kKeyTile) {
            send_to_loader(loader, slot, keys, tile);
        } else if (lane_ == 0) {
            mbarrier_arrive_expect(full, T::kKeyBytes);
#pragma unroll
            for (int half = 0; half < T::kHalves; ++half)
                tma_load_5d(to + half * T::kKeyHalfBytes, &map.map, full, 64 * half, keys.row + tile * kKeyTile, 0, 0,
                            map.heads(keys.batch, keys.head));
        }
    }
    // A tile in which the segment ends; slot -1 sends the loader home.
    __device__ void send_to_loader(int loader, int slot, const Keys& keys, int tile) {
        mbarrier_wait(&c_.edge_empty[loader], (edge_tiles_ >> loader & 1) ^ 1);
        edge_tiles_ ^= 1 << loader;
        if (lane_ != 0) return;
        const int count = max(keys.len - tile * kKeyTile, 0);
        c_.edge[loader] = {keys.batch, keys.head, keys.row + tile * kKeyTile, count, slot};
        mbarrier_arrive(&c_.edge_full[loader]);
    }

    typename T::Shared& shared_;
    Control& c_;
    const Arguments& a_;
    const int lane_;
    int num_tiles_;
    int prepared_ = 0;  // steps towards the next work tile
    bool ended_early_ = false;
    int ticket_ = 0;                  // of the next work tile, in lane 0
    int next_index_, next_word_ = 0;  // batch * num_heads + head of the next work tile, or -1; its QueryTile by lanes
    int announced_ = 0;
    int number_ = -1, newest_;  // of the work tile at hand, and its newest tile of keys
    Keys keys_;
    int k_uses_ = 0, v_uses_ = 0;
    int edge_tiles_ = 0;  // how many each loader had, the last bit
};

}  // namespace megatron_sb::hopper
