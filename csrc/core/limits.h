// The limits that hold for every kernel. Checks, messages and tile arithmetic use these constants, never literals.
#pragma once

#include <cstdint>

namespace megatron_sb {

// Limits of head_dim (of q and k) and head_dim_v (of v and o). With multiples of 8, rows of 16-bit types stay aligned
// to 16 bytes.
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kHeadDimMultiple = 8;

inline constexpr bool is_supported_head_dim(int64_t head_dim) {
    return head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % kHeadDimMultiple == 0;
}

// Rows of q, and rows of k, in one batch element. Row indices are int32, and rounding one up to a tile of 64 must not
// overflow.
inline constexpr int64_t kMaxRows = (int64_t(1) << 31) - 64;

// Thread blocks in one launch (the limit of gridDim.x).
inline constexpr int64_t kMaxThreadBlocks = INT32_MAX;

// Alignment of workspaces, and of the arrays inside them, in bytes.
inline constexpr int64_t kWorkspaceAlignment = 256;

inline constexpr int64_t align_workspace(int64_t bytes) {
    return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

}  // namespace megatron_sb
