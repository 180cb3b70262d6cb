// The two passes of block_backward and what goes between them.
//
// The query pass walks, for a tile of query rows, the keys from the oldest that count to the newest: dq, and for each
// row and key tile of 64 its carries, the mass at the tile's newer edge and the sum of g over all keys older than the
// tile. With those the key pass works on any pair of a query tile and a key tile alone: a thread block owns a key tile
// and adds up dk and dv in registers over all queries that see it. Every sum has one order.
//
// Carries take 8 bytes a row and key tile. Beyond what the workspace holds the work goes chunk by chunk, both passes
// for one chunk of query tiles after the other. The place of a query tile's carries in the sum over all query tiles and
// heads, in the order of the segment table, says to which chunk it belongs: the host needs no value of the table.
#pragma once

#include "core/restart.h"
#include "kernels/common/query_tiles.h"
#include "kernels/portable/work.cuh"

namespace megatron_sb::portable {

inline constexpr int kKeyTile = kRestartTile;

inline constexpr int kQueryStep = 64;  // query rows of a step of the key pass

// Keys [begin, begin + kKeyTile) of the run of num_keys keys from row k_row on.
struct alignas(16) KeyTile {
    int32_t k_row, num_keys, begin;
    int32_t segment;  // the first of the segments with these keys; next_segment leads to the others
};

// The key tiles in which the first and the last row of each kQueryStep rows of a query tile start, counted from the
// oldest keys. kNeverStarts: in none.
struct alignas(16) Starts {
    int32_t first[2], last[2];
};

struct PlanTotals {
    int64_t carry_blocks;  // of one head
    int32_t num_key_tiles;
};

// The mass that is carried for a row that starts in a newer key tile, or never.
inline constexpr float kAbsent = -1.f;

// A block is the carries of one query tile and one key tile: kQueryTile masses, then as many prefixes.
struct BackwardPlan {
    QueryTiles* query_tiles;
    PlanTotals* totals;
    int64_t* first_block;   // (q_rows): where a query tile begins, its first block among those of a head
    int32_t* next_segment;  // (segments): the next one that begins at the same key, or -1
    KeyTile* key_tiles;
    Starts* starts;  // at a query tile's first block
    float* carries;
    int32_t max_query_tiles, max_key_tiles;
    int64_t window;  // blocks that begin in a chunk
    int32_t chunk;
};

SB_HOST_DEVICE inline int key_tiles_of(int visible, int num_rows, int k_len) {
    return (clamp_row(visible + num_rows - 1, 0, k_len) + kKeyTile - 1) / kKeyTile;
}

// Where the carries of a query tile that sees `key_tiles` key tiles begin in this chunk; -1: in another chunk.
__device__ inline int64_t block_in_chunk(const BackwardPlan& plan, const Sizes& sizes, int64_t first_block, int head,
                                         int key_tiles) {
    const int64_t block = first_block * sizes.batch * sizes.num_heads + int64_t(head) * key_tiles;
    const int64_t in_chunk = block - plan.chunk * plan.window;
    return in_chunk >= 0 && in_chunk < plan.window ? in_chunk : -1;
}

}  // namespace megatron_sb::portable
