// Block forward and backward on sm_90a, with TMA and wgmma. They implement the block contract of core/params.h for
// head_dim and head_dim_v up to 256 (with forget gates 128), multiples of 8, in bf16 and fp16. README.md explains the
// algorithms.
#pragma once

#include "core/params.h"

namespace megatron_sb::hopper {

// The columns that a kernel computes: of q and k, and of v and the output.
struct Columns {
    int32_t qk, v;
};

// The kernels exist for 64, 96 and 128 columns, and wide ones for 192 (128 of v) and 256. A narrower head has zeros in
// the other columns: TMA writes zeros for columns after the end of a row, and the output leaves them out. Columns are
// stored in panels of 64, so 96 columns are stored as 128.
inline constexpr int kMostColumns = 256, kMostGatedColumns = 128;
SB_HOST_DEVICE inline Columns computed_columns(const Sizes& sizes) {
    const int widest = sizes.head_dim > sizes.head_dim_v ? sizes.head_dim : sizes.head_dim_v;
    if (widest <= 64) return {64, 64};
    if (widest <= 96) return {96, 96};
    if (widest <= 128) return {128, 128};
    if (sizes.head_dim <= 192 && sizes.head_dim_v <= 128) return {192, 128};
    return {kMostColumns, kMostColumns};
}
SB_HOST_DEVICE inline int stored_columns(const Sizes& sizes) {
    return (computed_columns(sizes).qk + 63) / 64 * 64;
}
// Whether the wide kernels compute the call. They have no forget gates.
SB_HOST_DEVICE inline bool is_wide(const Sizes& sizes) {
    return computed_columns(sizes).qk > kMostGatedColumns;
}

// Return the size of `params.workspace` in bytes. The backward needs O(L) bytes and ignores `limit`.
int64_t forward_workspace(const ForwardParams& params);
int64_t backward_workspace(const BackwardParams& params, int64_t limit);

// Launch on `stream`, a cudaStream_t. Each row of q, k, v, o, do, dq, dk and dv must start at a multiple of 16 bytes.
// Throw RuntimeFailure if a tensor map cannot be encoded or a launch fails.
void block_forward(const ForwardParams& params, void* stream);
void block_backward(const BackwardParams& params, void* stream);

}  // namespace megatron_sb::hopper
