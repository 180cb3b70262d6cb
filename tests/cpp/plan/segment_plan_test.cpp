#include "plan/segment_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "core/error.h"
#include "plan/schedule.h"
#include "streams.h"

namespace megatron_sb::plan {
namespace {

constexpr Layout kEqualChunks[] = {Layout::kZigzag, Layout::kContiguous};
constexpr Pass kPasses[] = {Pass::kForward, Pass::kBackward};

TEST(Schedule, EachRankReceivesWhatItsNeighbourSends) {
    for (const Layout layout : kEqualChunks) {
        for (int size = 1; size <= 8; ++size) {
            const Schedule ring(layout, size);
            for (const Pass pass : kPasses) {
                for (int lane = 0; lane < ring.num_lanes(); ++lane) {
                    for (int rank = 0; rank < size; ++rank) {
                        const int from = ring.previous_rank(lane, pass, rank);
                        EXPECT_EQ(ring.next_rank(lane, pass, from), rank);
                        for (int step = 0; step + 1 < size; ++step) {
                            EXPECT_EQ(ring.chunk(lane, pass, rank, step + 1), ring.chunk(lane, pass, from, step));
                        }
                        const bool forward = pass == Pass::kForward;
                        EXPECT_EQ(ring.chunk(lane, pass, rank, forward ? 0 : size - 1), ring.home_chunk(lane, rank));
                        EXPECT_EQ(ring.chunk(lane, pass, rank, 0), ring.home_chunk(lane, forward ? rank : from));
                    }
                }
            }
        }
    }
}

TEST(Schedule, HomeChunksOfARankAreItsChunksInThePartition) {
    for (const Layout layout : kEqualChunks) {
        const Schedule ring(layout, 3);
        const Partition partition(layout, Packing::kPerDocument, 3, 12, std::nullopt);
        for (int rank = 0; rank < 3; ++rank) {
            std::vector<int> home;
            for (int lane = 0; lane < ring.num_lanes(); ++lane) home.push_back(ring.home_chunk(lane, rank));
            EXPECT_EQ(home, partition.chunks_of(rank));
        }
    }
}

// A rank gets every chunk once in each pass. Inside a run, chunks come newest to oldest in the forward and oldest to
// newest in the backward. The runs together cover every chunk that the newest chunk of the rank sees, newest to oldest.
TEST(Schedule, ChunksOfEachRunAreInOrder) {
    for (const Layout layout : kEqualChunks) {
        for (int size = 1; size <= 8; ++size) {
            const Schedule ring(layout, size);
            const int num_chunks = ring.num_lanes() * size;
            for (int rank = 0; rank < size; ++rank) {
                SCOPED_TRACE(testing::Message() << name_of(layout) << ", rank " << rank << " of " << size);
                std::vector<std::vector<int>> forward(ring.num_runs()), backward(ring.num_runs());
                for (const Pass pass : kPasses) {
                    std::vector<int> seen;
                    for (int step = 0; step < ring.num_steps(); ++step) {
                        for (int lane = 0; lane < ring.num_lanes(); ++lane) {
                            const int chunk = ring.chunk(lane, pass, rank, step);
                            seen.push_back(chunk);
                            const int run = ring.run(rank, chunk);
                            if (run >= 0) (pass == Pass::kForward ? forward : backward)[run].push_back(chunk);
                        }
                    }
                    std::sort(seen.begin(), seen.end());
                    for (int chunk = 0; chunk < num_chunks; ++chunk) EXPECT_EQ(seen[chunk], chunk);
                }
                std::vector<int> newest_to_oldest;
                for (int run = 0; run < ring.num_runs(); ++run) {
                    newest_to_oldest.insert(newest_to_oldest.end(), forward[run].begin(), forward[run].end());
                    std::reverse(backward[run].begin(), backward[run].end());
                    EXPECT_EQ(forward[run], backward[run]) << "run " << run;
                }
                const int own = layout == Layout::kZigzag ? num_chunks - 1 - rank : rank;
                ASSERT_EQ(newest_to_oldest.size(), static_cast<size_t>(own) + 1);
                for (int chunk = own; chunk >= 0; --chunk) EXPECT_EQ(newest_to_oldest[own - chunk], chunk);
            }
        }
    }
}

// Expects that each query meets every key of its document at its own or an older position exactly once. The keys of a
// query come newest to oldest if the buffers are processed in the order `buffer_order`. local: the stream rows of the
// queries; a row kNoRow meets no key.
void expect_all_pairs_once(const Stream& stream, const Partition& partition, const SegmentPlan& segment_plan,
                           const std::vector<int64_t>& local, const std::vector<int>& buffer_order,
                           const std::function<std::vector<Piece>(int)>& key_buffer) {
    const std::vector<int> document_of = stream.documents();
    std::vector<std::vector<std::vector<int64_t>>> keys_of(local.size(),
                                                           std::vector<std::vector<int64_t>>(segment_plan.runs.size()));
    for (const int buffer : buffer_order) {
        const BufferSegments& buffer_segments = segment_plan.buffers[buffer];
        EXPECT_EQ(buffer_segments.segments.empty(), buffer_segments.run < 0);
        std::vector<int64_t> key_rows;
        for (const Piece& piece : key_buffer(buffer)) {
            for (int32_t i = 0; i < piece.length; ++i) key_rows.push_back(piece.stream_row + i);
        }
        std::vector<int> segments_of(local.size(), 0);
        for (const Segment& segment : buffer_segments.segments) {
            const Run& run = segment_plan.runs[buffer_segments.run];
            EXPECT_GE(segment.q_begin, 0);
            EXPECT_LE(segment.q_begin + segment.q_len, run.num_rows);
            EXPECT_LE(segment.k_begin + segment.k_len, static_cast<int32_t>(key_rows.size()));
            EXPECT_GT(segment.k_len, 0);
            for (int32_t j = 0; j < segment.q_len; ++j) {
                const int32_t row = run.row_begin + segment.q_begin + j;
                EXPECT_EQ(++segments_of[row], 1);
                for (int32_t i = std::min(segment.k_len - 1, j + segment.q_pos_minus_k_pos); i >= 0; --i) {
                    keys_of[row][buffer_segments.run].push_back(key_rows[segment.k_begin + i]);
                }
            }
        }
    }
    for (size_t row = 0; row < local.size(); ++row) {
        std::vector<int64_t> seen, expected;
        for (const auto& run : keys_of[row]) seen.insert(seen.end(), run.begin(), run.end());
        for (int64_t key = local[row]; key >= 0 && document_of[local[row]] < partition.num_documents(); --key) {
            if (document_of[key] == document_of[local[row]]) expected.push_back(key);
        }
        EXPECT_EQ(seen, expected) << "stream row " << local[row];
    }
}

TEST(SegmentPlan, HoldsEveryVisiblePairOnceAndInOrder) {
    for (int size = 1; size <= 8; ++size) {
        for (const Stream& stream : streams(size, 23 * size)) {
            for (const Layout layout : kEqualChunks) {
                const Partition partition = stream.partition(layout, size);
                const Schedule ring(layout, size);
                for (int rank = 0; rank < size; ++rank) {
                    SCOPED_TRACE(testing::Message()
                                 << stream.name << ", " << name_of(layout) << ", rank " << rank << " of " << size);
                    const std::vector<int64_t> local = partition.local_positions(rank);
                    std::vector<int> order;
                    for (int step = 0; step < ring.num_steps(); ++step) {
                        for (int lane = 0; lane < ring.num_lanes(); ++lane) {
                            order.push_back(ring.chunk(lane, Pass::kForward, rank, step));
                        }
                    }
                    expect_all_pairs_once(stream, partition, ring_segments(partition, rank), local, order,
                                          [&](int chunk) { return partition.chunk(chunk); });
                    expect_all_pairs_once(stream, partition, gather_segments(partition, rank), local, {0},
                                          [&](int) { return partition.stream(); });
                }
            }
        }
    }
}

TEST(SegmentPlan, GathersEveryVisiblePairOfABalancedLayout) {
    for (int size = 1; size <= 8; ++size) {
        for (const Stream& stream : streams(size, 29 * size)) {
            const Partition partition = stream.partition(Layout::kBalanced, size);
            for (int rank = 0; rank < size; ++rank) {
                SCOPED_TRACE(testing::Message() << stream.name << ", rank " << rank << " of " << size);
                expect_all_pairs_once(stream, partition, gather_segments(partition, rank),
                                      partition.local_positions(rank), {0}, [&](int) { return partition.stream(); });
            }
        }
    }
}

// Ranks that get only the key rows that they need compute the same pairs.
TEST(KeyRows, HoldEveryVisiblePair) {
    for (int size = 1; size <= 8; ++size) {
        for (const Stream& stream : streams(size, 37 * size)) {
            for (const Layout layout : {Layout::kZigzag, Layout::kContiguous, Layout::kBalanced}) {
                const Partition partition = stream.partition(layout, size);
                for (int rank = 0; rank < size; ++rank) {
                    SCOPED_TRACE(testing::Message() << stream.name << ", rank " << rank << " of " << size);
                    const KeyRows rows = key_rows(partition, rank);
                    const std::vector<int64_t> local = partition.local_positions(rank);
                    std::vector<int64_t> shared, own = local;
                    for (const int64_t row : rows.shared_rows) {
                        shared.push_back(local[row]);
                        own[row] = kNoRow;
                    }
                    expect_all_pairs_once(stream, partition, gather_segments(partition, rows), shared, {0},
                                          [&](int) { return rows.pieces; });
                    if (rows.own.empty()) continue;
                    const SegmentPlan alone{{{0, static_cast<int32_t>(local.size())}}, {{0, rows.own}}};
                    expect_all_pairs_once(stream, partition, alone, own, {0},
                                          [&](int) { return partition.local(rank); });
                }
            }
        }
    }
}

// What the other ranks send, in order, fills the buffer. No row of it is of a document without queries, or of one that
// no other rank has.
TEST(KeyRows, RanksSendWhatTheOthersNeed) {
    for (int size = 1; size <= 8; ++size) {
        for (const Stream& stream : streams(size, 41 * size)) {
            for (const Layout layout : {Layout::kZigzag, Layout::kContiguous, Layout::kBalanced}) {
                const Partition partition = stream.partition(layout, size);
                const std::vector<int> document_of = stream.documents();
                for (int rank = 0; rank < size; ++rank) {
                    SCOPED_TRACE(testing::Message() << stream.name << ", rank " << rank << " of " << size);
                    const KeyRows rows = key_rows(partition, rank);
                    std::vector<int64_t> buffer, filled(rows.num_rows, -1), last_query(document_of.size(), -1);
                    for (const Piece& piece : rows.pieces) {
                        EXPECT_EQ(piece.begin, static_cast<int64_t>(buffer.size()));
                        for (int32_t i = 0; i < piece.length; ++i) buffer.push_back(piece.stream_row + i);
                    }
                    std::set<int> on_other_rank;
                    const auto fill = [&](int from, const RowRange& range) {
                        const std::vector<int64_t> positions = partition.local_positions(from);
                        for (int64_t i = 0; i < range.count; ++i) {
                            EXPECT_EQ(filled.at(range.place + i), -1);
                            filled.at(range.place + i) = positions.at(range.local + i);
                        }
                    };
                    for (const RowRange& range : rows.kept) fill(rank, range);
                    for (int other = 0; other < size; ++other) {
                        const KeyRows theirs = key_rows(partition, other);
                        ASSERT_EQ(theirs.sent[rank].size(), rows.received[other].size());
                        for (size_t i = 0; i < rows.received[other].size(); ++i) {
                            EXPECT_EQ(theirs.sent[rank][i].local, rows.received[other][i].local);
                            EXPECT_EQ(theirs.sent[rank][i].count, rows.received[other][i].count);
                            fill(other, rows.received[other][i]);
                        }
                        const std::vector<int64_t> own = partition.local_positions(rank);
                        for (const RowRange& range : rows.sent[other]) {
                            for (int64_t i = 0; i < range.count; ++i) {
                                EXPECT_EQ(buffer.at(range.place + i), own.at(range.local + i));
                            }
                        }
                    }
                    EXPECT_EQ(filled, buffer);
                    for (const int64_t row : partition.local_positions(rank)) {
                        last_query[document_of[row]] = std::max(last_query[document_of[row]], row);
                    }
                    for (const int64_t row : buffer) EXPECT_LE(row, last_query[document_of[row]]);
                    for (int other = 0; other < size; ++other) {
                        for (const int64_t row : partition.local_positions(other)) {
                            if (other != rank) on_other_rank.insert(document_of[row]);
                        }
                    }
                    for (const int64_t row : buffer) EXPECT_EQ(on_other_rank.count(document_of[row]), 1U);
                }
            }
        }
    }
}

TEST(KeyRows, AreFewForShortDocuments) {
    std::vector<int64_t> short_documents{0};
    while (short_documents.back() < 1024) short_documents.push_back(short_documents.back() + 16);
    const auto few = [&](Layout layout, const std::vector<int64_t>& cu_seqlens) {
        return count_if_few(Partition(layout, Packing::kWholeStream, 4, 1024, cu_seqlens)).has_value();
    };
    EXPECT_TRUE(few(Layout::kContiguous, short_documents));
    EXPECT_TRUE(few(Layout::kZigzag, short_documents));
    EXPECT_TRUE(few(Layout::kBalanced, short_documents));
    const Partition short_ones(Layout::kContiguous, Packing::kWholeStream, 4, 1024, short_documents);
    EXPECT_TRUE(count_if_few(short_ones)->fit_in_ring(short_ones));
    // Rank 3 has rows of one document only, which begins on rank 0.
    const Partition long_one(Layout::kContiguous, Packing::kWholeStream, 4, 1024, std::vector<int64_t>{0, 16, 1024});
    EXPECT_FALSE(count_if_few(long_one)->fit_in_ring(long_one));
    EXPECT_FALSE(few(Layout::kContiguous, {0, 1024}));  // ranks receive 0 + 1/4 + 2/4 + 3/4 of 4 * 3/4
    EXPECT_FALSE(count_if_few(Partition(Layout::kZigzag, Packing::kPerDocument, 4, 1024, short_documents)));
    EXPECT_FALSE(count_if_few(Partition(Layout::kBalanced, Packing::kPerDocument, 1, 1024, short_documents)));
}

TEST(SegmentPlan, ABalancedLayoutHasNoRing) {
    const Partition partition(Layout::kBalanced, Packing::kPerDocument, 2, 16, std::nullopt);
    EXPECT_THROW(ring_segments(partition, 0), InvalidArgument);
}

// All runs except the last cover only the high chunk of the rank. This saves memory for partial outputs in long
// contexts.
TEST(SegmentPlan, OnlyTheLastRunCoversAllRows) {
    const Partition partition(Layout::kZigzag, Packing::kPerDocument, 4, 64, std::nullopt);
    for (int rank = 0; rank < 4; ++rank) {
        const SegmentPlan segment_plan = ring_segments(partition, rank);
        ASSERT_EQ(segment_plan.runs.size(), rank == 3 ? 2U : 3U);
        EXPECT_EQ(segment_plan.runs.front().row_begin, 8);
        EXPECT_EQ(segment_plan.runs.front().num_rows, 8);
        EXPECT_EQ(segment_plan.runs.back().row_begin, 0);
        EXPECT_EQ(segment_plan.runs.back().num_rows, 16);
    }
}

// A query piece has at most one segment in each key buffer, although its document can have several pieces there.
TEST(SegmentPlan, HasOneSegmentForEachQueryPieceAndBuffer) {
    const Partition partition(Layout::kZigzag, Packing::kPerDocument, 2, 16, std::vector<int64_t>{0, 8, 16});
    const SegmentPlan segment_plan = ring_segments(partition, 0);
    std::map<int, size_t> count;
    for (size_t chunk = 0; chunk < segment_plan.buffers.size(); ++chunk)
        count[chunk] = segment_plan.buffers[chunk].segments.size();
    EXPECT_EQ(count, (std::map<int, size_t>{{0, 4}, {1, 2}, {2, 2}, {3, 2}}));
    EXPECT_EQ(gather_segments(partition, 0).buffers[0].segments.size(), 4U);
}

// Pieces that follow each other in the buffer and in their document share a segment.
TEST(SegmentPlan, OfOneRankHasWholeDocuments) {
    for (const Layout layout : {Layout::kZigzag, Layout::kContiguous}) {
        const Partition partition(layout, Packing::kPerDocument, 1, 16, std::vector<int64_t>{0, 6, 16});
        const std::vector<Segment> segments = gather_segments(partition, 0).buffers[0].segments;
        ASSERT_EQ(segments.size(), 2U);
        const auto fields = [](const Segment& s) {
            return std::vector<int32_t>{s.q_begin, s.q_len, s.k_begin, s.k_len, s.q_pos_minus_k_pos};
        };
        EXPECT_EQ(fields(segments[0]), (std::vector<int32_t>{0, 6, 0, 6, 0}));
        EXPECT_EQ(fields(segments[1]), (std::vector<int32_t>{6, 10, 6, 10, 0}));
    }
    const Partition partition(Layout::kZigzag, Packing::kPerDocument, 2, 16, std::vector<int64_t>{0, 16});
    EXPECT_EQ(gather_segments(partition, 0).buffers[0].segments.size(), 2U);  // chunks 0 and 3
    EXPECT_EQ(gather_segments(partition, 1).buffers[0].segments.size(), 1U);  // chunks 1 and 2
}

}  // namespace
}  // namespace megatron_sb::plan
