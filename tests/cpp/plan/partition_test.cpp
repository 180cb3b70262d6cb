#include "plan/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/error.h"
#include "messages.h"
#include "streams.h"

namespace megatron_sb::plan {
namespace {

using Rows = std::vector<int64_t>;

// Returns the stream rows of a rank, computed from the definition of the layouts: the rows that remain after a document
// is divided are dealt to its parts one by one, and the next document goes on where this one stopped.
Rows expected_rows(const Stream& stream, Layout layout, int size, int rank) {
    Rows bounds = stream.cu_seqlens.value_or(Rows{0, stream.seq_len});
    if (bounds.back() < stream.seq_len) bounds.push_back(stream.seq_len);
    if (stream.packing == Packing::kWholeStream) bounds = {0, stream.seq_len};
    const int num_chunks = layout == Layout::kZigzag ? 2 * size : size;
    Rows rows;
    int dealt_to = 0;
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
        const int64_t length = bounds[i + 1] - bounds[i];
        Rows part_lengths(num_chunks, length / num_chunks);
        for (int64_t left = length % num_chunks; left > 0; --left, ++dealt_to) ++part_lengths[dealt_to % num_chunks];
        int64_t row = bounds[i];
        for (int part = 0; part < num_chunks; ++part) {
            for (int64_t j = 0; j < part_lengths[part]; ++j, ++row) {
                const bool low = part == rank, high = layout == Layout::kZigzag && part == num_chunks - 1 - rank;
                if (low || high) rows.push_back(row);
            }
        }
    }
    return rows;
}

constexpr Layout kLayouts[] = {Layout::kZigzag, Layout::kContiguous, Layout::kBalanced};

void for_each_partition(const std::function<void(const Stream&, Layout, int)>& check) {
    for (int size = 1; size <= 8; ++size) {
        for (const Stream& stream : streams(size, 17 * size)) {
            for (const Layout layout : kLayouts) {
                SCOPED_TRACE(testing::Message() << stream.name << ", " << name_of(layout) << ", " << size << " ranks");
                check(stream, layout, size);
            }
        }
    }
}

// Returns the message of the error that the arguments raise, or "accepted".
std::string error_of(Layout layout, Packing packing, int size, int64_t seq_len, std::optional<Rows> cu_seqlens) {
    try {
        Partition(layout, packing, size, seq_len, cu_seqlens);
    } catch (const InvalidArgument& error) {
        return error.what();
    }
    return "accepted";
}

TEST(Partition, GivesEachRankTheRowsOfTheDefinition) {
    for_each_partition([](const Stream& stream, Layout layout, int size) {
        const Partition partition = stream.partition(layout, size);
        Rows all;
        for (int rank = 0; rank < size; ++rank) {
            const Rows rows = partition.local_positions(rank);
            // The tests of balanced_partition.h check which rows a rank gets with this layout.
            if (layout != Layout::kBalanced) {
                EXPECT_EQ(rows, expected_rows(stream, layout, size, rank)) << "rank " << rank;
            }
            EXPECT_TRUE(layout != Layout::kBalanced || std::is_sorted(rows.begin(), rows.end()));
            EXPECT_EQ(static_cast<int64_t>(rows.size()), partition.num_local_rows(rank));
            all.insert(all.end(), rows.begin(), rows.end());
        }
        Rows gathered = partition.gathered_positions();
        EXPECT_EQ(static_cast<int64_t>(gathered.size()), size * partition.max_local_rows());
        std::erase(gathered, kNoRow);
        EXPECT_EQ(gathered, all);
        std::sort(all.begin(), all.end());
        for (int64_t row = 0; row < stream.seq_len; ++row) EXPECT_EQ(all[row], row);
    });
}

TEST(Partition, CutsPackedDocumentsInMegatronsZigzagOrder) {
    const Partition partition(Layout::kZigzag, Packing::kPerDocument, 2, 12, Rows{0, 8, 8, 12});
    EXPECT_EQ(partition.local_positions(0), (Rows{0, 1, 6, 7, 8, 11}));
    EXPECT_EQ(partition.local_positions(1), (Rows{2, 3, 4, 5, 9, 10}));
    EXPECT_EQ(partition.chunk_rows(0, 0), (Rows{0, 1, 4}));
    EXPECT_EQ(partition.chunk_rows(0, 3), (Rows{2, 3, 5}));
}

TEST(Partition, PiecesCoverTheirBuffersInOrder) {
    for_each_partition([](const Stream& stream, Layout layout, int size) {
        const Partition partition = stream.partition(layout, size);
        const std::vector<int> document_of = stream.documents();
        const Rows bounds = stream.cu_seqlens.value_or(Rows{0, stream.seq_len});
        const auto check = [&](const std::vector<Piece>& pieces, int64_t num_rows) {
            int64_t begin = 0;
            for (const Piece& piece : pieces) {
                EXPECT_EQ(piece.begin, begin);
                EXPECT_GT(piece.length, 0);
                begin += piece.length;
                EXPECT_EQ(piece.document, document_of[piece.stream_row]);
                EXPECT_EQ(piece.document, document_of[piece.stream_row + piece.length - 1]);
                EXPECT_EQ(piece.position, piece.stream_row - bounds[piece.document]);
            }
            EXPECT_EQ(begin, num_rows);
        };
        check(partition.stream(), stream.seq_len);
        for (int rank = 0; rank < size; ++rank) {
            check(partition.local(rank), partition.num_local_rows(rank));
            const Rows local = partition.local_positions(rank);
            for (const int chunk : partition.chunks_of(rank)) {
                check(partition.chunk(chunk), partition.num_chunk_rows(chunk));
                const Rows rows = partition.chunk_rows(rank, chunk);
                size_t next = 0;
                for (const Piece& piece : partition.chunk(chunk)) {
                    for (int32_t i = 0; i < piece.length; ++i) EXPECT_EQ(local[rows[next++]], piece.stream_row + i);
                }
                EXPECT_EQ(next, rows.size());
            }
        }
    });
}

TEST(Partition, ChunksAndRanksHaveEqualRowsOrOneMore) {
    for_each_partition([](const Stream& stream, Layout layout, int size) {
        const Partition partition = stream.partition(layout, size);
        const auto expect_even = [&](const Rows& rows) {
            const auto [least, most] = std::minmax_element(rows.begin(), rows.end());
            EXPECT_LE(*most - *least, 1);
            EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), int64_t{0}), stream.seq_len);
        };
        Rows of_chunks, of_ranks;
        for (int chunk = 0; chunk < partition.num_chunks(); ++chunk)
            of_chunks.push_back(partition.num_chunk_rows(chunk));
        for (int rank = 0; rank < size; ++rank) of_ranks.push_back(partition.num_local_rows(rank));
        expect_even(of_chunks);
        expect_even(of_ranks);
        EXPECT_EQ(partition.max_local_rows(), (stream.seq_len + size - 1) / size);
        EXPECT_EQ(partition.rank_with_other_rows(of_ranks), -1);
        for (int rank = size - 1; rank >= 0; --rank) {  // the first of several counts
            ++of_ranks[rank];
            EXPECT_EQ(partition.rank_with_other_rows(of_ranks), rank);
        }
    });
}

// Ranks that exchange heads act as one rank, which has the rows of all of them.
TEST(Partition, FewerRanksHoldTheRowsOfTheirRanks) {
    for_each_partition([](const Stream& stream, Layout layout, int size) {
        const Partition partition = stream.partition(layout, size);
        for (int fewer = 1; fewer <= size; ++fewer) {
            if (size % fewer != 0) continue;
            const Partition joint = partition.over(fewer);
            for (int rank = 0; rank < fewer; ++rank) {
                Rows rows, of_joint = joint.local_positions(rank);
                for (int i = rank * size / fewer; i < (rank + 1) * size / fewer; ++i) {
                    const Rows part = partition.local_positions(i);
                    rows.insert(rows.end(), part.begin(), part.end());
                }
                std::sort(rows.begin(), rows.end());
                std::sort(of_joint.begin(), of_joint.end());
                EXPECT_EQ(of_joint, rows) << rank << " of " << fewer;
            }
        }
    });
}

TEST(Partition, DealsTheRowsThatRemain) {
    const Partition partition(Layout::kZigzag, Packing::kPerDocument, 2, 12, Rows{0, 5, 6, 12});  // 4 parts
    // Document 0 has 5 rows, and part 0 gets the fifth. Document 1 has one row, in part 1. Document 2 has 6 rows, and
    // parts 2 and 3 get two each.
    EXPECT_EQ(partition.local_positions(0), (Rows{0, 1, 4, 6, 10, 11}));
    EXPECT_EQ(partition.local_positions(1), (Rows{2, 3, 5, 7, 8, 9}));
}

TEST(Partition, ChunkRowsOfAnotherRankRaiseAnError) {
    const Partition partition(Layout::kZigzag, Packing::kPerDocument, 2, 8, std::nullopt);
    EXPECT_THROW(partition.chunk_rows(0, 1), InvalidArgument);
}

// The sum of these rows would wrap to 8.
TEST(Partition, RowsWhoseSumOverflowsAreAnError) {
    const int64_t many = (int64_t{1} << 62) + 2;
    for (const Rows& rows : {Rows(4, many), Rows{4, 9, -5}}) {
        try {
            sum_of_rows("local_len", rows);
            FAIL() << "no error";
        } catch (const InvalidArgument& error) {
            EXPECT_TRUE(mentions(error.what(), rows.size() == 4 ? "local_len 4611686018427387906 0" : "local_len 5 2"));
        }
    }
    EXPECT_EQ(sum_of_rows("local_len", {3, 0, 5}), 8);
}

TEST(Partition, ErrorsNameArgumentAndValue) {
    const auto zigzag = Layout::kZigzag;
    const auto each = Packing::kPerDocument, whole = Packing::kWholeStream;
    EXPECT_TRUE(mentions(error_of(zigzag, whole, 2, 20, Rows{}), "cu_seqlens none"));
    EXPECT_TRUE(mentions(error_of(zigzag, whole, 2, 20, Rows{4, 20}), "cu_seqlens[0] 0 4"));
    EXPECT_TRUE(mentions(error_of(zigzag, whole, 2, 20, Rows{0, 8, 6, 20}), "cu_seqlens[1] 8 cu_seqlens[2] 6"));
    EXPECT_TRUE(mentions(error_of(zigzag, whole, 2, 20, Rows{0, 8, 24}), "cu_seqlens seq_len 20 24"));
    EXPECT_TRUE(mentions(error_of(zigzag, each, 2, 0, std::nullopt), "seq_len 1 0"));
    EXPECT_TRUE(mentions(error_of(zigzag, each, 0, 8, std::nullopt), "size group 1 0"));
    EXPECT_TRUE(mentions(error_of(zigzag, each, 1 << 30, 8, std::nullopt), "size group 1073741823 1073741824"));
}

TEST(Partition, ParsesTheNamesThatItWrites) {
    for (const Layout layout : kLayouts) EXPECT_EQ(parse_layout(name_of(layout)), layout);
    for (const Packing packing : {Packing::kPerDocument, Packing::kWholeStream}) {
        EXPECT_EQ(parse_packing(name_of(packing)), packing);
    }
    EXPECT_THROW(parse_layout("striped"), InvalidArgument);
    EXPECT_THROW(parse_packing(""), InvalidArgument);
}

}  // namespace
}  // namespace megatron_sb::plan
