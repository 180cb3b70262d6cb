// Register budgets and the shared-memory plan of the backward.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "kernels/hopper/bwd_tiles.h"
#include "kernels/hopper/wait.cuh"

namespace megatron_sb::hopper {

constexpr int kQdoStages = 3;
// Slots for step descriptions. The step loader waits on step_info_empty before it overwrites one, but consumers do not
// arrive there. They still read in time: the loader also waits on qdo_empty, on which a consumer arrives at most one
// step before its last use of the description. So the loader is at most kQdoStages + 1 steps ahead.
constexpr int kStepRing = 16;
constexpr int kDqTurns = 8;  // steps that have a turn to add to dq, or wait until their additions are published
constexpr int kCarryOutSlots = 8;

constexpr int kMaxTileBuffers = 2, kMaxDzSlots = 3;

// A step: up to 64 query rows of one head against one key tile.
struct alignas(16) Step {
    int64_t row_index;  // index of the first query row in a tensor (batch, head, row)
    int32_t dq_index;   // index of this step in BackwardPlan::dq and dq_next_tile
    int32_t flags;
    int32_t visible;   // keys of this tile that row 0 sees, without clamping; row r sees `visible + r`
    int32_t num_keys;  // keys of this tile that belong to the segment
    int32_t num_rows;  // 1 to 64
    int32_t tile;      // number of the key tile in its key range
    int32_t row;       // first query row, counted within its head
    int32_t batch, head, kv_head;
    int32_t k_row, tile_keys;  // row of k of the first key of the tile; number of keys in the tile (1 to 128)
    int32_t part;              // of the key tile, if it has several (kPartialSums)
    int32_t unused;
};
constexpr int kOldestKeyTile = 1;  // the first key tile of the chain that adds to dq of these rows
constexpr int kNewestKeyTile = 2;  // the last one; it writes dq
constexpr int kLastStepOfTile = 4;
constexpr int kEndOfWork = 8;      // not a step: all work is done
constexpr int kMasked = 16;        // shifted left by the half (0 or 1): some row does not see all keys of that half
constexpr int kSlow = 64;          // some row starts in this tile, in newer keys, or never
constexpr int kSlowNext = 128;     // the next step of this tile is slow
constexpr int kPartialSums = 256;  // the sums of dk and dv at the end of the tile are those of a part

// The carry of a row that a key tile receives: mass and prefix at the older edge of the tile, and where the row starts.
struct alignas(16) Carry {
    float mass, prefix;
    int32_t start;       // the half in which the row starts, counted from this tile's older half
    float restart_mass;  // mass at the newer edge of that half
};

struct BackwardBarriers {
    uint64_t kv_full[kMaxTileBuffers], kv_empty[kMaxTileBuffers];
    uint64_t qdo_full[kQdoStages], qdo_empty[kQdoStages];  // Q and dO; qdo_empty also frees carry_in
    uint64_t carry_in_full[kQdoStages];
    // Indices: half, slot, warp of the half. A warp signals the 16 rows of carry_out that it wrote.
    uint64_t carry_out_full[2][kCarryOutSlots][4];
    uint64_t carry_out_empty[2][kCarryOutSlots];
    uint64_t dz_full[kMaxDzSlots], dz_empty[kMaxDzSlots];  // dz; at head_dim 64 also A
    uint64_t own_half_full[2], own_half_empty[2];          // head_dim 128: A and dz of a half, within its warpgroup
    uint64_t dq_turn[kDqTurns], dq_added[kDqTurns], dq_published[kDqTurns];
    uint64_t step_info_full[kStepRing], step_info_empty[kStepRing];
};
template <class Visit>
__device__ void visit_barriers(BackwardBarriers& b, const Visit& visit) {
    visit_each(Wait::kKvFull, b.kv_full, visit);
    visit_each(Wait::kKvEmpty, b.kv_empty, visit);
    visit_each(Wait::kQdoFull, b.qdo_full, visit);
    visit_each(Wait::kQdoEmpty, b.qdo_empty, visit);
    visit_each(Wait::kCarryInFull, b.carry_in_full, visit);
    visit_each(Wait::kCarryOutFull, b.carry_out_full, visit);
    visit_each(Wait::kCarryOutEmpty, b.carry_out_empty, visit);
    visit_each(Wait::kDzFull, b.dz_full, visit);
    visit_each(Wait::kDzEmpty, b.dz_empty, visit);
    visit_each(Wait::kOwnHalfFull, b.own_half_full, visit);
    visit_each(Wait::kOwnHalfEmpty, b.own_half_empty, visit);
    visit_each(Wait::kDqTurn, b.dq_turn, visit);
    visit_each(Wait::kDqAdded, b.dq_added, visit);
    visit_each(Wait::kDqPublished, b.dq_published, visit);
    visit_each(Wait::kStepInfoFull, b.step_info_full, visit);
    visit_each(Wait::kStepInfoEmpty, b.step_info_empty, visit);
}

struct BackwardControl : NotedBarriers<BackwardBarriers> {
    Step step_info[kStepRing];
    Carry carry_in[kQdoStages][kStepRows];
    // Mass and prefix at the newer edge of each half. The older half writes [0] for the newer half. The newer half
    // writes [1] for the publisher, which sends it to the next newer key tile.
    float2 carry_out[2][kCarryOutSlots][kStepRows];
};

template <class Element_, int kHeadDim_>
struct BackwardTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static_assert(kHeadDim == 64 || kHeadDim == 128, "head_dim must be 64 or 128");
    // At head_dim 64, two warpgroups scan and a third one sums (bwd_consumer_d64.cuh). At head_dim 128, two warpgroups
    // scan and sum (bwd_consumer_d128.cuh).
    static constexpr bool kHasSumWarpgroup = kHeadDim == 64;
    static constexpr int kThreads = kHasSumWarpgroup ? 512 : 384;
    static constexpr int kProducerRegisters = kHasSumWarpgroup ? 32 : 40;
    static constexpr int kConsumerRegisters = kHasSumWarpgroup ? 144 : 232, kSumRegisters = 192;
    static constexpr int kTileBuffers = kHasSumWarpgroup ? 2 : 1;                                       // of K and V
    static constexpr int kWeightSlots = kHasSumWarpgroup ? 3 : 1, kDzSlots = kHasSumWarpgroup ? 3 : 2;  // of A and dz
    static constexpr int kReaderWarps = kHasSumWarpgroup ? 12 : 8;  // consumer warps: all read Q, dO and K
    static constexpr int kPanels = kHeadDim / 64;  // a tile is stored as panels of 64 columns of the head dimension
    static constexpr int kPanelBytes = 64 * 128;   // 64 rows of 64 columns
    static constexpr int kTileBytes = kPanels * kPanelBytes;  // 64 rows of all columns

    struct Shared {
        alignas(1024) uint8_t k[kTileBuffers][2][kTileBytes];
        alignas(1024) uint8_t v[kTileBuffers][2][kTileBytes];
        alignas(1024) uint8_t qdo[kQdoStages][2][kTileBytes];         // Q and dO
        alignas(1024) uint8_t weights[kWeightSlots][2][kPanelBytes];  // A of each half: 64 query rows by 64 keys
        alignas(1024) uint8_t dz[kDzSlots][2][kPanelBytes];
        BackwardControl control;
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of a CTA must fit 227 KiB");
};

}  // namespace megatron_sb::hopper
