// Block forward and backward on sm_90a, with TMA and wgmma. They implement the block contract of core/params.h for
// head_dim and head_dim_v up to 256, multiples of 8, in bf16 and fp16; with forget gates unless is_wide().
// README.md explains the algorithms.
#pragma once

#include <type_traits>

#include "core/params.h"

namespace megatron_sb::hopper {

// The kernels exist for 64, 96 and 128 columns, and wide ones for 192 (128 of v) and 256. A narrower head has zeros in
// the other columns: TMA writes zeros for columns after the end of a row, and the output leaves them out. Columns are
// stored in panels of 64, so 96 columns are stored as 128.
//
// Instances for 72 and 136 columns hold the bias columns of heads of 64 and 128 beside the panels. In heads of other
// sizes, bias columns are ordinary columns.
inline constexpr int kMostColumns = 256, kMostGatedColumns = 128;  // without bias columns
inline constexpr int kBiasRowBytes = 2 * kBiasColumns;
SB_HOST_DEVICE inline int computed_columns(int32_t head_dim, int32_t head_dim_v, int32_t bias_columns) {
    const int32_t widest = head_dim > head_dim_v ? head_dim : head_dim_v, channels = head_dim - bias_columns;
    if (bias_columns > 0 && (channels == 64 || channels == 128) && head_dim_v <= channels) return head_dim;
    if (widest <= 64) return 64;
    if (widest <= 96) return 96;
    if (widest <= 128) return 128;
    if (head_dim <= 192 && head_dim_v <= 128) return 192;
    return kMostColumns;
}
SB_HOST_DEVICE inline int computed_columns(const Sizes& sizes) {
    return computed_columns(sizes.head_dim, sizes.head_dim_v, sizes.bias_columns);
}
SB_HOST_DEVICE inline int stored_columns(const Sizes& sizes) {
    const int columns = computed_columns(sizes);
    return columns % 16 == kBiasColumns ? columns : (columns + 63) / 64 * 64;
}
// Whether the wide kernels compute the call. They have no forget gates.
SB_HOST_DEVICE inline bool is_wide(int32_t head_dim, int32_t head_dim_v, int32_t bias_columns) {
    return computed_columns(head_dim, head_dim_v, bias_columns) > kMostGatedColumns + kBiasColumns;
}

// The base class of a struct that has `Members` only in some instances.
template <class Members>
struct Without {};
template <bool kExist, class Members>
using MembersIf = std::conditional_t<kExist, Members, Without<Members>>;

// Return the size of `params.workspace` in bytes. The backward needs O(L) bytes and ignores `limit`.
int64_t forward_workspace(const ForwardParams& params);
int64_t backward_workspace(const BackwardParams& params, int64_t limit);

// Launch on `stream`, a cudaStream_t. Each row of q, k, v, o, do, dq, dk and dv must start at a multiple of 16 bytes.
// Throw RuntimeFailure if a tensor map cannot be encoded or a launch fails.
void block_forward(const ForwardParams& params, void* stream);
void block_backward(const BackwardParams& params, void* stream);

}  // namespace megatron_sb::hopper
