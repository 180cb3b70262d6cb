// The order in which CTAs of the Hopper backward take key tiles.
#if defined(SB_WITH_CUDA)

#include <gtest/gtest.h>

#include <vector>

#include "kernels/hopper/bwd_order.h"

namespace megatron_sb::hopper {
namespace {

Sizes sizes_of(int length, int head_dim, int heads, int kv_heads, int batch) {
    return {Dtype::kBFloat16, 0, batch, heads, kv_heads, length, length, head_dim, head_dim};
}

TEST(TicketOrder, HandsOutEachPartOnceAndOlderTilesFirst) {
    for (const HeadOrder order : {HeadOrder{1, 1, 1},
                                  {1, 3, 1},
                                  {1, 16, 1},
                                  {1, HeadOrder::kOneAfterAnother, 1},
                                  {2, 5, 1},
                                  {5, 7, 1},
                                  {3, HeadOrder::kOneAfterAnother, 1},
                                  {7, HeadOrder::kOneAfterAnother, 1}})
        for (const int heads : {1, 2, 7, 24})
            for (const int tiles : {1, 2, 16, 37})
                for (const int parts : {1, 4, 1}) {
                    const TicketOrder tickets(order, heads, tiles, parts);
                    std::vector<int> next(heads);  // next tile and part of each head
                    Work work;
                    int ticket = 0;
                    for (; tickets.is_before_end(ticket); ++ticket)
                        if (tickets.find(ticket, &work)) {
                            ASSERT_GE(work.head, 0);
                            ASSERT_LT(work.head, heads);
                            ASSERT_EQ(next[work.head]++, work.key_tile * parts + work.part);
                        }
                    for (const int count : next) ASSERT_EQ(count, tiles * parts);
                    ASSERT_FALSE(tickets.is_before_end(ticket + 1000));
                }
}

TEST(TicketOrder, HasNoTicketsWithoutKeyTiles) {
    EXPECT_FALSE(TicketOrder({1, 4, 1}, 3, 0, 1).is_before_end(0));
    EXPECT_FALSE(TicketOrder({3, HeadOrder::kOneAfterAnother, 1}, 3, 0, 1).is_before_end(0));
}

HeadOrder order_of(const Sizes& z, int num_segments = 1) {
    static const Segment table[1] = {};
    Segments segments;
    segments.size = num_segments;
    segments.whole = document_segment(0, z.q_rows, 0, z.k_rows);
    if (num_segments > 1) segments.data = table;  // whose values the host does not read
    return choose_head_order(z, segments, false);
}
// All rows see all keys, as for a block of older keys in a ring.
HeadOrder order_of_older_keys(Sizes z) {
    Segments segments;
    segments.whole = {0, z.q_rows, 0, z.k_rows, z.k_rows};
    return choose_head_order(z, segments, false);
}

// With a segment table, the rows of a group of documents and heads stay in the L2 cache.
TEST(TicketOrder, GroupsDocuments) {
    struct Case {
        HeadOrder order;
        int heads_together, rows_together;
    };
    for (const auto& [order, heads_together, rows_together] : {
             Case{order_of(sizes_of(65536, 128, 12, 12, 1), 100), 3, 16384},
             Case{order_of(sizes_of(65536, 64, 24, 24, 1), 100), 6, 16384},
             Case{order_of(sizes_of(65536, 128, 32, 8, 1), 100), 3, 4096},
             Case{order_of(sizes_of(65536, 128, 8, 1, 1), 100), 1, 2048},
             Case{order_of(sizes_of(65536, 256, 8, 8, 1), 100), 3, 8192},
             Case{order_of(sizes_of(8192, 128, 12, 12, 1), 2), 6, 8192},
             Case{order_of(sizes_of(131072, 128, 12, 12, 1)), 3, 16384},
             Case{order_of(sizes_of(131072, 64, 24, 24, 1)), 6, 16384},
             Case{order_of(sizes_of(2048, 128, 12, 12, 1), 2), 12, 2048},
             Case{order_of(sizes_of(1 << 21, 128, 12, 12, 1), 100), 3, (1 << 21) / kMostDocumentGroups + 64},
             Case{order_of(sizes_of(1, 128, 1, 1, 1), 2), 1, 64},
         }) {
        EXPECT_EQ(order.heads_together, heads_together);
        EXPECT_EQ(order.distance, HeadOrder::kOneAfterAnother);
        EXPECT_EQ(order.steps_together, rows_together / 64);
    }
}

// In a dense call with many heads the tiles of a head are spread over time; else heads run in groups.
TEST(TicketOrder, IsChosenByTheSizes) {
    struct Case {
        HeadOrder order;
        int heads_together, distance;
    };
    constexpr int kGroups = HeadOrder::kOneAfterAnother;
    for (const auto& [order, heads_together, distance] : {
             Case{order_of(sizes_of(4096, 64, 24, 24, 8)), 1, 2},
             Case{order_of(sizes_of(8192, 64, 24, 24, 4)), 1, 4},
             Case{order_of(sizes_of(16384, 64, 24, 24, 2)), 1, 16},
             Case{order_of(sizes_of(32768, 64, 24, 24, 1)), 1, 64},
             Case{order_of(sizes_of(65536, 64, 24, 24, 1)), 1, 256},
             Case{order_of(sizes_of(16384, 64, 12, 12, 1)), 12, kGroups},
             Case{order_of(sizes_of(16384, 64, 32, 8, 1)), 8, kGroups},
             Case{order_of(sizes_of(4096, 64, 32, 8, 4)), 32, kGroups},
             Case{order_of(sizes_of(4096, 128, 12, 12, 8)), 1, 2},
             Case{order_of(sizes_of(4096, 128, 12, 12, 1)), 12, kGroups},
             Case{order_of(sizes_of(16384, 128, 12, 12, 2)), 1, 32},
             Case{order_of(sizes_of(16384, 128, 8, 8, 1)), 1, 32},
             Case{order_of(sizes_of(32768, 128, 12, 12, 1)), 1, 128},
             Case{order_of(sizes_of(65536, 128, 12, 12, 1)), 6, kGroups},
             Case{order_of(sizes_of(32768, 128, 32, 8, 1)), 4, kGroups},
             Case{order_of(sizes_of(16384, 128, 32, 8, 1)), 8, kGroups},
             Case{order_of(sizes_of(16384, 128, 4, 4, 1)), 4, kGroups},
             Case{order_of(sizes_of(0, 128, 12, 12, 1)), 12, kGroups},
             Case{order_of(sizes_of(16384, 256, 12, 12, 1)), 1, 128},
             Case{order_of(sizes_of(65536, 256, 12, 12, 1)), 6, kGroups},
             Case{order_of_older_keys(sizes_of(8192, 128, 12, 12, 2)), 1, 16},
             Case{order_of_older_keys(sizes_of(32768, 128, 12, 12, 1)), 4, kGroups},
         }) {
        EXPECT_EQ(order.heads_together, heads_together);
        EXPECT_EQ(order.distance, distance);
        EXPECT_EQ(order.steps_together, INT32_MAX);
    }
}

}  // namespace
}  // namespace megatron_sb::hopper

#endif
