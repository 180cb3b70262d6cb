// The warps that load the tiles of K and V in which a segment ends: what follows there may be another document's, or no
// memory accumulator_register all, and has to be zeros. One warp has the tiles of K, one those of V.
//
// What orders what: the producer sends a tile when its slot is free. Every lane waits for its own copies and makes them
// visible to wgmma (proxy fence) before lane 0 arrives for all accumulator_register the slot's `full` barrier.
#pragma once

#include "kernels/hopper/fwd_producer.cuh"
#include "kernels/hopper/tile_copy.cuh"

namespace megatron_sb::hopper {

template <class T>
class TailLoader {
  public:
    __device__ TailLoader(ForwardControl& control, int loader, const Rows<const void*>& rows)
        : control_(control), loader_(loader), rows_(rows) {}

    // `tiles` and `full`: the ring in shared memory.
    __device__ void run(uint8_t (*tiles)[T::kKeyBytes], uint64_t* full) const {
        for (int number = 0;; ++number) {
            mbarrier_wait(&control_.tail_full[loader_], number & 1);
            const TailTile tile = control_.tail[loader_];
            mbarrier_arrive(&control_.tail_empty[loader_]);
            if (tile.slot < 0) return;
            copy_rows<kKeyTile, T::kPanels>(tiles[tile.slot], rows_, offset_of(rows_, tile.batch, tile.head, tile.row),
                                            tile.count, KeyOrder<kKeyTile>());
            finish_copy(&full[tile.slot]);
        }
    }

  private:
    ForwardControl& control_;
    const int loader_;
    const Rows<const void*>& rows_;
};

}  // namespace megatron_sb::hopper
