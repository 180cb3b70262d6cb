// Block forward and backward on sm_90a, with TMA and wgmma. They implement the block contract of core/params.h for
// head_dim and head_dim_v up to 128, multiples of 8, in bf16 and fp16. README.md explains the algorithms.
#pragma once

#include "core/params.h"

namespace megatron_sb::hopper {

// The kernels exist for 64, 96 and 128 columns. A narrower head has zeros in the other columns: TMA writes zeros for
// columns after the end of a row, and the output leaves them out. 96 columns are stored as 128, in two panels of 64.
inline constexpr int kMostColumns = 128;
SB_HOST_DEVICE inline int computed_columns(const Sizes& sizes) {
    const int widest = sizes.head_dim > sizes.head_dim_v ? sizes.head_dim : sizes.head_dim_v;
    return widest <= 64 ? 64 : widest <= 96 ? 96 : kMostColumns;
}
SB_HOST_DEVICE inline int stored_columns(const Sizes& sizes) {
    return computed_columns(sizes) == 64 ? 64 : kMostColumns;
}

// Return the size of `params.workspace` in bytes. The backward needs O(L) bytes and ignores `limit`.
int64_t forward_workspace(const ForwardParams& params);
int64_t backward_workspace(const BackwardParams& params, int64_t limit);

// Launch on `stream`, a cudaStream_t. Each row of q, k, v, o, do, dq, dk and dv must start at a multiple of 16 bytes.
// Throw RuntimeFailure if a tensor map cannot be encoded or a launch fails.
void block_forward(const ForwardParams& params, void* stream);
void block_backward(const BackwardParams& params, void* stream);

}  // namespace megatron_sb::hopper
