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

// Calls f(row) for each row that no range(segment) contains. All lanes of a warp call f together. Each thread of the
// CTA examines one row, from row `first` on; rows from `rows` on are ignored. All threads must call this. `changes` is
// shared memory with one entry for each thread: the number of ranges that begin at its row, minus the number that end
// there.
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

}  // namespace megatron_sb::common
