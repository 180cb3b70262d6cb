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
    int32_t k_row, tile_keys;  // row of k of the first key of the tile; number of keys in the tile, at least 1
    int32_t part;              // of the key tile, if it has several (kPartialSums)
    float offset;              // of the logits of the head, in units of log(2)
};
constexpr int kOldestKeyTile = 1;  // the first key tile of the chain that adds to dq of these rows
constexpr int kNewestKeyTile = 2;  // the last one
constexpr int kLastStepOfTile = 4;
constexpr int kEndOfWork = 8;       // not a step: all work is done
constexpr int kMasked = 16;         // shifted left by the half (0 or 1): some row does not see all keys of that half
constexpr int kSlow = 64;           // a row of this step or of an older one starts in this tile, in newer keys or never
constexpr int kSlowNext = 128;      // the next step of this tile is slow
constexpr int kMaskedNext = 256;    // shifted left by the half: the next step is kMasked
constexpr int kPartialSums = 1024;  // the sums of dk and dv at the end of the tile are those of a part

// The carry of a row that a key tile receives: mass and prefix at the older edge of the tile, and where the row starts.
struct alignas(16) Carry {
    float mass, prefix;
    int32_t start;       // the half in which the row starts, counted from this tile's older half
    float restart_mass;  // mass at the newer edge of that half
};
// FastScan divides by masses, so a carried mass below this one, or 0, is replaced by it. The weights are then wrong by
// less than 2^-62. Rows that see no keys, or lie after the end of the step, have e = 0 and no weights.
constexpr float kLeastCarriedMass = 0x1p-126f;

// The barriers of the backward, with the number of threads that arrive on each. README.md says who arrives and waits.
template <class T>
struct BackwardBarriers {
    static constexpr int kScanWarps = 4 * T::kHalves;
    static constexpr int kSumWarps = T::kSumWarpgroups > 0 ? 4 * T::kSumWarpgroups : kScanWarps;
    static constexpr int kReaderWarps = 4 * (T::kHalves + T::kSumWarpgroups);  // of Q, dO and K
    // Of K and V. The sum warpgroups of the wide kernels stage dk and dv there with ordinary instructions, so each
    // thread arrives.
    static constexpr int kTileReaders = T::kWide ? kScanWarps + kSumWarps * 32 : kReaderWarps;
    static constexpr int kStepReaders = 32 + 32 + 1;  // CarryReader, Publisher, TurnThread or BulkAdder

    Ring<Wait::kKvFull, Wait::kKvEmpty, T::kTileBuffers, 1, kTileReaders> kv;
    Ring<Wait::kQdoFull, Wait::kQdoEmpty, T::kQdoStages, 1, kReaderWarps * 32> qdo;  // `empty` also frees carry_in
    Ring<Wait::kQdoFull, Wait::kQdoEmpty, 1, 1, 8> d_o;  // 256 columns, where qdo is for Q alone
    Event<Wait::kCarryInFull, T::kQdoStages, 32> carry_in_full;
    Event<Wait::kCarryOutFull, T::kCarryOutSlots, 8> carry_out_full[T::kHalves][4];  // of a half and a warp: 16 rows
    Event<Wait::kCarryOutEmpty, T::kCarryOutSlots, 128> older_carry_out_empty;
    Event<Wait::kCarryOutEmpty, T::kCarryOutSlots, 32> newer_carry_out_empty;
    Ring<Wait::kDzFull, Wait::kDzEmpty, T::kDzSlots, kScanWarps, kSumWarps> dz;  // also A, except at head_dim 128
    // head_dim 128: A and dz of a half, within its warpgroup
    Ring<Wait::kOwnHalfFull, Wait::kOwnHalfEmpty, 1, 128, 128> own_half[2];
    Event<Wait::kDqTurn, T::kDqTurns, 1> dq_turn;                                  // head_dim 128
    Event<Wait::kDqAdded, T::kDqTurns, kSumWarps> dq_added;                        // head_dim 128
    Event<Wait::kDqPublished, T::kDqTurns, 1> dq_published;                        // head_dim 128
    Ring<Wait::kDqStagedFull, Wait::kDqStagedEmpty, T::kDqSlots, 4, 1> dq_staged;  // not at head_dim 128
    Ring<Wait::kStepInfoFull, Wait::kStepInfoEmpty, kStepRing, 1, kStepReaders> steps;

    __device__ __forceinline__ SlotBarriers<T::kCarryOutSlots>& carry_out_empty(int half) {
        return half < T::kHalves - 1 ? static_cast<SlotBarriers<T::kCarryOutSlots>&>(older_carry_out_empty)
                                     : newer_carry_out_empty;
    }
    template <class Visit>
    __device__ void visit(const Visit& f) {
        kv.visit(f);
        qdo.visit(f);
        d_o.visit(f);
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

struct BackwardGates {
    GateTile<kHalfTileKeys> gates_of_half[2];  // written and read by the warpgroup that scans the half
    float gate_sums[2][4][kHalfTileKeys];      // of a half and a warp: sums of n over rows
};

// The bias columns of Q and K, and zeros after them in place of further columns (wgmma.cuh). The tiles are guarded by
// the rings of Q and K.
template <class T>
struct BackwardBiases {
    alignas(128) uint8_t q_biases[T::kQdoStages][kStepRows * kBiasRowBytes];
    alignas(128) uint8_t k_biases[T::kTileBuffers][T::kHalves][kHalfTileKeys * kBiasRowBytes];
    alignas(128) uint8_t zeros[kHalfTileKeys * kBiasRowBytes];
};

template <class T>
struct BackwardControl : NotedBarriers<BackwardBarriers<T>>, MembersIf<T::kGated, BackwardGates> {
    Step step_info[kStepRing];
    Carry carry_in[T::kQdoStages][kStepRows];
    // Mass and prefix at the newer edge of each half. The older half writes [0] for the newer half. The newer half
    // writes for the publisher, which sends it to the next newer key tile.
    float2 carry_out[T::kHalves][T::kCarryOutSlots][kStepRows];
};

template <class Element_, int kColumns, int kHeadDimV_, bool kGated_>
struct BackwardTraits {
    using Element = Element_;
    static constexpr int kBiases = kColumns % 16;                  // bias columns of Q and K: 8 or none
    static constexpr int kBiasSums = kBiases > 0 ? kStepRows : 0;  // of dz, in a step
    static constexpr int kHeadDim = kColumns - kBiases;            // their other columns
    static constexpr int kHeadDimV = kHeadDimV_;                   // columns of V
    static constexpr bool kGated = kGated_;                        // with forget gates
    static constexpr bool kWide = kHeadDim > 128;

    // Warpgroups beside the producers.
    //     64         two that scan, one that sums     bwd_consumer_d64.cuh
    //     96, 128    two that scan and sum            bwd_consumer_d128.cuh
    //     wide       one that scans, two that sum     bwd_consumer_wide.cuh
    static constexpr int kSumWarpgroups = kHeadDim == 64 ? 1 : kWide ? 2 : 0;
    static constexpr int kHalves = kWide ? 1 : 2;  // half tiles in a key tile, and warpgroups that scan
    static constexpr int kKeyTile = kHalves * kHalfTileKeys;
    static constexpr int kThreads = 128 * (1 + kHalves + kSumWarpgroups);
    static constexpr bool kAddsDqInBulk = kSumWarpgroups > 0;  // bwd_additions.cuh

    // Registers per thread: at launch, and then of each kind of warpgroup.
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kProducerRegisters = kSumWarpgroups > 0 ? 32 : 40;
    // With fewer than 208 for the sums of 72 columns, ptxas serialises their products.
    static constexpr int kConsumerRegisters = kWide ? 96 : kHeadDim != 64 ? 232 : kBiases > 0 ? 136 : 144;  // that scan
    static constexpr int kSumRegisters = kHeadDim == 64 && kBiases > 0 ? 208 : 192;
    static_assert(kProducerRegisters + kHalves * kConsumerRegisters + kSumWarpgroups * kSumRegisters <=
                      kThreads / 128 * kLaunchRegisters,
                  "all warpgroups together must not use more registers than the CTA has at launch");

    // Up to 96 columns, the scans have registers for the reciprocals of masses (bwd_scan.cuh), or with forget gates for
    // the sums of n of all keys of a thread (bwd_half_tile.cuh).
    static constexpr bool kKeepsReciprocals = kHeadDim < 128, kKeepsGateSums = kHeadDim < 128;

    static constexpr int kQdoStages = kWide ? 2 : 3;             // of Q and dO
    static constexpr int kTileBuffers = kHeadDim == 64 ? 2 : 1;  // of K and V
    static constexpr int kDzSlots = kHeadDim == 256 ? 1 : 2;     // of dz
    // With 128 columns and bias columns there is less shared memory.
    static constexpr int kCarryOutSlots = kHeadDim == 128 && kBiases > 0 ? (kGated ? 2 : 4) : 8;
    static constexpr int kWeightSlots = kSumWarpgroups > 0 ? kDzSlots : 1;  // of A
    // A tile is stored as panels of 64 columns of the head dimension. At 96, half of the second panel is zeros.
    static constexpr int kPanels = (kHeadDim + 63) / 64, kValuePanels = (kHeadDimV + 63) / 64;
    static constexpr int kPanelBytes = 64 * 128;  // 64 rows of 64 columns
    // 64 rows of all columns: of Q or K, and of dO or V.
    static constexpr int kTileBytes = kPanels * kPanelBytes, kValueTileBytes = kValuePanels * kPanelBytes;
    static constexpr int kStored = kPanels * 64 + kBiases;  // stored_columns()
    // At 256 columns there is room for one tile of dO only, with a ring of its own.
    static constexpr bool kSeparateDo = kHeadDim == 256;
    static constexpr int kStageBytes = kTileBytes + (kSeparateDo ? 0 : kValueTileBytes);

    // kDqSlots: slots for panels of dQ in shared memory. With bias columns there is room for one. kDqTurns: at head_dim
    // 128, how many steps have a turn to add to dq, or wait until their additions are published.
    static constexpr int kDqSlots = !kAddsDqInBulk || kBiases > 0 ? 1 : kHeadDim == 192 ? 3 : 2;
    static constexpr int kDqTurns = kAddsDqInBulk ? 1 : 8;
    // Of a panel of dQ and, with biases, the sums of dz. The array is unused at head_dim 128.
    static constexpr int kDqFloats = kAddsDqInBulk ? kStepRows * 64 + kBiasSums : 4;

    struct Shared : MembersIf<(kBiases > 0), BackwardBiases<BackwardTraits>> {
        alignas(1024) uint8_t k[kTileBuffers][kHalves][kTileBytes];
        alignas(1024) uint8_t v[kTileBuffers][kHalves][kValueTileBytes];
        alignas(1024) uint8_t qdo[kQdoStages][kStageBytes];  // Q, then dO
        // dO of 256 columns. With biases, the sums of dz over the keys of each half, guarded by the ring of dz.
        union {
            alignas(1024) uint8_t d_o[kSeparateDo ? kValueTileBytes : 16];
            float dz_sums[kDzSlots][kHalves][kBiases > 0 ? kStepRows : 1];
        };
        alignas(1024) uint8_t weights[kWeightSlots][kHalves][kPanelBytes];  // A of each half: 64 rows by 64 keys
        alignas(1024) uint8_t dz[kDzSlots][kHalves][kPanelBytes];
        alignas(128) float dq[kDqSlots][kDqFloats];
        BackwardControl<BackwardTraits> control;
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of a CTA must fit 227 KiB");
};

}  // namespace megatron_sb::hopper
