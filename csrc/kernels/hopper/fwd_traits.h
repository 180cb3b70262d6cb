// Tiles and the shared-memory plan of the forward, by head dimension.
#pragma once

#include <cstdint>

#include "kernels/common/query_tiles.h"

namespace megatron_sb::hopper {

using portable::QueryTile;

constexpr int kKeyTile = 128;    // keys of a tile
constexpr int kRowBytes = 128;   // of a tile row under the 128-byte swizzle: 64 elements
constexpr int kKvStages = 2;     // of the rings of K and V tiles
constexpr int kQueryStages = 3;  // queries come from memory, not from the cache: they are sent for a work tile earlier
constexpr int kMaxWarpgroups = 3;
constexpr int kTailLoaders = 2;  // warps

// A work tile as the consumers need it: query rows of one head.
struct WorkTile {
    QueryTile queries;  // num_rows 0: there is no more work
    int32_t batch, head;
};

// A tile of K or V for an edge loader: `count` rows of head `head` of batch element `batch` from `row` on, then zeros.
struct alignas(32) TailTile {
    int32_t batch, head, row, count;
    int32_t slot;  // -1: there are no more
};

struct ForwardControl {
    uint64_t q_full[kQueryStages], q_empty[kQueryStages];
    uint64_t k_full[kKvStages], k_empty[kKvStages];
    uint64_t v_full[kKvStages], v_empty[kKvStages];
    WorkTile work[kQueryStages];  // ordered by q_full and q_empty, as the query tiles are
    uint64_t tail_full[kTailLoaders], tail_empty[kTailLoaders];
    TailTile tail[kTailLoaders];  // ordered by those two; the first loader has the keys, the second the values
    // Early exit. A warp says in turns in `used_up_votes[0]` and `used_up_votes[1]` whether its rows are used up; the
    // warpgroup stops when all of its warps are. From then on each of them writes the number of the work tile before it
    // gives back a K slot; when all warpgroups do, the producer ends the work tile with a K slot that holds no tile,
    // and lets that slot's `end_of_keys` complete a phase before its `k_full`.
    int4 used_up_votes[2][kMaxWarpgroups];
    int32_t used_up_work[kKvStages][4 * kMaxWarpgroups];
    uint64_t end_of_keys[kKvStages];
};

template <class Element_, int kHeadDim_>
struct ForwardTraits {
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
    static constexpr int kPanels = kHeadDim / 64;  // a tile is stored by 64 columns of the head dimension
    static constexpr int kQueryPanelBytes = kQueryTile * kRowBytes, kKeyPanelBytes = kKeyTile * kRowBytes;
    static constexpr int kQueryBytes = kPanels * kQueryPanelBytes, kKeyBytes = kPanels * kKeyPanelBytes;

    struct Shared {
        alignas(1024) uint8_t q[kQueryStages][kQueryBytes];
        alignas(1024) uint8_t k[kKvStages][kKeyBytes];
        alignas(1024) uint8_t v[kKvStages][kKeyBytes];
        ForwardControl control;
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more shared memory than a CTA can have");
};

}  // namespace megatron_sb::hopper
