// Tile sizes, register budgets and the shared-memory plan of the forward, for each number of columns.
#pragma once

#include <cstdint>

#include "kernels/common/query_tiles.h"
#include "kernels/hopper/gates.cuh"
#include "kernels/hopper/ring.cuh"

namespace megatron_sb::hopper {

using common::QueryTile;

constexpr int kRowBytes = 128;  // bytes of a row in shared memory: 64 elements, the width of the 128-byte swizzle
constexpr int kKvStages = 2;    // slots in the ring of K tiles, and in the ring of V tiles
constexpr int kMaxWarpgroups = 3;
constexpr int kGateStages = 4;  // slots for the gates of a K tile
constexpr int kGateLoader = 2;  // the warp that loads gates; it has a tail ring of its own

// What the consumers know about a work tile: a tile of query rows of one head.
struct WorkTile {
    QueryTile queries;  // num_rows = 0 means that there is no more work
    int32_t batch, head;
    float offset;  // of the logits, in units of log(2)
};

// A tail tile is the tile of K or V in which a segment ends. It holds `count` rows of head `head` of batch element
// `batch`, from `row` on, followed by rows of zeros.
struct alignas(32) TailTile {
    int32_t batch, head, row, count;
    int32_t slot;  // slot of the ring to load into; -1 means that there are no more tail tiles
};

// The barriers of the forward, with the number of threads that arrive on each. README.md says who arrives and waits.
template <class T>
struct ForwardBarriers {
    static constexpr int kConsumers = 128 * T::kWarpgroups, kConsumerWarps = 4 * T::kWarpgroups;

    Ring<Wait::kQFull, Wait::kQEmpty, T::kQueryStages, 2, kConsumers> q;  // `full`: once for `work`, once for Q
    Ring<Wait::kKFull, Wait::kKEmpty, kKvStages, 1, kConsumerWarps> k;
    Ring<Wait::kVFull, Wait::kVEmpty, kKvStages, 1, kConsumerWarps> v;
    Ring<Wait::kTailFull, Wait::kTailEmpty, 1, 1, 32> tail_ring[T::kLoaders];
    Ring<Wait::kGates, Wait::kGates, kGateStages, 32, kConsumers> gates;  // with forget gates
    Event<Wait::kNone, kKvStages, 1> end_of_keys;                         // tested, never awaited
    Event<Wait::kFinished, 1, kConsumers> finished;

    template <class Visit>
    __device__ void visit(const Visit& f) {
        q.visit(f);
        k.visit(f);
        v.visit(f);
        for (auto& loader : tail_ring) loader.visit(f);
        gates.visit(f);
        f(end_of_keys);
        f(finished);
    }
};

template <class T>
struct ForwardGates {
    GateTile<T::kKeyTile> gates_of_slot[kGateStages];  // guarded by the ring of gates
};

// Wide heads: each consumer warp stages its 16 rows of the output here, a panel of 64 columns at a time.
template <class T>
struct StagedOutput {
    alignas(1024) uint8_t o[4 * T::kWarpgroups][16 * kRowBytes];
};

// The bias columns of Q and K (hopper.h), and zeros after them in place of further columns (wgmma.cuh). The tiles are
// guarded by the rings of Q and K.
template <class T>
struct ForwardBiases {
    alignas(128) uint8_t q_biases[T::kQueryStages][T::kQueryTile * kBiasRowBytes];
    alignas(128) uint8_t k_biases[kKvStages][T::kKeyTile * kBiasRowBytes];
    alignas(128) uint8_t zeros[T::kKeyTile * kBiasRowBytes];
};

template <class T>
struct ForwardControl : NotedBarriers<ForwardBarriers<T>>, MembersIf<T::kGated, ForwardGates<T>> {
    WorkTile work[T::kWorkSlots];  // guarded by the ring of Q
    TailTile tail[T::kLoaders];    // guarded by its ring; [0] is for K, [1] for V, [kGateLoader] for gates of any tile
    // Early exit. The warps of a consumer warpgroup vote in used_up_votes[0] and [1] alternately: "the mass of all my
    // rows is below the threshold". If all four agree, the warpgroup stops computing. From then on, each of its warps
    // writes the number of the work tile to used_up_work[slot] before it releases a K slot. When the producer finds
    // this number from every consumer warp in the slot that it is about to fill, it ends the work tile: it arrives on
    // end_of_keys[slot] and then, without a tile, on k.full[slot]. Consumers wait on k.full and then test end_of_keys.
    int4 used_up_votes[2][kMaxWarpgroups];
    int32_t used_up_work[kKvStages][4 * kMaxWarpgroups];
};

template <class Element_, int kColumns, int kHeadDimV_, bool kGated_>
struct ForwardTraits {
    using Element = Element_;
    static constexpr int kBiases = kColumns % 16;                                // bias columns of Q and K: 8 or none
    static constexpr int kHeadDim = kColumns - kBiases, kHeadDimV = kHeadDimV_;  // other columns; columns of V and O
    static constexpr bool kGated = kGated_;                                      // with forget gates
    static constexpr bool kWide = kHeadDim > 128;                                // one Q slot; without forget gates
    static_assert(kWide ? !kGated && ((kHeadDim == 192 && kHeadDimV == 128) || (kHeadDim == 256 && kHeadDimV == 256))
                        : kHeadDim == kHeadDimV && (kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128),
                  "columns must be 64, 96, 128, and without forget gates 192 (128 of V) or 256");
    static_assert(kBiases == 0 || (kBiases == kBiasColumns && (kHeadDim == 64 || kHeadDim == 128)),
                  "bias columns need 64 or 128 others");
    // At head_dim 64 the output needs fewer registers, so three consumer warpgroups share a K/V tile.
    static constexpr int kWarpgroups = kHeadDim == 64 ? 3 : 2;
    static constexpr int kThreads = 128 * (kWarpgroups + 1);
    // Registers per thread at launch. The consumers can take only what warpgroup 0 has given back. If they ask for
    // more, setmaxnreg waits forever. The consumers of wide heads need at most 222, so that the producer has enough.
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kProducerRegisters = kWide ? 56 : kWarpgroups == 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kWide ? 224 : kWarpgroups == 2 ? 232 : 160;
    static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <= (kWarpgroups + 1) * kLaunchRegisters,
                  "all warpgroups together must not use more registers than the CTA has at launch");

    static constexpr int kQueryTile = 64 * kWarpgroups;
    // Keys in a tile of K or V. With 256 columns, the output of a thread takes 128 registers. That leaves room for the
    // scores of 64 keys only.
    static constexpr int kKeyTile = kHeadDimV == 256 ? 64 : 128;
    static constexpr int kKeysPerThread = kKeyTile / 4;  // keys of one row that a thread holds
    static constexpr int kLoaders = kGated ? 3 : 2;      // warps: tail tiles of K, those of V, and gates
    // A tile is stored as panels of 64 columns of the head dimension. At 96, half of the second panel is zeros.
    static constexpr int kPanels = (kHeadDim + 63) / 64, kValuePanels = (kHeadDimV + 63) / 64;
    static constexpr int kQueryPanelBytes = kQueryTile * kRowBytes, kKeyPanelBytes = kKeyTile * kRowBytes;
    static constexpr int kQueryBytes = kPanels * kQueryPanelBytes, kKeyBytes = kPanels * kKeyPanelBytes;
    static constexpr int kValueBytes = kValuePanels * kKeyPanelBytes;

    // Slots for Q tiles. Q comes from HBM, so it is loaded one work tile earlier. With gates or bias columns there is
    // no room for three tiles of 128 columns. A wide head has room for one tile only: the consumers release it after
    // their last S, and stage the output elsewhere, so that the next Q arrives during the last scan.
    static constexpr int kQueryStages = kWide ? 1 : (kGated || kBiases > 0) && kPanels == 2 ? 2 : 3;
    // With one Q slot, the consumers still use `work` of a work tile when the producer publishes the next one. When the
    // slot is free for work tile n + 1, work tile n - 1 is finished, so two slots of `work` are enough.
    static constexpr int kWorkSlots = kWide ? 2 : kQueryStages;
    // Panels of the output that a warp stages at once.
    static constexpr int kStagedPanels = kWide ? 1 : kValuePanels;

    struct Shared : MembersIf<kWide, StagedOutput<ForwardTraits>>,
                    MembersIf<(kBiases > 0), ForwardBiases<ForwardTraits>> {
        alignas(1024) uint8_t q[kQueryStages][kQueryBytes];
        alignas(1024) uint8_t k[kKvStages][kKeyBytes];
        alignas(1024) uint8_t v[kKvStages][kValueBytes];
        ForwardControl<ForwardTraits> control;
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of a CTA must fit 227 KiB");
};

}  // namespace megatron_sb::hopper
