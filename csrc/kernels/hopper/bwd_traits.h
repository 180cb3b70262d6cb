// Sizes of the Hopper backward and what a thread block keeps in shared memory.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace megatron_sb::hopper {

constexpr int kBackwardKeys = 128;  // of a key tile: 64 for each of two consumer warpgroups
constexpr int kSubtileKeys = 64;
constexpr int kStepRows = 64;  // query rows of a step
constexpr int kStepStages = 3;
constexpr int kStepRing = 16;  // descriptions of steps: whoever reads one is less than that behind the loader
constexpr int kTurns = 4;      // steps whose additions to dq may be under way
constexpr int kPassed = 8;     // steps of which carries may be on their way to newer keys: more than ever are

constexpr int kMaxTileBuffers = 2, kMaxSlots = 3;

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
    int32_t k_row, tile_keys;  // of the key tile: its first row, and how many there are, 1 to 128
    int32_t unused[2];
};
constexpr int kFirstOfRows = 1;  // no older key tile adds to these rows
constexpr int kLastOfRows = 2;   // no newer one does
constexpr int kLastOfTile = 4;
constexpr int kNoMore = 8;      // instead of a step
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
    uint64_t step_full[kStepStages], step_empty[kStepStages];  // Q and dO, and the carries' places
    uint64_t carry_full[kStepStages];
    uint64_t passed_full[2][kPassed][4];  // by half of the tile, and warp: the carries of its 16 rows in `passed`
    uint64_t passed_empty[2][kPassed];
    uint64_t scanned_full[kMaxSlots], scanned_empty[kMaxSlots];  // A and dz
    uint64_t half_full[2], half_empty[2];  // d=128, by half: A and dz for its own products; A's place
    uint64_t turn[kTurns], added[kTurns], published[kTurns];
    uint64_t described[kStepRing], forgotten[kStepRing];
    Step steps[kStepRing];
    Carry carries[kStepStages][kStepRows];
    // Mass and prefix at the newer edge of each half: to the newer half, and to the next key tile.
    float2 passed[2][kPassed][kStepRows];
};

template <class Element_, int kHeadDim_>
struct BackwardTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static_assert(kHeadDim == 64 || kHeadDim == 128, "the tiles are laid out for these two");
    // d=64: two warpgroups scan and one adds up (bwd_split.cuh). d=128: two do both (bwd_consumer.cuh).
    static constexpr bool kSplit = kHeadDim == 64;
    static constexpr int kThreads = kSplit ? 512 : 384;
    static constexpr int kProducerRegisters = kSplit ? 32 : 40;
    static constexpr int kConsumerRegisters = kSplit ? 144 : 232, kSumRegisters = 192;
    static constexpr int kTileBuffers = kSplit ? 2 : 1;                           // of K and V
    static constexpr int kWeightSlots = kSplit ? 3 : 1, kSlots = kSplit ? 3 : 2;  // of A and dz
    static constexpr int kStepReaders = kSplit ? 12 : 8;                          // warps
    static constexpr int kHalves = kHeadDim / 64;            // a tile is stored by 64 columns of the head dimension
    static constexpr int kHalfBytes = 64 * 128;              // 64 rows of 64 columns
    static constexpr int kTileBytes = kHalves * kHalfBytes;  // 64 rows

    struct Shared {
        alignas(1024) uint8_t k[kTileBuffers][2][kTileBytes];
        alignas(1024) uint8_t v[kTileBuffers][2][kTileBytes];
        alignas(1024) uint8_t steps[kStepStages][2][kTileBytes];     // Q and dO
        alignas(1024) uint8_t weights[kWeightSlots][2][kHalfBytes];  // A of each half: 64 query rows by 64 keys
        alignas(1024) uint8_t dz[kSlots][2][kHalfBytes];
        BackwardControl control;
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more shared memory than a CTA can have");
};

}  // namespace megatron_sb::hopper
