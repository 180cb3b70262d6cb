// The layout "balanced": a split of a packed stream into spans, such that ranks have nearly equal work, and rows that
// differ by at most one.
//
// Work is counted in tiles of kWorkTileRows rows of Q by kWorkTileKeys keys. Such a tile is a step of the Hopper
// backward with up to 128 columns, and what a warpgroup of the Hopper forward computes at a time. The backward has most
// of the work, so its tiles are counted. A work tile of the forward has two or three warpgroups, which read the same
// keys: 128 rows, 192 at head_dim 64. So the forward of short pieces computes more than is counted.
//
// Tiles of rows begin at the first row of a piece, and tiles of keys at the first key of a document. Tiles above the
// causal diagonal and between documents are not computed. So a row of a long document costs more than a row of a short
// one, and a span that ends inside a document costs a partial tile.
//
// Why equal rows and equal work are both possible, if the number of ranks divides the rows: take a contiguous part of
// the stream with the rows of one rank, and move it along the stream. The work of all its positions has the mean W / n,
// and it changes in small steps. So some position has nearly the work W / n. Rank 0 gets this part. The rest of the
// stream, without the hole, is split in the same way for the other ranks. Each rank adds at most two cuts. Tiles make
// the steps coarse if documents are long and ranks have few rows. Then pairs of ranks, one with much and one with
// little work, divide their rows again, which also adds at most two cuts for each rank.
#pragma once

#include <cstdint>
#include <vector>

namespace megatron_sb::plan {

// Rows [begin, end) of a stream, all held by one rank.
struct Span {
    int64_t begin;
    int64_t end;
    int rank;
};

inline constexpr int kWorkTileRows = 64;   // of a step of the backward, and of a warpgroup of the forward
inline constexpr int kWorkTileKeys = 128;  // in both
inline constexpr int kMaxImbalancePercent = 5;

// Returns the tiles of positions [position, position + length) of a document, computed as one piece. A tile of rows
// counts at least one tile of keys.
int64_t piece_tiles(int64_t position, int64_t length);

// Returns the spans of the stream in the order of their rows, fewer than 4 * size. Each row is in one span, and
// neighbouring spans have different ranks. Each rank has seq_len / size rows, and seq_len % size ranks have one more.
// Ranks are numbered by their first rows; ranks without rows are the last ones.
//
// Document i has the rows [cu_seqlens[i], cu_seqlens[i + 1]), and rows from cu_seqlens.back() to seq_len have no work.
// The result is a pure function of the arguments.
//
// No rank has more than kMaxImbalancePercent more work than the mean, if tiles are small enough for this: see
// docs/context_parallel.md.
std::vector<Span> balanced_spans(const std::vector<int64_t>& cu_seqlens, int64_t seq_len, int size);

// Returns the tiles of each rank, by rank.
std::vector<int64_t> rank_tiles(const std::vector<int64_t>& cu_seqlens, const std::vector<Span>& spans, int size);

}  // namespace megatron_sb::plan
