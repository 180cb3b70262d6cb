#include "plan/key_rows.h"

#include <algorithm>
#include <numeric>

namespace megatron_sb::plan {
namespace {

constexpr int kNone = -1, kSeveral = -2;

// Whether a piece is of the tail.
bool in_tail(const Partition& partition, const Piece& piece) {
    return piece.document >= partition.num_documents();
}

// Returns the rank that has rows of a document, kSeveral or kNone, by document.
std::vector<int> rank_of_documents(const Partition& partition) {
    std::vector<int> rank_of(partition.num_documents(), kNone);
    for (int rank = 0; rank < partition.size(); ++rank) {
        for (const Piece& piece : partition.local(rank)) {
            if (in_tail(partition, piece) || piece.length == 0) continue;
            int& found = rank_of[piece.document];
            found = found == kNone || found == rank ? rank : kSeveral;
        }
    }
    return rank_of;
}

// How many positions of each document the queries of some pieces need: those up to the last query.
std::vector<int32_t> needed_positions(const Partition& partition, const std::vector<Piece>& queries) {
    std::vector<int32_t> needed(partition.num_documents(), 0);
    for (const Piece& piece : queries) {
        if (in_tail(partition, piece)) continue;
        needed[piece.document] = std::max(needed[piece.document], piece.position + piece.length);
    }
    return needed;
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

// Divides the local buffer into the documents that only this rank has and all other rows. In every layout the local
// buffer has a document of the first kind whole and in order, and the tail last.
void divide_local_rows(const Partition& partition, const std::vector<int>& rank_of, const std::vector<Piece>& local,
                       KeyRows& rows) {
    for (const Piece& piece : local) {
        if (piece.length == 0) continue;
        if (in_tail(partition, piece) || rank_of[piece.document] == kSeveral) {
            rows.queries.push_back(piece);
            rows.queries.back().begin = static_cast<int32_t>(rows.shared_rows.size());
            for (int32_t i = 0; i < piece.length; ++i) rows.shared_rows.push_back(piece.begin + i);
        } else if (piece.position == 0) {
            rows.own.push_back({piece.begin, piece.length, piece.begin, piece.length, 0});
        } else {
            rows.own.back().q_len += piece.length;
            rows.own.back().k_len += piece.length;
        }
    }
}

}  // namespace

KeyRows key_rows(const Partition& partition, int rank) {
    KeyRows rows;
    divide_local_rows(partition, rank_of_documents(partition), partition.local(rank), rows);
    const std::vector<int32_t> needed = needed_positions(partition, rows.queries);
    std::vector<int32_t> begin_of(partition.num_documents(), 0);
    rows.num_rows = 0;
    for_each_needed(partition.stream(), needed, [&](const Piece& piece, int32_t count) {
        rows.pieces.push_back({piece.document, piece.position, piece.stream_row, rows.num_rows, count});
        begin_of[piece.document] = rows.num_rows;
        rows.num_rows += count;
    });
    const auto ranges = [&](const std::vector<Piece>& pieces, const std::vector<int32_t>& needed_by_a_rank) {
        std::vector<RowRange> found;
        for_each_needed(pieces, needed_by_a_rank, [&](const Piece& piece, int32_t count) {
            found.push_back({piece.begin, begin_of[piece.document] + piece.position, count});
        });
        return found;
    };
    const std::vector<Piece> local = partition.local(rank);
    rows.kept = ranges(local, needed);
    rows.sent.resize(partition.size());
    rows.received.resize(partition.size());
    for (int other = 0; other < partition.size(); ++other) {
        if (other == rank) continue;
        const std::vector<Piece> theirs = partition.local(other);
        rows.sent[other] = ranges(local, needed_positions(partition, theirs));
        rows.received[other] = ranges(theirs, needed);
    }
    return rows;
}

std::optional<KeyRowCounts> count_if_few(const Partition& partition) {
    if (partition.size() == 1) return std::nullopt;
    int64_t sum = 0;
    KeyRowCounts counts{0, 0};
    for (int rank = 0; rank < partition.size(); ++rank) {
        const std::vector<Piece> local = partition.local(rank);
        const std::vector<int32_t> needed = needed_positions(partition, local);
        int64_t received = std::accumulate(needed.begin(), needed.end(), int64_t{0});
        for_each_needed(local, needed, [&](const Piece&, int32_t count) { received -= count; });
        counts.received = std::max(counts.received, received);
        sum += received;
        if (2 * sum >= (partition.size() - 1) * partition.num_rows()) return std::nullopt;
    }
    const std::vector<int> rank_of = rank_of_documents(partition);
    for (int rank = 0; rank < partition.size(); ++rank) {
        const std::vector<int32_t> needed = needed_positions(partition, partition.local(rank));
        int64_t of_shared = 0;
        for (size_t i = 0; i < needed.size(); ++i) of_shared += rank_of[i] == kSeveral ? needed[i] : 0;
        counts.needed = std::max(counts.needed, of_shared);
    }
    return counts;
}

}  // namespace megatron_sb::plan
