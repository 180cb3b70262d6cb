// Prefix sums (and other scans) over the threads of a CTA.
#pragma once

#include "core/params.h"
#include "core/segment.h"

namespace megatron_sb::common {

constexpr int kMaxWarps = 32;

template <class T>
struct BlockScan {
    T inclusive;  // over the values of this thread and all threads before it
    T total;
};

// Scans `value` over the threads of the CTA with the associative operation `join`. `none` is its identity element. All
// threads of the CTA must call this. `warp_values` is shared memory with kMaxWarps entries.
template <class T, class Join>
__device__ inline BlockScan<T> scan_over_block(T value, T none, T* warp_values, Join join) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        const T before = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value = join(before, value);
    }
    if (lane == 31) warp_values[warp] = value;
    __syncthreads();
    if (warp == 0) {
        T joined = lane < warps ? warp_values[lane] : none;
        for (int step = 1; step < warps; step *= 2) {
            const T before = __shfl_up_sync(~0u, joined, step);
            if (lane >= step) joined = join(before, joined);
        }
        warp_values[lane] = joined;
    }
    __syncthreads();
    const BlockScan<T> scan = {join(warp > 0 ? warp_values[warp - 1] : none, value), warp_values[warps - 1]};
    __syncthreads();  // the caller may overwrite warp_values
    return scan;
}

struct Sum {
    template <class T>
    __device__ T operator()(T a, T b) const {
        return a + b;
    }
};
struct Maximum {
    template <class T>
    __device__ T operator()(T a, T b) const {
        return max(a, b);
    }
};

struct RowRange {
    int begin, size;
};

// How many rows a CTA of for_uncovered_row() examines. Few, so that a long range of such rows is divided among many
// CTAs.
constexpr int kRowsToExamine = 128;

__host__ __device__ inline int blocks_to_examine(int rows) {
    return (rows + kRowsToExamine - 1) / kRowsToExamine;
}

// Calls f(row) for each row of a CTA that no range(segment) contains. All lanes of a warp call f together. CTA `block`
// examines kRowsToExamine rows; rows from `rows` on are ignored. The CTA must have at least kRowsToExamine threads, and
// all of them must call this. `changes` is shared memory with one entry for each thread: first the number of ranges
// that begin at a row, minus the number that end there, then how many ranges contain the row.
template <class Range, class F>
__device__ inline void for_uncovered_row(const Sizes& sizes, const Segments& segments, int block, int rows,
                                         int* changes, int* warp_values, Range range, F f) {
    const int first = block * kRowsToExamine, count = min(kRowsToExamine, rows - first);
    changes[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < segments.size; i += blockDim.x) {
        const RowRange r = range(clamped(segments[i], sizes));
        const int begin = max(r.begin - first, 0), end = min(r.begin + r.size - first, count);
        if (begin >= end) continue;
        atomicAdd(&changes[begin], 1);
        if (end < count) atomicAdd(&changes[end], -1);
    }
    __syncthreads();
    const int covered = scan_over_block(changes[threadIdx.x], 0, warp_values, Sum()).inclusive;
    changes[threadIdx.x] = covered;
    __syncthreads();
    for (int i = threadIdx.x / 32; i < count; i += blockDim.x / 32)
        if (changes[i] == 0) f(first + i);
}

// Zeroes a row of a tensor, for all batch elements and heads, in pieces of 16 bytes. Rows begin at multiples of 16
// bytes. One warp calls this. If 32 is not a multiple of the pieces of a row, some pieces are written twice.
__device__ inline void clear_row(const Rows<void*>& to, int batch, int heads, int columns, int element_bytes, int row) {
    const int pieces = columns * element_bytes / int(sizeof(uint4)), lane = threadIdx.x % 32;
    for (int head = lane / pieces; head < batch * heads; head += max(32 / pieces, 1)) {
        const int64_t first = head / heads * to.batch_stride + row * to.row_stride + head % heads * to.head_stride;
        uint4* const at = reinterpret_cast<uint4*>(static_cast<char*>(to.data) + first * element_bytes);
        for (int piece = lane % pieces; piece < pieces; piece += 32) at[piece] = make_uint4(0, 0, 0, 0);
    }
}

}  // namespace megatron_sb::common
