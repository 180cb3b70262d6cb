// Tile sizes of the backward. Host code without CUDA can include this file.
#pragma once

namespace megatron_sb::hopper {

constexpr int kBackwardKeyTile = 128;  // keys in a key tile, 64 for each half
constexpr int kHalfTileKeys = 64;
constexpr int kBackwardKeysPerThread = 16;  // neighbouring keys of a half tile, of one row, that a thread holds
constexpr int kStepRows = 64;               // query rows in a step

}  // namespace megatron_sb::hopper
