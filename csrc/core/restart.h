// Decodes a restart record (Restart in params.h): in which key tile the backward starts a row of Q, and with which
// mass. Every backward uses these functions, so all kernels read a record in the same way.
#pragma once

#include "core/params.h"

namespace megatron_sb {

// Results of restart_tile() that are not key tiles. They are far from the limits of int32, because kernels subtract
// tile indices from them.
inline constexpr int32_t kBeforeAllKeys = -1;
inline constexpr int32_t kNeverStarts = 1 << 29;

// Returns the key tile in which a row starts. Tiles have kRestartTile keys, counted from k_begin. The row has the
// record's mass at the newer edge of that tile. Returns kBeforeAllKeys if the row has this mass before the first key,
// and kNeverStarts if no key contributes to the row. `num_tiles` is the number of key tiles that the caller processes
// for the row; a record with a newer tile gives kNeverStarts.
SB_HOST_DEVICE inline int32_t restart_tile(int32_t edge, bool has_mass, int32_t num_tiles) {
    if (edge == 0) return has_mass ? kBeforeAllKeys : kNeverStarts;
    const int32_t tile = (edge - 1) / kRestartTile;
    return tile < num_tiles ? tile : kNeverStarts;
}

// Returns the edge of the record of a row. It is 0, and the scaled mass is 0, for a row that newer blocks have used up:
// its mass_in is 0. `index` is as below.
template <class T>
SB_HOST_DEVICE inline int32_t restart_edge(const BackwardParams& params, int64_t index) {
    const bool used_up = params.mass_in != nullptr && static_cast<const T*>(params.mass_in)[index] == T(0);
    return used_up ? 0 : params.restart.edge[index];
}

// Returns the mass with which a row starts. `index` is the index of the row in arrays (batch, num_heads, q_rows); T is
// the accumulation type.
template <class T>
SB_HOST_DEVICE inline T restart_mass(const BackwardParams& params, int64_t index) {
    const T mass = static_cast<const T*>(params.restart.mass)[index];
    return params.mass_in == nullptr ? mass : mass * static_cast<const T*>(params.mass_in)[index];
}

// Returns the key tile in which row `index` starts, from its record.
template <class T>
SB_HOST_DEVICE inline int32_t restart_tile(const BackwardParams& params, int64_t index, int32_t num_tiles) {
    const int32_t edge = restart_edge<T>(params, index);
    return restart_tile(edge, edge == 0 && restart_mass<T>(params, index) > T(0), num_tiles);
}

}  // namespace megatron_sb
