#include "plan/itinerary.h"

#include <algorithm>

namespace megatron_sb::plan {
namespace {

// Gives every run the stretch of rows that its visits need, and drops the runs that have none.
void place_runs(Itinerary& itinerary, int num_runs) {
    std::vector<int> kept(num_runs, -1);
    for (int run = 0; run < num_runs; ++run) {
        int32_t begin = INT32_MAX, end = 0;
        for (const Visit& visit : itinerary.visits) {
            if (visit.run != run) continue;
            for (const Segment& segment : visit.segments) {
                begin = std::min(begin, segment.q_begin);
                end = std::max(end, segment.q_begin + segment.q_len);
            }
        }
        if (end == 0) continue;
        kept[run] = static_cast<int>(itinerary.runs.size());
        itinerary.runs.push_back({begin, end - begin});
    }
    for (Visit& visit : itinerary.visits) {
        visit.run = visit.segments.empty() ? -1 : kept[visit.run];
        for (Segment& segment : visit.segments) segment.q_begin -= itinerary.runs[visit.run].row_begin;
    }
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
        segments.push_back(
            {query.begin, query.length, key->begin, std::min(key->length, distance + query.length), distance});
    }
    return segments;
}

Itinerary ring_itinerary(const Partition& partition, int rank) {
    const Schedule schedule(partition.layout(), partition.size());
    const std::vector<Piece> queries = partition.local(rank);
    Itinerary itinerary;
    for (int chunk = 0; chunk < partition.num_chunks(); ++chunk) {
        Visit visit{schedule.run(rank, chunk), {}};
        if (visit.run >= 0) visit.segments = pair_pieces(queries, partition.chunk(chunk), partition.num_documents());
        itinerary.visits.push_back(std::move(visit));
    }
    place_runs(itinerary, schedule.num_runs());
    return itinerary;
}

Itinerary gather_itinerary(const Partition& partition, int rank) {
    Visit all{0, pair_pieces(partition.local(rank), partition.stream(), partition.num_documents())};
    if (all.segments.empty()) return {{}, {{}}};
    return {{{0, static_cast<int32_t>(partition.num_local_rows())}}, {std::move(all)}};
}

}  // namespace megatron_sb::plan
