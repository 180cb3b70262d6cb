// Copies tiles in which a segment ends. TMA cannot load them: the rows after the end belong to another document or lie
// outside the tensor, and the tile needs zeros there.
#pragma once

#include "core/params.h"
#include "kernels/hopper/hopper.h"
#include "kernels/hopper/ptx.cuh"

namespace megatron_sb::hopper {

// Offset in bytes of (batch element, head, row) from the start of a tensor of 16-bit elements.
__device__ inline int64_t offset_of(const Rows<const void*>& tensor, int batch, int head, int row) {
    return 2 * (batch * tensor.batch_stride + head * tensor.head_stride + row * tensor.row_stride);
}

// Copies kRows rows of kPanels * 64 columns into shared memory, with the 128-byte swizzle that TMA would use. Row r in
// shared memory is row order(r) of the source, or zeros if order(r) >= count; so are the columns from `columns` on. The
// source begins `source` bytes from the start of the tensor. Runs in one warp, with cp.async: call finish_copy()
// afterwards.
template <int kRows, int kPanels, class Order>
__device__ inline void copy_rows(uint8_t* to, const Rows<const void*>& tensor, int64_t source, int count, int columns,
                                 Order order) {
    constexpr int kRowBytes = 128, kChunk = 16, kChunksPerPanel = kRowBytes / kChunk;
    if constexpr (kPanels > 2) {
        copy_rows<kRows, 2>(to, tensor, source, count, columns, order);
        copy_rows<kRows, kPanels - 2>(to + 2 * kRows * kRowBytes, tensor, source + 2 * kRowBytes, count, columns - 128,
                                      order);
        return;
    }
    constexpr int kChunksPerRow = kPanels * kChunksPerPanel;
    const int lane = threadIdx.x % 32, chunk = lane % kChunksPerRow, panel = chunk / kChunksPerPanel;
    const uint8_t* const from = static_cast<const uint8_t*>(tensor.data) + source + chunk * kChunk;
    to += panel * kRows * kRowBytes;
#pragma unroll 2
    for (int r = lane / kChunksPerRow; r < kRows; r += 32 / kChunksPerRow) {
        const int row = order(r), swizzled = (chunk % kChunksPerPanel) ^ (r % 8);
        const bool inside = row < count && chunk * 8 < columns;
        copy_async(shared_address(to + r * kRowBytes + swizzled * kChunk),
                   inside ? from + 2 * row * tensor.row_stride : tensor.data, inside);
    }
}

// Copies the bias columns of kRows rows (hopper.h), 16 bytes of each, without a swizzle. Row r in shared memory is row
// order(r) of the source, or zeros if order(r) >= count. Like copy_rows() otherwise.
template <int kRows, class Order>
__device__ inline void copy_bias_columns(uint8_t* to, const Rows<const void*>& tensor, int64_t source, int count,
                                         Order order) {
    for (int r = threadIdx.x % 32; r < kRows; r += 32) {
        const int row = order(r);
        const uint8_t* const from = static_cast<const uint8_t*>(tensor.data) + source + 2 * row * tensor.row_stride;
        copy_async(shared_address(to + r * kBiasRowBytes), row < count ? from : tensor.data, row < count);
    }
}

// Waits for the copies of this warp and makes them visible to wgmma. Then lane 0 arrives on `full`; consumers wait on
// it.
template <class Event, class Place>
__device__ void finish_copy(Event& full, const Place& item) {
    cp_async_wait_all();
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) full.arrive(item);
}

// The permutation of the keys of a tile (README.md): row 8n + 2t + c in shared memory is key (kKeys / 4) t + 2n + c.
template <int kKeys>
struct KeyOrder {
    __device__ int operator()(int row) const { return row % 8 / 2 * (kKeys / 4) + row / 8 * 2 + row % 2; }
};

}  // namespace megatron_sb::hopper
