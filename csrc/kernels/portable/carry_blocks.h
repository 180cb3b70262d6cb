// The carry blocks of the portable backward (bwd.cuh): one for each query tile of a segment and each key tile that it
// sees.
#pragma once

#include "core/restart.h"
#include "core/segment.h"

namespace megatron_sb::portable {

inline constexpr int kKeyTile = kRestartTile;

// Returns how many key tiles `num_rows` query rows see, if the first of them sees `visible` keys.
SB_HOST_DEVICE inline int key_tiles_of(int visible, int num_rows, int k_len) {
    return (clamp_row(visible + num_rows - 1, 0, k_len) + kKeyTile - 1) / kKeyTile;
}

// The carry blocks of a segment, for query tiles of `tile_rows` rows, a multiple of kKeyTile.
struct CarryBlocks {
    int q_len, k_len, tile_rows;
    int visible;  // keys that the first row sees, not clamped

    SB_HOST_DEVICE CarryBlocks(const Segment& s, bool attend_current, int tile_rows)
        : q_len(s.q_len),
          k_len(s.k_len),
          tile_rows(tile_rows),
          visible(s.q_pos_minus_k_pos + (attend_current ? 1 : 0)) {}

    SB_HOST_DEVICE int query_tiles() const { return (q_len + tile_rows - 1) / tile_rows; }
    SB_HOST_DEVICE int of_tile(int tile) const {
        const int row = tile * tile_rows, rows = q_len - row < tile_rows ? q_len - row : tile_rows;
        return key_tiles_of(visible + row, rows, k_len);
    }
    SB_HOST_DEVICE int64_t all() const {
        const int tiles = query_tiles();
        return tiles == 0 ? 0 : before(tiles - 1) + of_tile(tiles - 1);
    }
    // Returns the blocks of the query tiles before `tile`, all of which are full. The last row of tile i sees
    // newest + i * tile_rows keys, unless these are fewer than 0 or more than k_len. So the tiles from `some` to `most`
    // form an arithmetic series, those before have no block, and those after have one for each key tile.
    SB_HOST_DEVICE int64_t before(int tile) const {
        const int64_t newest = int64_t(visible) + tile_rows - 1;
        const int64_t some = first_above(newest, 0, tile), most = first_above(newest, int64_t(k_len) - 1, tile);
        const int64_t count = most - some, first = (newest + some * tile_rows + kKeyTile - 1) / kKeyTile;
        const int64_t series = count * first + tile_rows / kKeyTile * (count * (count - 1) / 2);
        return (count > 0 ? series : 0) + (tile - most) * ((k_len + kKeyTile - 1) / kKeyTile);
    }

  private:
    // The first tile of [0, end) whose last row sees more than `keys` keys, or `end`.
    SB_HOST_DEVICE int64_t first_above(int64_t newest, int64_t keys, int64_t end) const {
        const int64_t tile = newest > keys ? 0 : (keys - newest) / tile_rows + 1;
        return tile < end ? tile : end;
    }
};

}  // namespace megatron_sb::portable
