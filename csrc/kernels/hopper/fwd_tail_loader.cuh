// The tail loaders: two warps that load the tiles in which a segment ends, one for K and one for V. TMA cannot load
// these tiles: the rows after the end belong to another document or lie outside the tensor, and the tile needs zeros
// there.
//
// Synchronisation. The producer waits until the consumers have released the slot of the ring. Then it writes a TailTile
// and arrives on tail_ring.full; the tail loader waits, reads it, and arrives on tail_ring.empty with all lanes. Every
// lane waits for its own copies and makes them visible to wgmma (proxy fence). Then lane 0 arrives on k.full or v.full
// for the slot; the consumers wait on it.
//
// With forget gates, a third warp loads the gates of all K tiles in the same way.
#pragma once

#include "kernels/hopper/fwd_producer.cuh"
#include "kernels/hopper/tile_copy.cuh"

namespace megatron_sb::hopper {

template <class T>
class TailLoader {
  public:
    __device__ TailLoader(typename T::Shared& shared, int loader, const Rows<const void*>& rows, int columns)
        : shared_(shared), control_(shared.control), loader_(loader), rows_(rows), columns_(columns) {}

    // `tiles` are the slots of the ring of K or V, of kBytes each; `full` is its event k.full or v.full. kBiases: bias
    // columns to copy, of K.
    template <int kBiases, int kBytes>
    __device__ void run(uint8_t (*tiles)[kBytes], SlotBarriers<kKvStages>& full) const {
        constexpr int kPanels = kBytes / T::kKeyPanelBytes;
        for (uint32_t number = 0;; ++number) {
            const TailTile tile = receive(Place<1>::of(number));
            if (tile.slot < 0) return;
            copy_rows<T::kKeyTile, kPanels>(tiles[tile.slot], rows_, offset_of(rows_, tile.batch, tile.head, tile.row),
                                            tile.count, columns_, KeyOrder<T::kKeyTile>());
            if constexpr (kBiases > 0)
                copy_bias_columns<T::kKeyTile>(shared_.k_biases[tile.slot], rows_,
                                               offset_of(rows_, tile.batch, tile.head, tile.row) + 2 * T::kHeadDim,
                                               tile.count, KeyOrder<T::kKeyTile>());
            finish_copy(full, Place<kKvStages>{tile.slot});
        }
    }

    // The loader of gates: it gets each tile whose K is loaded. Waits on gates.empty, on which all consumer threads
    // arrive. Each lane arrives on gates.full; the consumers wait on it.
    __device__ void load_gates() const {
        for (uint32_t number = 0;; ++number) {
            const TailTile tile = receive(Place<1>::of(number));
            if (tile.slot < 0) return;
            const auto slot = Place<kGateStages>::of(number);
            constexpr int kKeysPerLane = T::kKeyTile / 32;
            const int64_t first = offset_of(rows_, tile.batch, tile.head, tile.row);
            const int lane = threadIdx.x % 32;
            uint2 words[kKeysPerLane];
#pragma unroll
            for (int i = 0; i < kKeysPerLane; ++i)
                if (lane + 32 * i < tile.count)
                    words[i] = Gate::words(rows_, first + 2 * (lane + 32 * i) * rows_.row_stride, columns_);
            control_.gates.wait_empty(slot);
#pragma unroll
            for (int i = 0; i < kKeysPerLane; ++i)
                control_.gates_of_slot[slot.slot][lane + 32 * i] =
                    lane + 32 * i < tile.count ? common::gate_of<typename T::Element>(words[i]) : 1.f;
            control_.gates.full.arrive(slot);
        }
    }

  private:
    // Waits on tail_ring.full, on which the producer arrives, and arrives on tail_ring.empty, on which it waits.
    __device__ __forceinline__ TailTile receive(const Place<1>& place) const {
        auto& ring = control_.tail_ring[loader_];
        ring.wait_full(place);
        const TailTile tile = control_.tail[loader_];
        ring.empty.arrive(place);
        return tile;
    }

    typename T::Shared& shared_;
    ForwardControl<T>& control_;
    const int loader_;
    const Rows<const void*>& rows_;
    const int columns_;
};

}  // namespace megatron_sb::hopper
