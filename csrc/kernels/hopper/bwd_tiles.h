// Key tiles and steps of the backward. Host code without CUDA can include this file.
#pragma once

#include "core/segment.h"

namespace megatron_sb::hopper {

constexpr int kBackwardKeyTile = 128;  // keys in a key tile, 64 for each half
constexpr int kHalfTileKeys = 64;
constexpr int kBackwardKeysPerThread = 16;  // neighbouring keys of a half tile, of one row, that a thread holds
constexpr int kStepRows = 64;               // query rows in a step

SB_HOST_DEVICE inline int num_steps(const Segment& s) {
    return s.k_len > 0 ? (s.q_len + kStepRows - 1) / kStepRows : 0;
}
// The oldest step of a segment whose rows see a key tile, if any row does.
SB_HOST_DEVICE inline int oldest_step(const Segment& s, bool attend_current, int tile) {
    const int first_row = tile * kBackwardKeyTile - s.q_pos_minus_k_pos - (attend_current ? 1 : 0) + 1;
    return first_row > 0 ? first_row / kStepRows : 0;
}

}  // namespace megatron_sb::hopper
