// The producer warp: hands out work, fills the rings of Q, K and V tiles.
//
// What orders what: a slot is written after its `empty` barrier says that every consumer is done with it, and read
// after its `full` barrier says that the bytes (and `work`, `end_slot`, written before the arrival) are there.
#pragma once

#include "kernels/hopper/ptx.cuh"
#include "kernels/hopper/tensor_maps.h"
#include "kernels/hopper/traits.h"

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
        const Sizes& z = a_.params.sizes;
        num_tiles_ = a_.tiles->count;
        take_ticket();
        look_up_ticket();
        for (;; ++number_) {
            const int slot = number_ % kStages;
            mbarrier_wait(&c_.q_empty[slot], parity_before(number_));
            if (next_index_ < 0) {
                c_.work[number_ % kWorkTiles].queries.num_rows = 0;
                __syncwarp();
                if (lane_ == 0) mbarrier_arrive(&c_.q_full[slot]);
                return;
            }
            tile_ = looked_up_tile();
            batch_ = next_index_ / z.num_heads;
            const int head = next_index_ - batch_ * z.num_heads;
            kv_head_ = head / (z.num_heads / z.num_kv_heads);
            take_ticket();
            load_queries(slot, head);
            load_keys_and_values();
        }
    }

  private:
    // The parity of a ring's `empty` barrier that says use `n` may begin; the first use of a slot finds it free.
    __device__ static int parity_before(int n) { return (n / kStages & 1) ^ 1; }

    // The next work tile is looked up in two steps, each long before what it brings is needed.
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
        const auto* words = reinterpret_cast<const int32_t*>(&a_.tiles->entries()[rank]);
        next_word_ = words[lane_ % (sizeof(QueryTile) / sizeof(int32_t))];
    }
    __device__ QueryTile looked_up_tile() const {
        QueryTile tile;
        tile.q_row = __shfl_sync(~0u, next_word_, 0);
        tile.num_rows = __shfl_sync(~0u, next_word_, 1);
        tile.k_row = __shfl_sync(~0u, next_word_, 2);
        tile.k_len = __shfl_sync(~0u, next_word_, 3);
        tile.visible = __shfl_sync(~0u, next_word_, 4);
        return tile;
    }

    __device__ void load_queries(int slot, int head) {
        if (lane_ != 0) return;
        c_.work[number_ % kWorkTiles] = {tile_, batch_, head, num_key_tiles(tile_) * kKeyTile > tile_.k_len};
        mbarrier_arrive_expect(&c_.q_full[slot], T::kQueryBytes);
#pragma unroll
        for (int half = 0; half < T::kHalves; ++half)
            tma_load_3d(shared_.q[slot] + half * T::kQueryHalfBytes, &a_.q.map, &c_.q_full[slot], 64 * half,
                        tile_.q_row, a_.q.heads(batch_, head));
    }

    // Newest tile first: K0 K1 V0 K2 V1 ... The next work tile is looked up on the way.
    __device__ void load_keys_and_values() {
        const int newest = num_key_tiles(tile_) - 1;
        bool end = false;
        for (int tile = newest; !end; --tile) {
            end = tile < 0 || !load_keys(tile, tile < newest);
            if (tile < newest) load_values(tile + 1);
            if (tile == newest - 1) look_up_ticket();
        }
    }

    // False where the consumers need no more keys, which they are told.
    __device__ bool load_keys(int tile, bool may_end) {
        const int slot = k_uses_ % kStages;
        mbarrier_wait(&c_.k_empty[slot], parity_before(k_uses_));
        if (may_end && consumers_are_used_up()) {
            end_early();
            return false;
        }
        load(shared_.k[slot], &c_.k_full[slot], a_.k, a_.params.k, tile);
        ++k_uses_;
        return true;
    }
    __device__ void load_values(int tile) {
        const int slot = v_uses_ % kStages;
        mbarrier_wait(&c_.v_empty[slot], parity_before(v_uses_++));
        load(shared_.v[slot], &c_.v_full[slot], a_.v, a_.params.v, tile);
    }

    __device__ bool consumers_are_used_up() const {
        const volatile int32_t* numbers = c_.used_up_in;
        return __all_sync(~0u, lane_ >= 4 * T::kWarpgroups || numbers[lane_] == number_);
    }

    // A K slot without a tile.
    __device__ void end_early() {
        if (lane_ == 0) {
            c_.end_slot = k_uses_;
            mbarrier_arrive(&c_.k_full[k_uses_ % kStages]);
        }
        ++k_uses_;
    }

    // Keys [128 tile, 128 tile + 128) of the segment.
    __device__ void load(uint8_t* to, uint64_t* full, const TensorMap& map, const Rows<const void*>& rows, int tile) {
        const int first = tile * kKeyTile;
        if (first + kKeyTile > tile_.k_len) {
            load_ragged(to, full, rows, first);
        } else if (lane_ == 0) {
            mbarrier_arrive_expect(full, T::kKeyBytes);
#pragma unroll
            for (int half = 0; half < T::kHalves; ++half)
                tma_load_5d(to + half * T::kKeyHalfBytes, &map.map, full, 64 * half, tile_.k_row + first, 0, 0,
                            map.heads(batch_, kv_head_));
        }
    }

    // The tile in which the segment ends, as the copy engine would lay it out, with zeros after the end: what lies
    // there may be another document's, or no memory at all. Row 8n + 2t + c of it is key 32t + 2n + c. The barrier
    // completes when the copies have; the readers of such a tile need a proxy fence.
    __device__ void load_ragged(uint8_t* to, uint64_t* full, const Rows<const void*>& rows, int first) {
        constexpr int kChunk = 16, kChunksPerHalf = kRowBytes / kChunk, kChunksPerRow = T::kHalves * kChunksPerHalf;
        constexpr int kRowsAtOnce = 32 / kChunksPerRow;  // neighbouring rows that the lanes take together
        const int chunk = lane_ % kChunksPerRow, half = chunk / kChunksPerHalf;
        const uint8_t* from = static_cast<const uint8_t*>(rows.data) + chunk * kChunk +
                              2 * (batch_ * rows.batch_stride + kv_head_ * rows.head_stride +
                                   (int64_t(tile_.k_row) + first) * rows.row_stride);
        const int count = tile_.k_len - first;
        to += half * T::kKeyHalfBytes;
#pragma unroll 2
        for (int row = lane_ / kChunksPerRow; row < kKeyTile; row += kRowsAtOnce) {
            const int key = row % 8 / 2 * 32 + row / 8 * 2 + row % 2;
            const int column = (chunk % kChunksPerHalf) ^ (row % 8);
            cp_async_16(to + row * kRowBytes + column * kChunk,
                        key < count ? from + 2 * key * rows.row_stride : rows.data, key < count ? kChunk : 0);
        }
        cp_async_arrive(full);
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(full);
    }

    typename T::Shared& shared_;
    Control& c_;
    const Arguments& a_;
    const int lane_;
    int num_tiles_;
    int ticket_ = 0;                  // of the next work tile, in lane 0
    int next_index_, next_word_ = 0;  // batch * num_heads + head of the next work tile, or -1; its QueryTile by lanes
    QueryTile tile_;
    int batch_, kv_head_;
    int number_ = 0, k_uses_ = 0, v_uses_ = 0;
};

}  // namespace megatron_sb::hopper
