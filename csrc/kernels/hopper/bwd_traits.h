// Sizes of the Hopper backward and what a thread block keeps in shared memory.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace megatron_sb::hopper {

constexpr int kBackwardKeyTile = 128;  // of a key tile: 64 for each of two consumer warpgroups
constexpr int kHalfTileKeys = 64;
constexpr int kStepRows = 64;  // query rows of a step
constexpr int kQdoStages = 3;
constexpr int kStepRing = 16;      // descriptions of steps: whoever reads one is less than that behind the loader
constexpr int kDqTurns = 4;        // steps whose additions to dq may be under way
constexpr int kCarryOutSlots = 8;  // steps of which carries may be on their way to newer keys: more than ever are

constexpr int kMaxTileBuffers = 2, kMaxDzSlots = 3;

// Query rows of one head against one key tile.
struct alignas(16) Step {
    int64_t first_row;  // the place of the first query row in tensors (batch, head, row)
    int32_t sum;        // the place of its dq in those of all heads (bwd_plan.h)
    int32_t flags;
    int32_t visible;   // keys of this tile that the first row sees, and one more for each row after it; may be < 0
    int32_t num_keys;  // keys of this tile that the segment has
    int32_t num_rows;  // 1 to 64
    int32_t tile;      // number of the key tile in its run
    int32_t row;       // the first query row in its head
    int32_t batch, head, kv_head;
    int32_t k_row, tile_keys;  // of the key tile: its first row, and how many has_row are, 1 to 128
    int32_t unused[2];
};
constexpr int kOldestKeyTile = 1;  // no older key tile accumulates_gradients to these rows
constexpr int kNewestKeyTile = 2;  // no newer one does
constexpr int kLastStepOfTile = 4;
constexpr int kEndOfWork = 8;   // instead of a step
constexpr int kMasked = 16;     // shifted left by the half of the tile: some row does not see all of its keys
constexpr int kSlow = 64;       // some row may start in this tile, or in newer keys, or never
constexpr int kSlowNext = 128;  // the next step of this tile is slow

// A row's carry as it comes to a key tile: at the tile's older edge, or where it starts.
struct alignas(16) Carry {
    float mass, prefix;
    int32_t start;  // the half of a tile in which the row starts, counted from this tile's older half
    float restart_mass;
};

struct BackwardControl {
    uint64_t kv_full[kMaxTileBuffers], kv_empty[kMaxTileBuffers];
    uint64_t qdo_full[kQdoStages], qdo_empty[kQdoStages];  // Q and dO, and the carries' tile_offsets
    uint64_t carry_in_full[kQdoStages];
    uint64_t carry_out_full[2][kCarryOutSlots]
                           [4];  // by half of the tile, and warp: the carries of its 16 rows in `carry_out`
    uint64_t carry_out_empty[2][kCarryOutSlots];
    uint64_t dz_full[kMaxDzSlots], dz_empty[kMaxDzSlots];  // A and dz
    uint64_t own_half_full[2], own_half_empty[2];          // d=128, by half: A and dz for its own products; A's place
    uint64_t dq_turn[kDqTurns], dq_added[kDqTurns], dq_published[kDqTurns];
    uint64_t step_info_full[kStepRing], step_info_empty[kStepRing];
    Step step_info[kStepRing];
    Carry carry_in[kQdoStages][kStepRows];
    // Mass and prefix at the newer edge of each half: to the newer half, and to the next key tile.
    float2 carry_out[2][kCarryOutSlots][kStepRows];
};

template <class Element_, int kHeadDim_>
struct BackwardTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static_assert(kHeadDim == 64 || kHeadDim == 128, "the tiles are laid out for these two");
    // d=64: two warpgroups scan and one accumulates_gradients up (bwd_consumer_d64.cuh). d=128: two do both
    // (bwd_consumer_d128.cuh).
    static constexpr bool kHasSumWarpgroup = kHeadDim == 64;
    static constexpr int kThreads = kHasSumWarpgroup ? 512 : 384;
    static constexpr int kProducerRegisters = kHasSumWarpgroup ? 32 : 40;
    static constexpr int kConsumerRegisters = kHasSumWarpgroup ? 144 : 232, kSumRegisters = 192;
    static constexpr int kTileBuffers = kHasSumWarpgroup ? 2 : 1;                                       // of K and V
    static constexpr int kWeightSlots = kHasSumWarpgroup ? 3 : 1, kDzSlots = kHasSumWarpgroup ? 3 : 2;  // of A and dz
    static constexpr int kReaderWarps = kHasSumWarpgroup ? 12 : 8;                                      // warps
    static constexpr int kPanels = kHeadDim / 64;             // a tile is stored by 64 columns of the head dimension
    static constexpr int kPanelBytes = 64 * 128;              // 64 rows of 64 columns
    static constexpr int kTileBytes = kPanels * kPanelBytes;  // 64 rows

    struct Shared {
        alignas(1024) uint8_t k[kTileBuffers][2][kTileBytes];
        alignas(1024) uint8_t v[kTileBuffers][2][kTileBytes];
        alignas(1024) uint8_t qdo[kQdoStages][2][kTileBytes];         // Q and dO
        alignas(1024) uint8_t weights[kWeightSlots][2][kPanelBytes];  // A of each half: 64 query rows by 64 keys
        alignas(1024) uint8_t dz[kDzSlots][2][kPanelBytes];
        BackwardControl control;
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more shared memory than a CTA can have");
};

}  // namespace megatron_sb::hopper
