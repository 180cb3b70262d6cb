// A rank needs only the documents of its queries, up to its last query of each. KeyRows describes
// these rows of keys, and which rank sends which of them.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/partition.h"

namespace megatron_sb::plan {

struct KeyRows {
    std::vector<Piece> pieces;               // the needed rows as a buffer: the beginning of each document
    std::vector<std::vector<int64_t>> sent;  // by rank: rows of this rank's local buffer that the rank needs
    std::vector<int64_t> num_received;       // by rank, this one included
    std::vector<int64_t> place;              // of each received row in the buffer; in the order of the ranks
};

KeyRows key_rows(const Partition& partition, int rank);

// Whether the ranks together need at most half of what they would get if each got the whole stream. The answer is the
// same on every rank.
bool needs_few_key_rows(const Partition& partition);

// Whether each rank that gets only the rows that it needs has no more of them than a rank of a ring, which holds two
// chunks of each lane at a time. The answer is the same on every rank.
bool key_rows_fit_in_ring(const Partition& partition);

}  // namespace megatron_sb::plan
