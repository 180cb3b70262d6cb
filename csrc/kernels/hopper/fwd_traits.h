// Tile sizes, register budgets and the shared-memory plan of the forward, for each head dimension.
#pragma once

#include <cstdint>

#include "kernels/common/query_tiles.h"
#include "kernels/hopper/wait.cuh"

namespace megatron_sb::hopper {

using common::QueryTile;

constexpr int kKeyTile = 128;    // keys in a tile of K or V
constexpr int kRowBytes = 128;   // bytes of a row in shared memory: 64 elements, the width of the 128-byte swizzle
constexpr int kKvStages = 2;     // slots in the ring of K tiles, and in the ring of V tiles
constexpr int kQueryStages = 3;  // slots for Q tiles; Q comes from HBM, so it is loaded one work tile earlier
constexpr int kMaxWarpgroups = 3;
constexpr int kTailLoaders = 2;  // warps: one loads tail tiles of K, the other those of V

// What the consumers know about a work tile: a tile of query rows of one head.
struct WorkTile {
    QueryTile queries;  // num_rows = 0 means that there is no more work
    int32_t batch, head;
};

// A tail tile is the tile of K or V in which a segment ends. It holds `count` rows of head `head` of batch element
// `batch`, from `row` on, followed by rows of zeros.
struct alignas(32) TailTile {
    int32_t batch, head, row, count;
    int32_t slot;  // slot of the ring to load into; -1 means that there are no more tail tiles
};

// Barriers and messages. The writer of a slot waits on `empty`, writes, and arrives on `full`. The reader waits on
// `full`, reads, and arrives on `empty`. README.md lists for each barrier who arrives and who waits.
struct ForwardBarriers {
    uint64_t q_full[kQueryStages], q_empty[kQueryStages];
    uint64_t k_full[kKvStages], k_empty[kKvStages];
    uint64_t v_full[kKvStages], v_empty[kKvStages];
    uint64_t tail_full[kTailLoaders], tail_empty[kTailLoaders];
    uint64_t end_of_keys[kKvStages];
    uint64_t finished;  // each consumer warp arrives at its end; the producer waits
};
template <class Visit>
__device__ void visit_barriers(ForwardBarriers& b, const Visit& visit) {
    visit_each(Wait::kQFull, b.q_full, visit);
    visit_each(Wait::kQEmpty, b.q_empty, visit);
    visit_each(Wait::kKFull, b.k_full, visit);
    visit_each(Wait::kKEmpty, b.k_empty, visit);
    visit_each(Wait::kVFull, b.v_full, visit);
    visit_each(Wait::kVEmpty, b.v_empty, visit);
    visit_each(Wait::kTailFull, b.tail_full, visit);
    visit_each(Wait::kTailEmpty, b.tail_empty, visit);
}

struct ForwardControl : NotedBarriers<ForwardBarriers> {
    WorkTile work[kQueryStages];  // guarded by q_full and q_empty, like the Q tile of the same slot
    TailTile tail[kTailLoaders];  // guarded by tail_full and tail_empty; [0] is for K, [1] for V
    // Early exit. The warps of a consumer warpgroup vote in used_up_votes[0] and [1] alternately: "the mass of all my
    // rows is below the threshold". If all four agree, the warpgroup stops computing. From then on, each of its warps
    // writes the number of the work tile to used_up_work[slot] before it releases a K slot. When the producer finds
    // this number from every consumer warp in the slot that it is about to fill, it ends the work tile: it arrives on
    // end_of_keys[slot] and then, without a tile, on k_full[slot]. Consumers wait on k_full and then test end_of_keys.
    int4 used_up_votes[2][kMaxWarpgroups];
    int32_t used_up_work[kKvStages][4 * kMaxWarpgroups];
};

template <class Element_, int kHeadDim_>
struct ForwardTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static_assert(kHeadDim == 64 || kHeadDim == 128, "head_dim must be 64 or 128");
    // At head_dim 64 the output needs fewer registers, so three consumer warpgroups share a K/V tile.
    static constexpr int kWarpgroups = kHeadDim == 128 ? 2 : 3;
    static constexpr int kThreads = 128 * (kWarpgroups + 1);
    // Registers per thread at launch. The consumers can take only what warpgroup 0 has given back. If they ask for
    // more, setmaxnreg waits forever.
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
    static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <= (kWarpgroups + 1) * kLaunchRegisters,
                  "all warpgroups together must not use more registers than the CTA has at launch");

    static constexpr int kQueryTile = 64 * kWarpgroups;
    static constexpr int kPanels = kHeadDim / 64;  // a tile is stored as panels of 64 columns of the head dimension
    static constexpr int kQueryPanelBytes = kQueryTile * kRowBytes, kKeyPanelBytes = kKeyTile * kRowBytes;
    static constexpr int kQueryBytes = kPanels * kQueryPanelBytes, kKeyBytes = kPanels * kKeyPanelBytes;

    struct Shared {
        alignas(1024) uint8_t q[kQueryStages][kQueryBytes];
        alignas(1024) uint8_t k[kKvStages][kKeyBytes];
        alignas(1024) uint8_t v[kKvStages][kKeyBytes];
        ForwardControl control;
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of a CTA must fit 227 KiB");
};

}  // namespace megatron_sb::hopper
