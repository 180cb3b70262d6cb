#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "distributed/agreement.h"
#include "messages.h"
#include "ranks.h"

namespace megatron_sb::distributed {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

TEST(InProcessTransport, ExchangesInOrderWithBothNeighbours) {
    for (const int size : {2, 3, 5}) {
        run_ranks_or_throw(size, [size](Transport& transport) {
            const int rank = transport.rank(), next = (rank + 1) % size, previous = (rank + size - 1) % size;
            for (int step = 0; step < 3; ++step) {
                const at::Tensor to_next = at::full({2}, 10 * rank + step);
                const at::Tensor to_previous = at::full({3}, -10 * rank - step);
                const at::Tensor from_previous = at::empty_like(to_next), from_next = at::empty_like(to_previous);
                transport
                    .exchange({{next, to_next}, {previous, to_previous}},
                              {{previous, from_previous}, {next, from_next}})
                    ->wait();
                EXPECT_EQ(from_previous[0].item<int>(), 10 * previous + step);
                EXPECT_EQ(from_next[0].item<int>(), -10 * next - step);
            }
        });
    }
}

TEST(InProcessTransport, GathersAndReduceScatters) {
    run_ranks_or_throw(3, [](Transport& transport) {
        const int rank = transport.rank();
        const at::Tensor all = at::empty({3, 2}), mine = at::full({2}, rank, at::kFloat);
        transport.all_gather(mine, all)->wait();
        EXPECT_TRUE(all.equal(at::tensor({0.F, 0.F, 1.F, 1.F, 2.F, 2.F}).view({3, 2})));
        const at::Tensor sum = at::empty({2});
        transport.reduce_scatter_sum(all * (rank + 1), sum)->wait();
        EXPECT_TRUE(sum.equal(at::full({2}, 6 * rank, at::kFloat)));
    });
}

TEST(InProcessTransport, ExchangesAllToAll) {
    run_ranks_or_throw(3, [](Transport& transport) {
        // Rank i sends i rows to each rank: 10 i + to.
        const int rank = transport.rank();
        const at::Tensor mine = at::tensor({0, 1, 2}).repeat_interleave(rank).view({-1, 1}) + 10 * rank;
        const at::Tensor theirs = at::empty({3, 1}, mine.options());
        transport.all_to_all(mine, {rank, rank, rank}, theirs, {0, 1, 2})->wait();
        EXPECT_TRUE(theirs.equal(at::tensor({10, 20, 20}).view({3, 1}) + rank));
    });
}

TEST(InProcessTransport, DeliversMessagesOfAPeerInTheOrderOfSending) {
    run_ranks_or_throw(3, [](Transport& transport) {
        const at::Tensor theirs = at::empty({4}, at::kLong);
        std::vector<Message> sends, receives;
        for (int peer = 0, index = 0; peer < 3; ++peer) {
            if (peer == transport.rank()) continue;
            for (int i = 0; i < 2; ++i) {
                sends.push_back({peer, at::full({1}, 100 * transport.rank() + 10 * peer + i, at::kLong)});
                receives.push_back({peer, theirs.narrow(0, index++, 1)});
            }
        }
        transport.exchange(sends, receives)->wait();
        const int64_t rank = transport.rank(), first = rank == 0 ? 1 : 0, second = rank == 2 ? 1 : 2;
        const std::vector<int64_t> expected{100 * first + 10 * rank, 100 * first + 10 * rank + 1,
                                            100 * second + 10 * rank, 100 * second + 10 * rank + 1};
        EXPECT_TRUE(theirs.equal(at::tensor(expected)));
    });
}

TEST(InProcessTransport, WaitingForALostRankTimesOut) {
    const auto start = steady_clock::now();
    const auto thrown = run_ranks(
        3,
        [](Transport& transport) {
            if (transport.rank() == 1) return;
            const at::Tensor mine = at::zeros({2}), all = at::empty({3, 2});
            transport.all_gather(mine, all)->wait();
        },
        milliseconds(200));
    EXPECT_LT(steady_clock::now() - start, milliseconds(5000));
    EXPECT_TRUE(mentions(message_of<RuntimeFailure>(thrown[0]), "0 3 200 ms 1"));
    EXPECT_FALSE(thrown[1]);
    EXPECT_TRUE(mentions(message_of<RuntimeFailure>(thrown[2]), "2 3 200 ms 1"));
}

TEST(InProcessTransport, AMessageOfAnotherShapeRaisesAnError) {
    const auto thrown = run_ranks(2, [](Transport& transport) {
        const int peer = 1 - transport.rank();
        const at::Tensor mine = at::zeros({2 + transport.rank()}), theirs = at::empty({2});
        transport.exchange({{peer, mine}}, {{peer, theirs}})->wait();
    });
    EXPECT_TRUE(mentions(message_of<RuntimeFailure>(thrown[0]), "0 [3] 1 [2]"));
    EXPECT_FALSE(thrown[1]);
}

TEST(Agreement, PassesIfAllRanksHaveTheSameValues) {
    run_ranks_or_throw(4, [](Transport& transport) { agree(transport, "the test", {{"a", "1"}, {"b", "x"}}, ""); });
}

TEST(Agreement, ADisagreementNamesFieldRanksAndValuesOnEveryRank) {
    const auto thrown = run_ranks(4, [](Transport& transport) {
        agree(transport, "the test", {{"a", "1"}, {"b", transport.rank() == 2 ? "y" : "x"}}, "");
    });
    for (const auto& error : thrown) {
        EXPECT_TRUE(mentions(message_of<Disagreement>(error), "b the test 0 x 2 y"));
    }
}

TEST(Agreement, AnErrorOfOneRankIsRaisedOnEveryRank) {
    const auto thrown = run_ranks(3, [](Transport& transport) {
        agree(transport, "the test", {{"a", transport.rank() == 1 ? "" : "1"}},
              transport.rank() == 1 ? "a is missing" : "");
    });
    EXPECT_EQ(message_of<InvalidArgument>(thrown[1]), "a is missing");
    for (const int rank : {0, 2}) {
        EXPECT_TRUE(mentions(message_of<InvalidArgument>(thrown[rank]), "the test rank 1 a is missing"));
    }
}

TEST(Agreement, TruncatesALongMessageForTheOtherRanks) {
    const auto thrown = run_ranks(2, [](Transport& transport) {
        agree(transport, "the test", {}, transport.rank() == 1 ? std::string(5000, 'x') : "");
    });
    EXPECT_TRUE(mentions(message_of<InvalidArgument>(thrown[0]), concat("the test rank 1 ", std::string(1023, 'x'))));
    EXPECT_EQ(message_of<InvalidArgument>(thrown[1]), std::string(5000, 'x'));
}

}  // namespace
}  // namespace megatron_sb::distributed
