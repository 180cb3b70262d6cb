// Register budgets and the shared-memory plan of the backward.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "kernels/hopper/bwd_tiles.h"
#include "kernels/hopper/gates.cuh"
#include "kernels/hopper/ring.cuh"

namespace megatron_sb::hopper {

// Slots for step descriptions. The step loader waits on steps.empty before it overwrites one, but consumers do not
// arrive there. They still read in time: the loader also waits on qdo.empty, on which a consumer arrives at most one
// step before its last use of the description. So the loader is at most T::kQdoStages + 1 steps ahead.
constexpr int kStepRing = 16;
constexpr int kCarryOutSlots = 8;

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

// The barriers of the backward, with the number of threads that arrive on each. README.md says who arrives and waits.
template <class T>
struct BackwardBarriers {
    static constexpr int kScanWarps = 8, kSumWarps = T::kHasSumWarpgroup ? 4 : kScanWarps;
    static constexpr int kReaderWarps = T::kHasSumWarpgroup ? kScanWarps + kSumWarps : kScanWarps;  // of Q, dO and K
    static constexpr int kStepReaders = 32 + 32 + 1;  // CarryReader, Publisher, TurnThread or BulkAdder

    Ring<Wait::kKvFull, Wait::kKvEmpty, T::kTileBuffers, 1, kReaderWarps> kv;
    Ring<Wait::kQdoFull, Wait::kQdoEmpty, T::kQdoStages, 1, kReaderWarps * 32> qdo;  // `empty` also frees carry_in
    Event<Wait::kCarryInFull, T::kQdoStages, 32> carry_in_full;
    Event<Wait::kCarryOutFull, kCarryOutSlots, 8> carry_out_full[2][4];  // of a half, and of a warp: its 16 rows
    Event<Wait::kCarryOutEmpty, kCarryOutSlots, 128> older_carry_out_empty;
    Event<Wait::kCarryOutEmpty, kCarryOutSlots, 32> newer_carry_out_empty;
    Ring<Wait::kDzFull, Wait::kDzEmpty, T::kDzSlots, kScanWarps, kSumWarps> dz;  // at head_dim 64 also A
    // head_dim 128: A and dz of a half, within its warpgroup
    Ring<Wait::kOwnHalfFull, Wait::kOwnHalfEmpty, 1, 128, 128> own_half[2];
    Event<Wait::kDqTurn, T::kDqTurns, 1> dq_turn;
    Event<Wait::kDqAdded, T::kDqTurns, kSumWarps> dq_added;                        // head_dim 128
    Event<Wait::kDqPublished, T::kDqTurns, 1> dq_published;                        // head_dim 128
    Ring<Wait::kDqStagedFull, Wait::kDqStagedEmpty, T::kDqSlots, 4, 1> dq_staged;  // head_dim 64
    Ring<Wait::kStepInfoFull, Wait::kStepInfoEmpty, kStepRing, 1, kStepReaders> steps;

    __device__ __forceinline__ SlotBarriers<kCarryOutSlots>& carry_out_empty(int half) {
        return half == 0 ? static_cast<SlotBarriers<kCarryOutSlots>&>(older_carry_out_empty) : newer_carry_out_empty;
    }
    template <class Visit>
    __device__ void visit(const Visit& f) {
        kv.visit(f);
        qdo.visit(f);
        f(carry_in_full);
        for (auto& half : carry_out_full)
            for (auto& warp : half) f(warp);
        f(older_carry_out_empty);
        f(newer_carry_out_empty);
        dz.visit(f);
        for (auto& half : own_half) half.visit(f);
        f(dq_turn);
        f(dq_added);
        f(dq_published);
        dq_staged.visit(f);
        steps.visit(f);
    }
};

template <bool kGated>
struct BackwardGates {
    GateTile<kHalfTileKeys> gates_of_half[2];  // written and read by the warpgroup that scans the half
    float gate_sums[2][4][kHalfTileKeys];      // of a half and a warp: sums of n over rows
};
template <>
struct BackwardGates<false> {};

template <class T>
struct BackwardControl : NotedBarriers<BackwardBarriers<T>>, BackwardGates<T::kGated> {
    Step step_info[kStepRing];
    Carry carry_in[T::kQdoStages][kStepRows];
    // Mass and prefix at the newer edge of each half. The older half writes [0] for the newer half. The newer half
    // writes [1] for the publisher, which sends it to the next newer key tile.
    float2 carry_out[2][kCarryOutSlots][kStepRows];
};

template <class Element_, int kHeadDim_, bool kGated_>
struct BackwardTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kGated = kGated_;  // with forget gates
    static_assert(kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128, "head_dim must be 64, 96 or 128");
    // At head_dim 64, two warpgroups scan and a third one sums (bwd_consumer_d64.cuh). At head_dim 96 and 128, two
    // warpgroups scan and sum (bwd_consumer_d128.cuh).
    static constexpr bool kHasSumWarpgroup = kHeadDim == 64;
    static constexpr bool kAddsDqInBulk = kHasSumWarpgroup;  // bwd_additions.cuh
    static constexpr int kThreads = kHasSumWarpgroup ? 512 : 384;
    static constexpr int kProducerRegisters = kHasSumWarpgroup ? 32 : 40;
    static constexpr int kConsumerRegisters = kHasSumWarpgroup ? 144 : 232, kSumRegisters = 192;
    static constexpr int kQdoStages = 3;                                         // of Q and dO
    static constexpr int kTileBuffers = kHasSumWarpgroup ? 2 : 1;                // of K and V
    static constexpr int kWeightSlots = kHasSumWarpgroup ? 2 : 1, kDzSlots = 2;  // of A and dz
    // At head_dim 64, steps of dQ in shared memory, on their way to dq. Only the steps of the newest key tiles have a
    // turn. At head_dim 128, steps that have a turn to add to dq, or wait until their additions are published.
    static constexpr int kDqSlots = kHasSumWarpgroup ? 2 : 1, kDqTurns = kHasSumWarpgroup ? 1 : 8;
    static constexpr int kDqFloats = kHasSumWarpgroup ? kStepRows * 64 : 4;  // of a slot; at head_dim 128 unused
    // A tile is stored as panels of 64 columns of the head dimension. At 96, half of the second panel is zeros.
    static constexpr int kPanels = (kHeadDim + 63) / 64;
    static constexpr int kPanelBytes = 64 * 128;              // 64 rows of 64 columns
    static constexpr int kTileBytes = kPanels * kPanelBytes;  // 64 rows of all columns

    struct Shared {
        alignas(1024) uint8_t k[kTileBuffers][2][kTileBytes];
        alignas(1024) uint8_t v[kTileBuffers][2][kTileBytes];
        alignas(1024) uint8_t qdo[kQdoStages][2][kTileBytes];         // Q and dO
        alignas(1024) uint8_t weights[kWeightSlots][2][kPanelBytes];  // A of each half: 64 query rows by 64 keys
        alignas(1024) uint8_t dz[kDzSlots][2][kPanelBytes];
        alignas(128) float dq[kDqSlots][kDqFloats];
        BackwardControl<BackwardTraits> control;
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of a CTA must fit 227 KiB");
};

}  // namespace megatron_sb::hopper
