// Block forward and backward on sm_90a, with TMA and wgmma. They implement the block contract of core/params.h for
// head_dim and head_dim_v up to 128, multiples of 8, in bf16 and fp16. README.md explains the algorithms.
#pragma once

#include "core/params.h"

namespace megatron_sb::hopper {

// The kernels exist for tiles of 64 and of 128 columns. A narrower head has zeros in the other columns: TMA writes
// zeros for columns after the end of a row, and the output leaves them out.
inline constexpr int kMostColumns = 128;
SB_HOST_DEVICE inline int tile_columns(const Sizes& sizes) {
    return sizes.head_dim <= 64 && sizes.head_dim_v <= 64 ? 64 : kMostColumns;
}

// Return the size of `params.workspace` in bytes. The backward needs O(L) bytes and ignores `limit`.
int64_t forward_workspace(const ForwardParams& params);
int64_t backward_workspace(const BackwardParams& params, int64_t limit);

// Launch on `stream`, a cudaStream_t. Each row of q, k, v, o, do, dq, dk and dv must start at a multiple of 16 bytes.
// Throw RuntimeFailure if a tensor map cannot be encoded or a launch fails.
void block_forward(const ForwardParams& params, void* stream);
void block_backward(const BackwardParams& params, void* stream);

}  // namespace megatron_sb::hopper
