// Tiles that the copy engine cannot bring: where a segment ends what follows may be another document's, or no memory at
// all, and has to be zeros.
#pragma once

#include "core/params.h"
#include "kernels/hopper/ptx.cuh"

namespace megatron_sb::hopper {

// The place of a (batch element, head, row) in bytes from the tensor's data; elements have 16 bits.
__device__ inline int64_t offset_of(const Rows<const void*>& tensor, int batch, int head, int row) {
    return 2 * (batch * tensor.batch_stride + head * tensor.head_stride + row * tensor.row_stride);
}

// A row of a result of 16 bits, by one thread.
__device__ inline void write_zeros(const Rows<void*>& to, int batch, int head, int row, int columns) {
    uint16_t* const first =
        static_cast<uint16_t*>(to.data) + batch * to.batch_stride + head * to.head_stride + row * to.row_stride;
    for (int column = 0; column < columns; column += 8)
        *reinterpret_cast<uint4*>(first + column) = make_uint4(0, 0, 0, 0);
}

// One warp: kRows rows of kPanels times 64 columns as the copy engine lays them out under its 128-byte swizzle, row r
// of shared memory the one order(r) rows after `source`. The first `count` are there, the others zeros. To be waited
// for.
template <int kRows, int kPanels, class Order>
__device__ inline void copy_rows(uint8_t* to, const Rows<const void*>& tensor, int64_t source, int count, Order order) {
    constexpr int kRowBytes = 128, kChunk = 16, kChunksPerHalf = kRowBytes / kChunk;
    constexpr int kChunksPerRow = kPanels * kChunksPerHalf;
    const int lane = threadIdx.x % 32, chunk = lane % kChunksPerRow, half = chunk / kChunksPerHalf;
    const uint8_t* const from = static_cast<const uint8_t*>(tensor.data) + source + chunk * kChunk;
    to += half * kRows * kRowBytes;
#pragma unroll 2
    for (int r = lane / kChunksPerRow; r < kRows; r += 32 / kChunksPerRow) {
        const int row = order(r), column = (chunk % kChunksPerHalf) ^ (r % 8);
        const bool there = row < count;
        copy_async(shared_address(to + r * kRowBytes + column * kChunk),
                   there ? from + 2 * row * tensor.row_stride : tensor.data, there);
    }
}

// Until this warp's copies are there, for those who wait for `full` and for wgmma.
__device__ inline void finish_copy(uint64_t* full) {
    cp_async_wait_all();
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
}

// The permutation of the keys of a tile (README.md): shared memory's row 8n + 2t + c is key kKeys / 4 * t + 2n + c.
template <int kKeys>
struct KeyOrder {
    __device__ int operator()(int row) const { return row % 8 / 2 * (kKeys / 4) + row / 8 * 2 + row % 2; }
};

}  // namespace megatron_sb::hopper
