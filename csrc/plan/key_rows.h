// What a rank computes if it gets only the key rows that it needs. A document without rows on other ranks needs no
// transfer. Of a shared document, a rank needs the keys up to its last query. KeyRows describes these rows, and which
// rank sends which of them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/params.h"
#include "plan/partition.h"

namespace megatron_sb::plan {

// Neighbouring rows in two buffers: rows [local, local + count) of the local buffer of a rank, and rows [place, place +
// count) of a buffer with rows of several ranks.
struct RowRange {
    int64_t local;
    int64_t place;
    int64_t count;
};

struct KeyRows {
    std::vector<Segment> own;          // of the documents that only this rank has; of queries and keys: local rows
    std::vector<int64_t> shared_rows;  // all other local rows, increasing. "Shared row i" is shared_rows[i]
    std::vector<Piece> queries;        // the pieces of the local buffer in these rows; `begin` counts shared rows
    std::vector<Piece> pieces;         // the needed key rows as a buffer: the beginning of each shared document
    int32_t num_rows;                  // of this buffer
    std::vector<RowRange> kept;        // rows of the buffer that this rank has: all shared rows but the tail
    // By rank, in the same order on both; empty for this rank. The sent ranges are parts of the kept ones.
    std::vector<std::vector<RowRange>> sent, received;
};

KeyRows key_rows(const Partition& partition, int rank);

// The most rows of keys of one rank, if each gets only those that it needs.
struct KeyRowCounts {
    int64_t needed;    // of shared documents
    int64_t received;  // from other ranks

    // Whether no rank needs more rows than a rank of a ring holds, which has two chunks of each lane at a time.
    bool fit_in_ring(const Partition& partition) const { return needed <= 2 * partition.max_local_rows(); }
};

// Returns nothing if the ranks together receive at least half of what they would receive if each got the whole stream,
// or if there is one rank. The answer is the same on every rank.
std::optional<KeyRowCounts> count_if_few(const Partition& partition);

}  // namespace megatron_sb::plan
