// The two passes of block_backward, and the carries between them.
//
// The query pass visits, for a tile of rows of Q, the keys from the restart to the newest. It computes dq and writes
// two carries for each row and key tile of 64: the mass at the newer edge of the tile, and the prefix, which is the sum
// of g over all keys older than the tile. With the carries the key pass can process any pair of a query tile and a key
// tile independently: a CTA owns a key tile and sums dk and dv in registers over all queries that see it. Every sum has
// a fixed order.
//
// Carries take 8 bytes for each row and key tile. If they exceed the workspace, the passes work chunk by chunk: both
// passes for one chunk of query tiles, then both for the next. A block is the carries of one query tile and one key
// tile. Blocks are numbered in the order of the segment table, over all heads. The number of a query tile's first block
// determines its chunk. The device computes these numbers, so the host needs no value of the table.
#pragma once

#include "kernels/common/query_tiles.h"
#include "kernels/portable/carry_blocks.h"
#include "kernels/portable/work.cuh"

namespace megatron_sb::portable {

inline constexpr int kQueryStep = 64;  // rows of Q in a step of the key pass

// Keys [begin, begin + kKeyTile) of a range of num_keys keys that begins at row k_row of k.
struct alignas(16) KeyTile {
    int32_t k_row, num_keys, begin;
    int32_t segment;  // the first segment with this range; BackwardPlan::next_segment links the others
};

// For each kQueryStep rows of a query tile, the oldest (`first`) and the newest (`last`) key tile in which one of the
// rows starts. `first` is kNeverStarts if no row starts, and `last` is kNeverStarts if some row does not start.
struct alignas(16) Starts {
    int32_t first[2], last[2];
};

struct PlanTotals {
    int64_t carry_blocks;  // of one head
    int32_t num_key_tiles;
};

// The mass in the carry of a row that starts in a newer key tile, or never.
inline constexpr float kAbsent = -1.f;

// A block has kQueryTile masses, then kQueryTile prefixes.
struct BackwardPlan {
    QueryTiles* query_tiles;
    PlanTotals* totals;
    int64_t* first_block;   // (q_rows): at the first row of a query tile, the index of its first block in a head
    int32_t* next_segment;  // (segments): the next segment that begins at the same key, or -1
    KeyTile* key_tiles;
    int32_t* key_tile_tables;  // of KeyTilePlanner, used while planning
    Starts* starts;            // at the first block of each query tile
    float* carries;
    int32_t max_query_tiles, max_key_tiles;
    int64_t max_blocks;  // of a head
    int64_t window;      // a query tile belongs to chunk (number of its first block) / window
    int32_t chunk;       // of this launch
};

// Returns the index, in this chunk, of the first block of a query tile that sees `key_tiles` key tiles, or -1 if the
// tile is in another chunk.
__device__ inline int64_t block_in_chunk(const BackwardPlan& plan, const Sizes& sizes, int64_t first_block, int head,
                                         int key_tiles) {
    const int64_t block = first_block * sizes.batch * sizes.num_heads + int64_t(head) * key_tiles;
    const int64_t in_chunk = block - plan.chunk * plan.window;
    return in_chunk >= 0 && in_chunk < plan.window ? in_chunk : -1;
}

}  // namespace megatron_sb::portable
