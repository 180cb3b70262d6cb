// Tiles and the shared-memory plan of the forward, by head dimension.
#pragma once

#include <cstdint>

#include "kernels/common/query_tiles.h"

namespace megatron_sb::hopper {

using portable::QueryTile;

constexpr int kKeyTile = 128;    // keys of a tile
constexpr int kRowBytes = 128;   // of a tile row under the 128-byte swizzle: 64 elements
constexpr int kStages = 2;       // of the rings of K and V tiles
constexpr int kQueryStages = 3;  // queries come from memory, not from the cache: they are sent for a work tile earlier
constexpr int kMaxWarpgroups = 3;
constexpr int kEdgeLoaders = 2;  // warps

// A work tile as the consumers need it: query rows of one head.
struct WorkTile {
    QueryTile queries;  // num_rows 0: there is no more work
    int32_t batch, head;
};

// A tile of K or V for an edge loader: `count` rows of head `head` of batch element `batch` from `row` on, then zeros.
struct alignas(32) EdgeTile {
    int32_t batch, head, row, count;
    int32_t slot;  // -1: there are no more
};

struct Control {
    uint64_t q_full[kQueryStages], q_empty[kQueryStages];
    uint64_t k_full[kStages], k_empty[kStages];
    uint64_t v_full[kStages], v_empty[kStages];
    WorkTile work[kQueryStages];  // ordered by q_full and q_empty, as the query tiles are
    uint64_t edge_full[kEdgeLoaders], edge_empty[kEdgeLoaders];
    EdgeTile edge[kEdgeLoaders];  // ordered by those two; the first loader has the keys, the second the values
    // Early exit. A warp says in turns in `spent[0]` and `spent[1]` whether its rows are used up; the warpgroup stops
    // when all of its warps are. From then on each of them writes the number of the work tile before it gives back a K
    // slot; when all warpgroups do, the producer ends the work tile with a K slot that holds no tile, and lets that
    // slot's `k_end` complete a phase before its `k_full`.
    int4 spent[2][kMaxWarpgroups];
    int32_t used_up_in[kStages][4 * kMaxWarpgroups];
    uint64_t k_end[kStages];
};

template <class Element_, int kHeadDim_>
struct Traits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static_assert(kHeadDim == 64 || kHeadDim == 128, "the tiles are laid out for these two");
    // d=64: fewer registers of output, so three warpgroups share a K/V tile.
    static constexpr int kWarpgroups = kHeadDim == 128 ? 2 : 3;
    static constexpr int kThreads = 128 * (kWarpgroups + 1);
    // The CTA starts with its share of the register file; what the consumers take the producer must have given, or
    // they wait for ever.
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
    static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <= (kWarpgroups + 1) * kLaunchRegisters,
                  "the consumers take more registers than the producer gives");

    static constexpr int kQueryTile = 64 * kWarpgroups;
    static constexpr int kHalves = kHeadDim / 64;  // a tile is stored by 64 columns of the head dimension
    static constexpr int kQueryHalfBytes = kQueryTile * kRowBytes, kKeyHalfBytes = kKeyTile * kRowBytes;
    static constexpr int kQueryBytes = kHalves * kQueryHalfBytes, kKeyBytes = kHalves * kKeyHalfBytes;

    struct Shared {
        alignas(1024) uint8_t q[kQueryStages][kQueryBytes];
        alignas(1024) uint8_t k[kStages][kKeyBytes];
        alignas(1024) uint8_t v[kStages][kKeyBytes];
        Control control;
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more shared memory than a CTA can have");
};

}  // namespace megatron_sb::hopper
