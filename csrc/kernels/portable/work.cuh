// Code that the forward and the backward share: the choice of an instance, the head that a CTA processes, the rows of Q
// of a thread, and the launch.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/limits.h"
#include "core/params.h"
#include "core/segment.h"
#include "kernels/common/launch.h"
#include "kernels/common/query_tiles.h"
#include "kernels/common/scalars.h"
#include "kernels/common/tile.cuh"
#include "kernels/portable/passes.h"

namespace megatron_sb::portable {

// Shared memory that a CTA can use on every GPU from sm_80 on (sm_86 has the least).
inline constexpr int kMinSharedBytes = 99 * 1024;

// A query head of a batch element, and the KV head that it reads.
struct Head {
    int batch, query, key;
};

// Returns the head with index batch * num_heads + query head.
__device__ inline Head head_of(const Sizes& sizes, int index) {
    const int query = index % sizes.num_heads;
    return {index / sizes.num_heads, query, query / (sizes.num_heads / sizes.num_kv_heads)};
}

using common::uniform;
__device__ inline QueryTile uniform(const QueryTile& tile) {
    return {uniform(tile.q_row), uniform(tile.num_rows), uniform(tile.k_row), uniform(tile.k_len),
            uniform(tile.visible)};
}

// The rows of a query tile that a thread holds. Its warp has kTiles blocks of 16 rows. Of each block m the thread has
// two rows, r = 0 and 1 (fragments: tile.cuh).
template <int kTiles>
struct QueryRows {
    const Sizes& sizes;
    const QueryTile tile;
    const Head head;
    const int warp_row = uniform(threadIdx.x / 32) * 16 * kTiles;  // first row of the warp

    // Returns how many keys of the segment a row sees.
    __device__ int visible(int row) const { return clamp_row(tile.visible + row, 0, tile.k_len); }
    // Returns the index of a row in arrays (batch, num_heads, q_rows).
    __device__ int64_t index(int row) const {
        return (int64_t(head.batch) * sizes.num_heads + head.query) * sizes.q_rows + tile.q_row + row;
    }
    template <class F>
    __device__ void for_each(F f) const {  // f(m, r, row)
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) f(m, r, warp_row + 16 * m + 8 * r + threadIdx.x % 32 / 4);
    }
};

// An instance of a kernel: the element type, the head dimensions padded to kDim, with or without forget gates.
template <class T, int kDim_, bool kGated_>
struct Instance {
    using Element = T;
    static constexpr int kDim = kDim_;
    static constexpr bool kGated = kGated_;
};

// Calls f(Instance) for the head dimensions and the gates of this call.
template <class T, class Params, class F>
void with_instance(const Params& params, const F& f) {
    const auto with_dim = [&](auto gated) {
        constexpr bool kGated = decltype(gated)::value;
        const int head_dim = std::max(params.sizes.head_dim, params.sizes.head_dim_v);
        if (head_dim <= 64) return f(Instance<T, 64, kGated>{});
        if (head_dim <= 128) return f(Instance<T, 128, kGated>{});
        return f(Instance<T, int(kMaxHeadDim), kGated>{});
    };
    params.options.forget_gate ? with_dim(std::true_type{}) : with_dim(std::false_type{});
}

// Launches a kernel with `blocks` CTAs of kThreads threads. Throws RuntimeFailure with the name `what` if it fails.
template <class... Parameters, class... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), int64_t blocks, int shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
    common::launch(what, kernel, blocks, kThreads, shared_bytes, stream, arguments...);
}

}  // namespace megatron_sb::portable
