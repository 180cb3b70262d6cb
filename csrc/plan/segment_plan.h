// Everything that one rank computes in one mode, as tables of segments: one table for each key buffer.
//
// A table covers all query rows of the rank's local buffer that see a key of the key buffer; the other rows are in no
// segment of it. So a step needs one block call for each lane, for every layout and packing.
#pragma once

#include <vector>

#include "core/params.h"
#include "plan/key_rows.h"
#include "plan/partition.h"
#include "plan/schedule.h"

namespace megatron_sb::plan {

// The range of the local buffer that holds all query rows of a run (plan/schedule.h).
struct Run {
    int32_t row_begin;
    int32_t num_rows;
};

// The segments of one key buffer. Their query rows count from row_begin of the run.
struct BufferSegments {
    int run = -1;
    std::vector<Segment> segments;  // empty if there is nothing to compute
};

struct SegmentPlan {
    std::vector<Run> runs;                // newest to oldest
    std::vector<BufferSegments> buffers;  // one for each key buffer
};

// Returns a segment for each query piece that sees keys of its document in the other buffer. Pieces that follow each
// other in the buffer and in their document share a segment. So with all rows on one rank the segments are whole
// documents, as without context parallelism. `keys` must have at most one piece of each document, so each query piece
// is in at most one segment.
std::vector<Segment> pair_pieces(const std::vector<Piece>& queries, const std::vector<Piece>& keys, int num_documents);

// Returns the plan of a rank for p2p: each key buffer is a chunk. Throws InvalidArgument if the partition has no ring.
SegmentPlan ring_segments(const Partition& partition, int rank);
// Returns the plan of a rank for all_gather: the only key buffer is the whole stream in order, and the only run is the
// whole local buffer.
SegmentPlan gather_segments(const Partition& partition, int rank);
// The same for the shared rows of the rank, whose key buffer holds only the rows that they need.
SegmentPlan gather_segments(const Partition& partition, const KeyRows& rows);

}  // namespace megatron_sb::plan
