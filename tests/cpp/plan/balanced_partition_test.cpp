#include "plan/balanced_partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <numeric>
#include <random>
#include <string>

namespace megatron_sb::plan {
namespace {

using Offsets = std::vector<int64_t>;

struct PackedStream {
    std::string name;
    Offsets cu_seqlens;
    int64_t seq_len;

    int64_t longest() const {
        int64_t rows = 0;
        for (size_t i = 0; i + 1 < cu_seqlens.size(); ++i) rows = std::max(rows, cu_seqlens[i + 1] - cu_seqlens[i]);
        return rows;
    }
};

int64_t rounded_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Returns a stream of documents with lengths from `length`.
PackedStream pack(const std::string& name, int documents, const std::function<double()>& length) {
    Offsets cu_seqlens{0};
    for (int i = 0; i < documents; ++i) cu_seqlens.push_back(cu_seqlens.back() + static_cast<int64_t>(length()));
    return {name, cu_seqlens, std::max<int64_t>(cu_seqlens.back(), 1)};
}

// Streams whose documents are short, long, empty, of one row, or one giant among them.
std::vector<PackedStream> random_streams(int size, std::mt19937& random) {
    const auto pick = [&random](int limit) { return static_cast<int>(random() % limit); };
    std::lognormal_distribution<> web(std::log(600), 1.2), code(std::log(800), 2), books(std::log(60000), 0.7);
    PackedStream giant = pack("one giant", 20, [&] { return pick(20) == 0 ? 1e5 + pick(100000) : pick(500); });
    PackedStream tail = pack("a long tail", 1 + pick(20), [&] { return pick(3000); });
    tail.seq_len += pick(2000 * size);
    return {
        pack("short", 1 + pick(500), [&] { return pick(40); }),
        pack("one row each", 1 + pick(300), [&] { return 1; }),
        pack("one row or none", 1 + pick(300), [&] { return pick(2); }),
        pack("all empty", pick(4), [&] { return 0; }),
        pack("one document", 1, [&] { return 1 + pick(300000); }),
        pack("two documents", 2, [&] { return 1 + pick(100000); }),
        pack("web", 1 + pick(600), [&] { return web(random); }),
        pack("code", 1 + pick(300), [&] { return code(random); }),
        pack("books", 1 + pick(20), [&] { return books(random); }),
        giant,
        tail,
    };
}

void for_each_stream(const std::function<void(const PackedStream&, int)>& check) {
    std::mt19937 random(3);
    for (const int size : {1, 2, 3, 4, 5, 7, 8, 16, 64, 256}) {
        for (int round = 0; round < (size > 16 ? 5 : 20); ++round) {
            for (const PackedStream& stream : random_streams(size, random)) {
                SCOPED_TRACE(testing::Message() << stream.name << ", " << size << " ranks, seq_len " << stream.seq_len
                                                << ", cu_seqlens " << testing::PrintToString(stream.cu_seqlens));
                check(stream, size);
                if (testing::Test::HasFailure()) return;
            }
        }
    }
}

// Counts the tiles of a piece one by one.
int64_t count_tiles(int64_t position, int64_t length) {
    int64_t tiles = 0;
    for (int64_t row = 0; row < length; row += kWorkTileRows) {
        const int64_t keys = position + std::min<int64_t>(row + kWorkTileRows, length) - 1;  // that the last row sees
        tiles += std::max<int64_t>(1, rounded_up(keys, kWorkTileKeys) / kWorkTileKeys);
    }
    return tiles;
}

TEST(BalancedPartition, CountsTheTilesOfAPiece) {
    for (int64_t position = 0; position < 400; ++position) {
        for (int64_t length = 0; length < 400; ++length) {
            ASSERT_EQ(piece_tiles(position, length), count_tiles(position, length)) << position << ", " << length;
        }
    }
    EXPECT_EQ(piece_tiles(123457, 98765), count_tiles(123457, 98765));
}

TEST(BalancedPartition, CountsTheTilesOfARank) {
    const Offsets cu_seqlens{0, 100, 100, 1000};
    const std::vector<Span> spans{{0, 50, 0}, {50, 300, 1}, {300, 700, 0}, {700, 1100, 1}};
    EXPECT_EQ(rank_tiles(cu_seqlens, spans, 2),
              (std::vector<int64_t>{count_tiles(0, 50) + count_tiles(200, 400),
                                    count_tiles(50, 50) + count_tiles(0, 200) + count_tiles(600, 300)}));
}

TEST(BalancedPartition, GivesEachRowToOneRankAndEachRankAsManyRowsOrOneMore) {
    for_each_stream([](const PackedStream& stream, int size) {
        const std::vector<Span> spans = balanced_spans(stream.cu_seqlens, stream.seq_len, size);
        ASSERT_LT(static_cast<int>(spans.size()), 4 * size);
        std::vector<int64_t> rows(size, 0);
        int64_t row = 0;
        int ranks = 0;
        for (size_t i = 0; i < spans.size(); ++i) {
            ASSERT_EQ(spans[i].begin, row);
            ASSERT_LT(spans[i].begin, spans[i].end);
            ASSERT_TRUE(i == 0 || spans[i].rank != spans[i - 1].rank);
            ASSERT_LE(spans[i].rank, ranks) << "ranks are not in the order of their first rows";
            ranks = std::max(ranks, spans[i].rank + 1);
            row = spans[i].end;
            rows[spans[i].rank] += spans[i].end - spans[i].begin;
        }
        EXPECT_EQ(row, stream.seq_len);
        EXPECT_EQ(std::count(rows.begin(), rows.end(), stream.seq_len / size + 1), stream.seq_len % size);
        EXPECT_EQ(std::count(rows.begin(), rows.end(), stream.seq_len / size), size - stream.seq_len % size);
    });
}

// A rank is above the bound of 5% only if the tiles of a few rows are a large part of its work.
TEST(BalancedPartition, BalancesTheWork) {
    double worst = 0;
    for_each_stream([&worst](const PackedStream& stream, int size) {
        const std::vector<Span> spans = balanced_spans(stream.cu_seqlens, stream.seq_len, size);
        const std::vector<int64_t> tiles = rank_tiles(stream.cu_seqlens, spans, size);
        const double mean = std::accumulate(tiles.begin(), tiles.end(), 0.0) / size;
        const double most = static_cast<double>(*std::max_element(tiles.begin(), tiles.end()));
        const double row_of_tiles = static_cast<double>(rounded_up(stream.longest(), kWorkTileKeys) / kWorkTileKeys);
        const double limit = 1 + kMaxImbalancePercent / 100.0;
        EXPECT_LE(most, limit * mean + 2 * row_of_tiles);
        if (mean > 50 * row_of_tiles) {
            EXPECT_LE(most, limit * mean);
        }
        if (row_of_tiles > 0) worst = std::max(worst, (most - limit * mean) / row_of_tiles);
    });
    std::cout << "[ balance  ] largest excess over the limit: " << worst << " rows of tiles of the longest document\n";
}

TEST(BalancedPartition, OneDocumentHasTheBalanceOfZigzag) {
    for (const int size : {2, 3, 4, 8, 16}) {
        const int64_t seq_len = 128 * 2 * size * 8;
        const std::vector<int64_t> tiles = rank_tiles({0, seq_len}, balanced_spans({0, seq_len}, seq_len, size), size);
        EXPECT_EQ(tiles, std::vector<int64_t>(size, tiles[0])) << size << " ranks";
    }
}

TEST(BalancedPartition, CutsNothingThatIsBalancedAlready) {
    Offsets cu_seqlens{0};
    for (int i = 0; i < 16; ++i) cu_seqlens.push_back(cu_seqlens.back() + 1000);
    const std::vector<Span> spans = balanced_spans(cu_seqlens, 16000, 4);
    ASSERT_EQ(spans.size(), 4U);
    for (int rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(spans[rank].rank, rank);
        EXPECT_EQ(spans[rank].begin, 4000 * rank);
    }
}

TEST(BalancedPartition, RepeatsItsResult) {
    for_each_stream([](const PackedStream& stream, int size) {
        const std::vector<Span> first = balanced_spans(stream.cu_seqlens, stream.seq_len, size);
        const std::vector<Span> second = balanced_spans(stream.cu_seqlens, stream.seq_len, size);
        EXPECT_TRUE(std::equal(
            first.begin(), first.end(), second.begin(), second.end(),
            [](const Span& a, const Span& b) { return a.begin == b.begin && a.end == b.end && a.rank == b.rank; }));
    });
}

// It takes 2 to 5 ms. The bound is for a busy machine.
TEST(BalancedPartition, IsFast) {
    std::mt19937 random(1);
    std::lognormal_distribution<> length(std::log(800), 1.5);
    const PackedStream stream = pack("4096 documents", 4096, [&] { return 1 + length(random); });
    double least = 1e9;
    for (int i = 0; i < 5; ++i) {
        const auto start = std::chrono::steady_clock::now();
        EXPECT_FALSE(balanced_spans(stream.cu_seqlens, stream.seq_len, 256).empty());
        const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
        least = std::min(least, taken.count());
    }
    std::cout << "[ time     ] 4096 documents over 256 ranks: " << least << " ms\n";
    EXPECT_LT(least, 50);
}

}  // namespace
}  // namespace megatron_sb::plan
