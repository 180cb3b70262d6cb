// The tail loaders: two warps that load the tiles in which a segment ends, one for K and one for V. TMA cannot load
// these tiles: the rows after the end belong to another document or lie outside the tensor, and the tile needs zeros
// there.
//
// Synchronisation. The producer waits until the consumers have released the slot of the ring. Then it writes a TailTile
// and arrives on tail_full; the tail loader waits, reads it, and arrives on tail_empty with all lanes. Every lane waits
// for its own copies and makes them visible to wgmma (proxy fence). Then lane 0 arrives on the slot's k_full or v_full;
// the consumers wait on it.
#pragma once

#include "kernels/hopper/fwd_producer.cuh"
#include "kernels/hopper/tile_copy.cuh"

namespace megatron_sb::hopper {

template <class T>
class TailLoader {
  public:
    __device__ TailLoader(ForwardControl& control, int loader, const Rows<const void*>& rows)
        : control_(control), loader_(loader), rows_(rows) {}

    // `tiles` are the slots of the ring of K or V; `full` are their barriers, k_full or v_full.
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
