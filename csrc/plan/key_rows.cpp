#include "plan/key_rows.h"

#include <algorithm>
#include <numeric>

namespace megatron_sb::plan {
namespace {

// How many positions of each document the queries of some pieces need: those up to the last query.
std::vector<int32_t> needed_positions(const Partition& partition, const std::vector<Piece>& queries) {
    std::vector<int32_t> needed(partition.num_documents(), 0);
    for (const Piece& piece : queries) {
        if (piece.document >= partition.num_documents()) continue;  // the tail
        needed[piece.document] = std::max(needed[piece.document], piece.position + piece.length);
    }
    return needed;
}

// How many key rows a rank needs.
int64_t num_needed(const Partition& partition, int rank) {
    const std::vector<int32_t> needed = needed_positions(partition, partition.local(rank));
    return std::accumulate(needed.begin(), needed.end(), int64_t{0});
}

// Calls f(piece, count) for each piece of which the first `count` rows are needed.
template <class F>
void for_each_needed(const std::vector<Piece>& pieces, const std::vector<int32_t>& needed, const F& f) {
    for (const Piece& piece : pieces) {
        if (piece.document >= static_cast<int>(needed.size())) continue;
        const int32_t count = std::min(needed[piece.document] - piece.position, piece.length);
        if (count > 0) f(piece, count);
    }
}

}  // namespace

KeyRows key_rows(const Partition& partition, int rank) {
    KeyRows rows;
    const std::vector<Piece> local = partition.local(rank);
    const std::vector<int32_t> needed = needed_positions(partition, local);
    std::vector<int32_t> begin_of(partition.num_documents(), 0);
    int32_t size = 0;
    for_each_needed(partition.stream(), needed, [&](const Piece& piece, int32_t count) {
        rows.pieces.push_back({piece.document, piece.position, piece.stream_row, size, count});
        begin_of[piece.document] = size;
        size += count;
    });
    for (int other = 0; other < partition.size(); ++other) {
        const std::vector<Piece> theirs = partition.local(other);
        std::vector<int64_t>& sent = rows.sent.emplace_back();
        for_each_needed(local, needed_positions(partition, theirs), [&](const Piece& piece, int32_t count) {
            for (int32_t i = 0; i < count; ++i) sent.push_back(piece.begin + i);
        });
        const size_t before = rows.place.size();
        for_each_needed(theirs, needed, [&](const Piece& piece, int32_t count) {
            for (int32_t i = 0; i < count; ++i) rows.place.push_back(begin_of[piece.document] + piece.position + i);
        });
        rows.num_received.push_back(static_cast<int64_t>(rows.place.size() - before));
    }
    return rows;
}

bool needs_few_key_rows(const Partition& partition) {
    const int64_t most = partition.num_rows() * partition.size() / 2;
    int64_t sum = 0;
    for (int rank = 0; rank < partition.size() && sum <= most; ++rank) sum += num_needed(partition, rank);
    return sum <= most;
}

bool key_rows_fit_in_ring(const Partition& partition) {
    for (int rank = 0; rank < partition.size(); ++rank) {
        if (num_needed(partition, rank) > 2 * partition.max_local_rows()) return false;
    }
    return true;
}

}  // namespace megatron_sb::plan
