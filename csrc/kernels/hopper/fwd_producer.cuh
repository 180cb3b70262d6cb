// The producer warp of the forward. It takes work tiles, publishes them to the consumers, and loads Q, K and V with
// TMA. Two other warps load the tiles in which a segment ends (fwd_tail_loader.cuh).
//
// Synchronisation.
//     barrier                     arrives                                             waits
//     q.full                      producer: for `work`, and with the bytes of Q       consumers
//     k.full, v.full              producer with the bytes of a tile, or tail loader   consumers
//     q.empty, k.empty, v.empty   consumers                                           producer
//     tail_ring.full              producer, after it has written `tail`               tail loader
//     tail_ring.empty             tail loader, after it has read `tail`               producer
//     end_of_keys                 producer, before it arrives on k.full               consumers test it after k.full
// Lane 0 writes `work` and `tail`, so lane 0 arrives for them. All lanes that read them arrive themselves. racecheck of
// compute-sanitizer relies on this.
#pragma once

#include "kernels/hopper/fwd_traits.h"
#include "kernels/hopper/tensor_maps.h"
#include "kernels/hopper/wait.cuh"

namespace megatron_sb::hopper {

using common::QueryTiles;

// Passed by value as a kernel parameter, because TMA reads its tensor maps from parameter space.
struct ForwardArguments {
    ForwardParams params;
    QueryTiles* tiles;
    TensorMap q, k, v;
    int32_t heads_in_flight;
    float scale_log2;  // scale * log2(e), never 0
    common::Reach reach;
    float min_mass;       // a row with less mass is used up: older keys contribute nothing
    float restart_floor;  // a restart record needs at least this mass
    WaitRecord* wait_record;
    TensorMap q_biases, k_biases;  // with bias columns
};

// Number of keys of the segment that are visible to row `row` of a query tile.
__device__ __forceinline__ int visible_keys(const QueryTile& tile, int row) {
    return min(max(tile.visible + row, 0), tile.k_len);
}
// Number of key tiles that a query tile reads. It is at least one, so that every work tile takes the same path.
template <int kKeyTile>
__device__ __forceinline__ int num_key_tiles(const QueryTile& tile) {
    return max(1, (visible_keys(tile, tile.num_rows - 1) + kKeyTile - 1) / kKeyTile);
}

template <class T>
class ForwardProducer {
  public:
    __device__ ForwardProducer(typename T::Shared& shared, const ForwardArguments& arguments)
        : shared_(shared), control_(shared.control), args_(arguments), lane_(threadIdx.x % 32) {}

    // All 32 lanes run this. Lane 0 issues the TMA loads. The kernel begins while the list of tiles is written, and
    // only the producer reads the list.
    __device__ void run() {
        wait_for_previous_kernel();
        num_tiles_ = args_.tiles->count;
        prefetch_work_tile(kPrefetchSteps);
        for (bool more = start_work_tile(); more;) more = load_work_tile();
        send_to_tail_loader(0, -1, {}, 0);
        send_to_tail_loader(1, -1, {}, 0);
        if constexpr (T::kGated) send_to_tail_loader(kGateLoader, -1, {}, 0);
        watch(control_.finished, Place<1>::of(0));
    }

  private:
    // The producer is the watchdog of the CTA (wait.cuh).
    template <class Event, class Place>
    __device__ void watch(Event& event, const Place& item) {
        watch_until<Event::kWait>(control_, args_.wait_record, [&] { return event.try_wait(item); });
    }

    using KvPlace = Place<kKvStages>;
    // The keys (or values) of one segment and head.
    struct KeyRange {
        int batch, head, row, len;
    };

    static constexpr int kTileWords = 5;  // words of a QueryTile, without its padding

    // The producer fetches the next work tile in three steps: take a ticket, read the tile, publish it to the
    // consumers. Each step runs shortly before its result is needed. Do not run them earlier: while a CTA holds a
    // ticket, no other CTA can take that work.
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
        // Each lane reads one word.
        next_word_ = reinterpret_cast<const int32_t*>(&args_.tiles->entries()[rank])[lane_ % kTileWords];
    }
    __device__ QueryTile next_tile() const {
        const auto word = [&](int i) { return __shfl_sync(~0u, next_word_, i); };
        return {word(0), word(1), word(2), word(3), word(4)};
    }

    // Publishes the work tile that was read, and loads its Q tile. The producer waits on `q.empty`, on which all
    // consumer threads arrive. It arrives twice on `q.full`, on which the consumers wait.
    __device__ void publish_work_tile() {
        WorkTile& work = control_.work[num_published_ % T::kWorkSlots];
        const auto place = Place<T::kQueryStages>::of(num_published_++);
        const int slot = place.slot;
        auto& full = control_.q.full;
        watch(control_.q.empty, place.previous_use());
        const Sizes& z = args_.params.sizes;
        const QueryTile tile = next_tile();
        const int batch = next_index_ / z.num_heads, head = next_index_ % z.num_heads;
        if (lane_ != 0) return;
        work = {tile, batch, head, args_.reach.offset_of(head)};
        if (next_index_ < 0) work.queries.num_rows = 0;
        full.arrive(place);
        if (next_index_ < 0) return full.arrive(place);
        full.arrive_with_bytes(place, T::kQueryBytes + T::kQueryTile * 2 * T::kBiases);
#pragma unroll
        for (int panel = 0; panel < T::kPanels; ++panel)
            tma_load_3d(shared_.q[slot] + panel * T::kQueryPanelBytes, &args_.q.map, &full.barriers[slot], 64 * panel,
                        tile.q_row, args_.q.heads(batch, head));
        if constexpr (T::kBiases > 0)
            tma_load_3d(shared_.q_biases[slot], &args_.q_biases.map, &full.barriers[slot], T::kHeadDim, tile.q_row,
                        args_.q_biases.heads(batch, head));
    }

    // Makes the published work tile the current one and loads its newest K tile. Returns false, without a load, if
    // there is no more work.
    __device__ bool start_work_tile() {
        if (next_index_ < 0) return false;
        const Sizes& z = args_.params.sizes;
        const QueryTile tile = next_tile();
        keys_.batch = next_index_ / z.num_heads;
        keys_.head = next_index_ % z.num_heads / (z.num_heads / z.num_kv_heads);
        keys_.row = tile.k_row;
        keys_.len = tile.k_len;
        newest_ = num_key_tiles<T::kKeyTile>(tile) - 1;
        ++work_number_;
        prefetch_steps_done_ = 0;
        load_keys(newest_);
        return true;
    }

    // Loads the other tiles from the newest to the oldest, each K tile before the V tile that is one tile newer. With
    // tiles numbered from the newest, the order is K1 V0 K2 V1 ... Then it loads the newest K tile of the next work
    // tile, and after that the oldest V tile of this one. Returns false if there is no next work tile.
    //
    // With one Q slot (wide heads), it publishes the next work tile only after all these loads. The slot becomes free
    // when the consumers have computed S of the oldest K tile, or exit early. To get there, they need the oldest K tile
    // and all V tiles but the oldest, so a wait for the slot before these loads would never end.
    __device__ bool load_work_tile() {
        constexpr int kSteps = T::kWide ? kPrefetchSteps - 1 : kPrefetchSteps;
        // After an early exit another one is likely, so the prefetch begins at the first tile.
        const int last_tiles = ended_early_ ? newest_ : min(newest_, kPrefetchSteps);
        ended_early_ = false;
        int tile = newest_;
        for (; tile > 0; --tile) {
            prefetch_work_tile(min(last_tiles - tile + 1, kSteps));
            if (!load_keys(tile - 1)) break;
            load_values(keys_, tile);
        }
        prefetch_work_tile(kSteps);
        const KeyRange values = keys_;
        const bool more = start_work_tile();
        load_values(values, tile);
        if constexpr (T::kWide) publish_work_tile();
        return more;
    }

    // Waits until the consumers have released a K slot, and fills it. Returns false if the consumers need no older
    // keys; the slot then carries the end of keys instead of a tile.
    __device__ bool load_keys(int tile) {
        const auto place = KvPlace::of(k_uses_++);
        watch(control_.k.empty, place.previous_use());
        if (tile < newest_ && all_consumers_used_up(place.slot)) {
            send_end_of_keys(place);
            return false;
        }
        if constexpr (T::kGated) send_to_tail_loader(kGateLoader, place.slot, keys_, tile);
        if (load<T::kPanels>(0, shared_.k[place.slot], control_.k.full, args_.k, keys_, tile, place,
                             T::kKeyTile * 2 * T::kBiases))
            if constexpr (T::kBiases > 0)
                tma_load_5d(shared_.k_biases[place.slot], &args_.k_biases.map, &control_.k.full.barriers[place.slot],
                            T::kHeadDim, keys_.row + tile * T::kKeyTile, 0, 0,
                            args_.k_biases.heads(keys_.batch, keys_.head));
        return true;
    }
    __device__ void load_values(const KeyRange& values, int tile) {
        const auto place = KvPlace::of(v_uses_++);
        watch(control_.v.empty, place.previous_use());
        load<T::kValuePanels>(1, shared_.v[place.slot], control_.v.full, args_.v, values, tile, place);
    }

    // Whether every consumer warp reported that its warpgroup had stopped, when it released K slot `slot`.
    __device__ bool all_consumers_used_up(int slot) const {
        bool all = true;
        if (lane_ == 0)
            for (int warp = 0; warp < 4 * T::kWarpgroups; ++warp)
                all = all && control_.used_up_work[slot][warp] == work_number_;
        return __shfl_sync(~0u, all, 0);
    }

    // Hands over a K slot without a tile. The arrival on end_of_keys comes first, so consumers that have waited on
    // k.full can test it.
    __device__ void send_end_of_keys(const KvPlace& place) {
        ended_early_ = true;
        if (lane_ != 0) return;
        control_.end_of_keys.arrive(place);
        control_.k.full.arrive(place);
    }

    // Loads tile `tile` of the segment into a slot that the consumers have released. Returns whether this thread has
    // begun a load with TMA; `more` bytes must then follow.
    template <int kPanels>
    __device__ bool load(int loader, uint8_t* to, SlotBarriers<kKvStages>& full, const TensorMap& map,
                         const KeyRange& keys, int tile, const KvPlace& place, int more = 0) {
        const bool ends = keys.len - tile * T::kKeyTile < T::kKeyTile;
        if (ends) {
            send_to_tail_loader(loader, place.slot, keys, tile);
        } else if (lane_ == 0) {
            full.arrive_with_bytes(place, kPanels * T::kKeyPanelBytes + more);
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel)
                tma_load_5d(to + panel * T::kKeyPanelBytes, &map.map, &full.barriers[place.slot], 64 * panel,
                            keys.row + tile * T::kKeyTile, 0, 0, map.heads(keys.batch, keys.head));
        }
        return !ends && lane_ == 0;
    }
    // Sends a tail tile to its loader warp, after that warp has read the previous one. Slot -1 stops the loader.
    __device__ void send_to_tail_loader(int loader, int slot, const KeyRange& keys, int tile) {
        auto& ring = control_.tail_ring[loader];
        const Place<1> place = {0, tail_phases_ >> loader & 1};
        watch(ring.empty, place.previous_use());
        tail_phases_ ^= 1 << loader;
        if (lane_ != 0) return;
        const int count = max(keys.len - tile * T::kKeyTile, 0);
        control_.tail[loader] = {keys.batch, keys.head, keys.row + tile * T::kKeyTile, count, slot};
        ring.full.arrive(place);
    }

    typename T::Shared& shared_;
    ForwardControl<T>& control_;
    const ForwardArguments& args_;
    const int lane_;
    int num_tiles_;
    int prefetch_steps_done_ = 0;
    bool ended_early_ = false;
    // The next work tile.
    int ticket_ = 0;     // valid in lane 0
    int next_index_;     // batch * num_heads + head; -1 if there is no more work
    int next_word_ = 0;  // word lane_ % kTileWords of its QueryTile
    uint32_t num_published_ = 0;
    int work_number_ = -1, newest_;  // current work tile, and its newest key tile
    KeyRange keys_;
    uint32_t k_uses_ = 0, v_uses_ = 0;  // uses of the rings so far
    int tail_phases_ = 0;               // bit i: phase of the next tail tile of loader i
};

}  // namespace megatron_sb::hopper
