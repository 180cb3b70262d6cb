// Key tiles and steps of the backward. Host code without CUDA can include this file.
#pragma once

#include "core/segment.h"
#include "kernels/hopper/hopper.h"

namespace megatron_sb::hopper {

constexpr int kHalfTileKeys = 64;           // keys in a half tile
constexpr int kBackwardKeysPerThread = 16;  // neighbouring keys of a half tile, of one row, that a thread holds
constexpr int kStepRows = 64;               // query rows in a step

SB_HOST_DEVICE inline int num_steps(const Segment& s) {
    return s.k_len > 0 ? (s.q_len + kStepRows - 1) / kStepRows : 0;
}
// Half tiles in a key tile: two, or one in the wide kernels.
SB_HOST_DEVICE inline int halves_of_tile(const Sizes& sizes) {
    return is_wide(sizes.head_dim, sizes.head_dim_v, sizes.bias_columns) ? 1 : 2;
}
SB_HOST_DEVICE inline int backward_key_tile(const Sizes& sizes) {
    return halves_of_tile(sizes) * kHalfTileKeys;
}
// What a key tile adds to dq of a step: panels of 64 columns and, in kernels with bias columns, the sum of dz of each
// row.
SB_HOST_DEVICE inline int dq_floats_of_step(const Sizes& sizes) {
    const int columns = stored_columns(sizes);
    return kStepRows * (columns / 64 * 64 + (columns % 64 > 0 ? 1 : 0));
}
// The oldest step of a segment whose rows see the key tile that begins at `first_key`, if any row does.
SB_HOST_DEVICE inline int oldest_step(const Segment& s, bool attend_current, int first_key) {
    const int first_row = first_key - s.q_pos_minus_k_pos - (attend_current ? 1 : 0) + 1;
    return first_row > 0 ? first_row / kStepRows : 0;
}

}  // namespace megatron_sb::hopper
