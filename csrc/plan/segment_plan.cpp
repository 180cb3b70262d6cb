#include "plan/segment_plan.h"

#include <algorithm>

#include "core/error.h"

namespace megatron_sb::plan {
namespace {

// Sets the row range of every run, removes the runs without segments, and renumbers the others.
void place_runs(SegmentPlan& segment_plan, int num_runs) {
    std::vector<int> kept(num_runs, -1);
    for (int run = 0; run < num_runs; ++run) {
        int32_t begin = INT32_MAX, end = 0;
        for (const BufferSegments& buffer : segment_plan.buffers) {
            if (buffer.run != run) continue;
            for (const Segment& segment : buffer.segments) {
                begin = std::min(begin, segment.q_begin);
                end = std::max(end, segment.q_begin + segment.q_len);
            }
        }
        if (end == 0) continue;
        kept[run] = static_cast<int>(segment_plan.runs.size());
        segment_plan.runs.push_back({begin, end - begin});
    }
    for (BufferSegments& buffer : segment_plan.buffers) {
        buffer.run = buffer.segments.empty() ? -1 : kept[buffer.run];
        for (Segment& segment : buffer.segments) segment.q_begin -= segment_plan.runs[buffer.run].row_begin;
    }
}

// Whether the queries of a piece follow those of a segment, in the buffer and in the document, with the same keys.
bool continues(const Segment& segment, const Piece& query, const Piece& key) {
    return segment.q_begin + segment.q_len == query.begin && segment.k_begin == key.begin &&
           segment.q_pos_minus_k_pos + segment.q_len == query.position - key.position;
}

// Returns the plan of a rank whose only key buffer has these pieces.
SegmentPlan one_buffer(const Partition& partition, const std::vector<Piece>& queries, int64_t num_queries,
                       const std::vector<Piece>& keys) {
    BufferSegments all{0, pair_pieces(queries, keys, partition.num_documents())};
    if (all.segments.empty()) return {{}, {{}}};
    return {{{0, static_cast<int32_t>(num_queries)}}, {std::move(all)}};
}

}  // namespace

std::vector<Segment> pair_pieces(const std::vector<Piece>& queries, const std::vector<Piece>& keys, int num_documents) {
    std::vector<const Piece*> keys_of(num_documents, nullptr);
    for (const Piece& key : keys) {
        if (key.document < num_documents) keys_of[key.document] = &key;
    }
    std::vector<Segment> segments;
    for (const Piece& query : queries) {
        const Piece* key = query.document < num_documents ? keys_of[query.document] : nullptr;
        if (key == nullptr || key->position >= query.position + query.length) continue;
        const int32_t distance = query.position - key->position;
        const int32_t num_keys = std::min(key->length, distance + query.length);
        if (!segments.empty() && continues(segments.back(), query, *key)) {
            Segment& last = segments.back();
            last.q_len += query.length;
            last.k_len = num_keys;
        } else {
            segments.push_back({query.begin, query.length, key->begin, num_keys, distance});
        }
    }
    return segments;
}

SegmentPlan ring_segments(const Partition& partition, int rank) {
    if (!partition.has_ring()) {
        throw InvalidArgument(
            concat("layout must be \"zigzag\" or \"contiguous\" for keys to move around a ring, got \"",
                   name_of(partition.layout()), "\""));
    }
    const Schedule schedule(partition.layout(), partition.size());
    const std::vector<Piece> queries = partition.local(rank);
    SegmentPlan segment_plan;
    for (int chunk = 0; chunk < partition.num_chunks(); ++chunk) {
        BufferSegments buffer{schedule.run(rank, chunk), {}};
        if (buffer.run >= 0) buffer.segments = pair_pieces(queries, partition.chunk(chunk), partition.num_documents());
        segment_plan.buffers.push_back(std::move(buffer));
    }
    place_runs(segment_plan, schedule.num_runs());
    return segment_plan;
}

SegmentPlan gather_segments(const Partition& partition, int rank) {
    return one_buffer(partition, partition.local(rank), partition.num_local_rows(rank), partition.stream());
}

SegmentPlan gather_segments(const Partition& partition, const KeyRows& rows) {
    return one_buffer(partition, rows.queries, static_cast<int64_t>(rows.shared_rows.size()), rows.pieces);
}

}  // namespace megatron_sb::plan
