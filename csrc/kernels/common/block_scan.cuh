// Running sums, and the like, over the threads of a block.
#pragma once

#include "core/params.h"
#include "core/segment.h"

namespace megatron_sb::portable {

constexpr int kMaxWarps = 32;

struct BlockScan {
    int inclusive;  // of this thread's value and those of the threads before it
    int total;
};

// Every thread of the block takes part. `warp_values` is shared memory with kMaxWarps entries; join(none, x) == x.
template <class Join>
__device__ inline BlockScan scan_over_block(int value, int none, int* warp_values, Join join) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value = join(before, value);
    }
    if (lane == 31) warp_values[warp] = value;
    __syncthreads();
    if (warp == 0) {
        int joined = lane < warps ? warp_values[lane] : none;
        for (int step = 1; step < warps; step *= 2) {
            const int before = __shfl_up_sync(~0u, joined, step);
            if (lane >= step) joined = join(before, joined);
        }
        warp_values[lane] = joined;
    }
    __syncthreads();
    const BlockScan scan = {join(warp > 0 ? warp_values[warp - 1] : none, value), warp_values[warps - 1]};
    __syncthreads();  // warp_values may be written again
    return scan;
}

struct Sum {
    __device__ int operator()(int a, int b) const { return a + b; }
};

struct RowRange {
    int begin, size;
};

// Calls f(row), by all lanes of a warp, for each of the rows from `first` on, one for each thread of the block, that is
// there and in no segment's range(segment). All threads take part; `changes` is shared memory with an entry for each,
// for how many ranges begin less how many end there.
template <class Range, class F>
__device__ inline void for_uncovered_row(const Sizes& sizes, const Segments& segments, int first, int rows,
                                         int* changes, int* warp_values, Range range, F f) {
    const int threads = blockDim.x;
    changes[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < segments.size; i += threads) {
        const RowRange r = range(clamped(segments[i], sizes));
        const int begin = max(r.begin - first, 0), end = min(r.begin + r.size - first, threads);
        if (begin >= end) continue;
        atomicAdd(&changes[begin], 1);
        if (end < threads) atomicAdd(&changes[end], -1);
    }
    __syncthreads();
    const bool covered = scan_over_block(changes[threadIdx.x], 0, warp_values, Sum()).inclusive > 0;
    const int row = first + int(threadIdx.x), lane = threadIdx.x % 32;
    for (uint32_t left = __ballot_sync(~0u, row < rows && !covered); left != 0; left &= left - 1)
        f(row - lane + __ffs(left) - 1);
}

}  // namespace megatron_sb::portable
