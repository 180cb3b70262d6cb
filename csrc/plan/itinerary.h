// Everything that one rank computes in one mode, as tables of segments.
//
// The rank's whole local buffer is the query side of every visit: rows that see nothing of a key buffer stand in no
// segment of its table. So a step needs one block call for each lane, whatever the layout and the packing.
#pragma once

#include <vector>

#include "core/params.h"
#include "plan/partition.h"
#include "plan/schedule.h"

namespace megatron_sb::plan {

// A run's query rows, a stretch of the local buffer that holds all of them.
struct Run {
    int32_t row_begin;
    int32_t num_rows;
};

// One key buffer as this rank's queries see it. Query rows of the segments count from row_begin of the run.
struct Visit {
    int run = -1;
    std::vector<Segment> segments;  // empty: nothing to compute
};

struct Itinerary {
    std::vector<Run> runs;      // newest to oldest
    std::vector<Visit> visits;  // one for each key buffer
};

// Pairs the pieces of two buffers that belong to the same document; every query piece stands in at most one segment.
// Key pieces are at most one for each document.
std::vector<Segment> pair_pieces(const std::vector<Piece>& queries, const std::vector<Piece>& keys, int num_documents);

// Key buffers are the chunks.
Itinerary ring_itinerary(const Partition& partition, int rank);
// The one key buffer is the whole stream in order, the one run the whole local buffer.
Itinerary gather_itinerary(const Partition& partition, int rank);

}  // namespace megatron_sb::plan
