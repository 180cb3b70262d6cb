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

// Rows of q, and rows of k, in one batch element. Row indices are int32, and rounding one up to a multiple of 1024, the
// threads of a CTA, must not overflow.
inline constexpr int64_t kMaxRows = (int64_t(1) << 31) - 1024;

// Heads of all batch elements together: batch * heads. Indices of heads are int32. Counters of work may pass the number
// of work tiles by one for each CTA.
inline constexpr int64_t kMaxHeads = (int64_t(1) << 31) - (1 << 16);

// Segments of a table. The number of tiles, at most one partial tile for each segment, is an int32 too.
inline constexpr int64_t kMaxSegments = int64_t(1) << 30;

// Blocks of a paged cache. Their indices are int32.
inline constexpr int64_t kMaxCacheBlocks = INT32_MAX;

// Thread blocks in one launch (the limit of gridDim.x).
inline constexpr int64_t kMaxThreadBlocks = INT32_MAX;

// Alignment of workspaces, and of the arrays inside them, in bytes.
inline constexpr int64_t kWorkspaceAlignment = 256;

inline constexpr int64_t align_workspace(int64_t bytes) {
    return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

}  // namespace megatron_sb
