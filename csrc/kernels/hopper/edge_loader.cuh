// The warps that load the tiles of K and V in which a segment ends: what follows there may be another document's, or no
// memory at all, and has to be zeros. One warp has the tiles of K, one those of V.
//
// What orders what: the producer sends a tile when its slot is free. Every lane waits for its own copies and makes them
// visible to wgmma (proxy fence) before lane 0 arrives for all at the slot's `full` barrier.
#pragma once

#include "kernels/hopper/producer.cuh"

namespace megatron_sb::hopper {

template <class T>
class EdgeLoader {
  public:
    __device__ EdgeLoader(Control& control, int loader, const Rows<const void*>& rows)
        : c_(control), loader_(loader), rows_(rows), lane_(threadIdx.x % 32) {}

    // `tiles` and `full`: the ring in shared memory.
    __device__ void run(uint8_t (*tiles)[T::kKeyBytes], uint64_t* full) const {
        for (int number = 0;; ++number) {
            mbarrier_wait(&c_.edge_full[loader_], number & 1);
            const EdgeTile tile = c_.edge[loader_];
            mbarrier_arrive(&c_.edge_empty[loader_]);
            if (tile.slot < 0) return;
            copy(tiles[tile.slot], tile);
            wait_for_copies();
            fence_async_proxy();
            __syncwarp();
            if (lane_ == 0) mbarrier_arrive(&full[tile.slot]);
        }
    }

  private:
    // As the copy engine would lay it out: row 8n + 2t + c of the tile is key 32t + 2n + c.
    __device__ void copy(uint8_t* to, const EdgeTile& tile) const {
        constexpr int kChunk = 16, kChunksPerHalf = kRowBytes / kChunk, kChunksPerRow = T::kHalves * kChunksPerHalf;
        constexpr int kRowsAtOnce = 32 / kChunksPerRow;  // neighbouring rows that the lanes take together
        const int chunk = lane_ % kChunksPerRow, half = chunk / kChunksPerHalf;
        const uint8_t* from =
            static_cast<const uint8_t*>(rows_.data) + chunk * kChunk +
            2 * (tile.batch * rows_.batch_stride + tile.head * rows_.head_stride + tile.row * rows_.row_stride);
        to += half * T::kKeyHalfBytes;
#pragma unroll 2
        for (int row = lane_ / kChunksPerRow; row < kKeyTile; row += kRowsAtOnce) {
            const int key = row % 8 / 2 * 32 + row / 8 * 2 + row % 2;
            const int column = (chunk % kChunksPerHalf) ^ (row % 8);
            const bool there = key < tile.count;
            copy_async(shared_address(to + row * kRowBytes + column * kChunk),
                       there ? from + 2 * key * rows_.row_stride : rows_.data, there);
        }
    }

    Control& c_;
    const int loader_;
    const Rows<const void*>& rows_;
    const int lane_;
};

}  // namespace megatron_sb::hopper
