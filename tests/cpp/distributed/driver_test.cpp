#include "distributed/driver.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>

#include "core/error.h"
#include "distributed/key_source.h"
#include "distributed/route.h"
#include "ops/block.h"
#include "ops/tensors.h"
#include "plan/streams.h"
#include "ranks.h"

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

struct Case {
    Tensor q, k, v, d_o, d_mass;  // of the whole stream
    ops::BlockOptions options;
};

// The first component of all queries and keys is constant, so that the mean logit is about `mean_logit`.
Case make_case(const plan::Stream& stream, at::ScalarType dtype, double mean_logit, double mass_threshold) {
    const int64_t batch = stream.cu_seqlens ? 1 : 2, h = 8, h_kv = 4, d = 8, d_v = 16;
    at::manual_seed(stream.seq_len);
    const auto random = [&](int64_t heads, int64_t head_dim) {
        return at::randn({batch, stream.seq_len, heads, head_dim}, at::kDouble).to(dtype);
    };
    Case made{
        random(h, d), random(h_kv, d), random(h_kv, d_v), random(h, d_v), at::randn({batch, h, stream.seq_len}), {}};
    made.d_mass = made.d_mass.to(dtype == at::kDouble ? at::kDouble : at::kFloat);
    const double component = std::sqrt(std::abs(mean_logit) * std::sqrt(static_cast<double>(d)));
    made.q.select(-1, 0).fill_(component);
    made.k.select(-1, 0).fill_(std::copysign(component, mean_logit));
    made.options = {1 / std::sqrt(static_cast<double>(d)), mass_threshold, false};
    return made;
}

struct Answer {
    Tensor o, mass, dq, dk, dv;
};

// Computes the whole stream in one block, with a segment for each document.
Answer one_rank(const plan::Stream& stream, const Case& x) {
    const plan::Partition whole(plan::Layout::kContiguous, stream.packing, 1, stream.seq_len, stream.cu_seqlens);
    const Tensor table = make_rank_plan(whole, 0, x.q.device()).gather.segments[0];
    const ops::BlockOutput out = ops::block_forward(x.q, x.k, x.v, table, std::nullopt, x.options, x.q.scalar_type());
    const ops::BlockGradients gradients = ops::empty_gradients(x.q, x.k, x.v, x.options, ops::accumulation_type(x.q));
    ops::block_backward(x.d_o, x.q, x.k, x.v, table, out.restart_edge, out.restart_mass, std::nullopt,
                        out.mass * x.d_mass, x.options, gradients);
    const auto rounded = [&x](const Tensor& gradient) { return gradient.to(x.q.scalar_type()); };
    return {out.o, out.mass, rounded(gradients.dq), rounded(gradients.dk), rounded(gradients.dv)};
}

// How ranks get their keys. `a2a_size` is the number of ranks that exchange heads; 1 means that no rank does.
struct Mode {
    std::string name;
    Comm comm;
    int a2a_size;
};

// The modes that `size` ranks support with the eight query heads and four KV heads of a case.
std::vector<Mode> modes_of(int size) {
    std::vector<Mode> modes{{"p2p", Comm::kRing, 1}, {"all_gather", Comm::kGather, 1}};
    if (size == 1) modes.push_back({"one rank", Comm::kLocal, 1});
    if (size == 2 || size == 4 || size == 8) modes.push_back({"a2a", Comm::kLocal, size});
    for (const int a2a_size : {2, 4}) {
        if (size % a2a_size != 0 || size == a2a_size) continue;
        modes.push_back({concat("a2a over ", a2a_size, " + p2p"), Comm::kRing, a2a_size});
        modes.push_back({concat("a2a over ", a2a_size, " + all_gather"), Comm::kGather, a2a_size});
    }
    return modes;
}

struct LayoutAndMode {
    plan::Layout layout;
    Mode mode;

    std::string name() const { return concat(plan::name_of(layout), ", ", mode.name); }
};

std::vector<LayoutAndMode> layouts_and_modes(int size) {
    std::vector<LayoutAndMode> all;
    for (const auto layout : {plan::Layout::kZigzag, plan::Layout::kContiguous, plan::Layout::kBalanced}) {
        for (const Mode& mode : modes_of(size)) {
            all.push_back({layout, mode});
        }
    }
    return all;
}

// Some streams of these tests are longer and others are shorter, so the tests cover both ways to send rows, and blocks
// that are computed side by side or one after the other.
constexpr int64_t kTestRowsToSplitHeads = 100, kTestRowsSideBySide = 50;

// The process groups of a mode: one that exchanges heads for each rank of the ring, and one that exchanges keys for
// each rank of the all-to-all.
class Groups {
  public:
    Groups(const Mode& mode, int size, std::chrono::milliseconds timeout = std::chrono::seconds(60)) : mode_(mode) {
        const int p2p_size = size / mode.a2a_size;
        for (int i = 0; i < p2p_size; ++i) heads_.emplace_back(mode.a2a_size, timeout);
        for (int i = 0; i < mode.a2a_size; ++i) keys_.emplace_back(p2p_size, timeout);
    }

    Route route(const plan::Partition& partition, int rank, c10::Device device = at::kCPU) const {
        const int a2a_rank = rank % mode_.a2a_size, p2p_rank = rank / mode_.a2a_size;
        auto plan =
            std::make_shared<RankPlan>(make_rank_plan(partition, rank, device, mode_.a2a_size, kTestRowsToSplitHeads));
        plan->most_rows_side_by_side = kTestRowsSideBySide;
        // Other layouts use the ring also where a plan would not.
        const Comm comm = partition.has_ring() ? mode_.comm : plan->transfer(mode_.comm);
        return {mode_.a2a_size > 1 ? heads_[p2p_rank].transport(a2a_rank) : nullptr,
                mode_.comm == Comm::kLocal ? nullptr : keys_[a2a_rank].transport(p2p_rank), comm, plan};
    }

  private:
    const Mode mode_;
    std::vector<InProcessGroup> heads_, keys_;
};

Answer many_ranks(const plan::Stream& stream, const Case& x, plan::Layout layout, const Mode& mode, int size) {
    const plan::Partition partition = stream.partition(layout, size);
    const Groups groups(mode, size);
    const auto wide = ops::accumulation_type(x.q);
    const auto empty = [&](const Tensor& like) { return at::empty(like.sizes(), like.options().dtype(wide)); };
    Answer all{at::empty_like(x.d_o), at::empty_like(x.d_mass), empty(x.q), empty(x.k), empty(x.v)};
    run_ranks_or_throw(size, [&](Transport& world) {
        const int rank = world.rank();
        const Route route = groups.route(partition, rank, x.q.device());
        const Tensor rows = index_tensor(partition.local_positions(rank), x.q.device());
        const auto local = [&rows](const Tensor& whole, int64_t dim) { return whole.index_select(dim, rows); };
        const RouteOutput out =
            route_forward(route, local(x.q, 1), local(x.k, 1), local(x.v, 1), x.options, true, true);
        const RouteRecord record = unflatten(route, flatten(out.record));
        const Gradients gradients =
            route_backward(route, local(x.d_o, 1), local(x.d_mass, 2), x.k.size(2), record, x.options, true);
        all.o.index_copy_(1, rows, out.o);
        all.mass.index_copy_(2, rows, out.mass);
        all.dq.index_copy_(1, rows, gradients.dq.to(wide));
        all.dk.index_copy_(1, rows, gradients.dk.to(wide));
        all.dv.index_copy_(1, rows, gradients.dv.to(wide));
    });
    return all;
}

// Returns |value - expected| / |expected| with Euclidean norms.
double relative_error(const Tensor& value, const Tensor& expected) {
    const Tensor exact = expected.to(at::kDouble);
    const double size = exact.norm().item<double>();
    return (value.to(exact.options()) - exact).norm().item<double>() / std::max(size, 1e-300);
}

// Returns NaN if a result has a NaN.
double worst_error(const Answer& answer, const Answer& expected) {
    double worst = 0;
    for (const auto part : {&Answer::o, &Answer::mass, &Answer::dq, &Answer::dk, &Answer::dv}) {
        const double error = relative_error(answer.*part, expected.*part);
        if (std::isnan(error)) return error;  // std::max(worst, NaN) is worst
        worst = std::max(worst, error);
    }
    return worst;
}

// Expects NaN at most where `expected` has one, and equal values elsewhere.
void expect_no_more_nans(const Answer& answer, const Answer& expected, const std::string& where) {
    for (const auto& [name, part] : {std::pair{"o", &Answer::o},
                                     {"mass", &Answer::mass},
                                     {"dq", &Answer::dq},
                                     {"dk", &Answer::dk},
                                     {"dv", &Answer::dv}}) {
        const Tensor meant = (expected.*part).isnan(), found = (answer.*part).masked_fill(meant, 0);
        EXPECT_EQ(found.isnan().sum().item<int64_t>(), 0) << where << ", " << name;
        EXPECT_LT(relative_error(found, (expected.*part).nan_to_num()), 1e-5) << where << ", " << name;
    }
    EXPECT_TRUE(answer.o.isnan().any().item<bool>()) << where;
}

class DriverTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DriverTest, testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(DriverTest, GivesTheResultOfOneRank) {
    const int size = GetParam();
    for (const plan::Stream& stream : plan::streams(size, 31 * size)) {
        for (const double mean_logit : {0.0, -3.0}) {
            Case x = make_case(stream, at::kDouble, mean_logit, 0);
            if (mean_logit == 0) {
                x.options.attend_current = true;
            } else {  // each head has a reach of its own, whatever part of the heads a kernel gets
                x.options.reach = 0.5;
                x.options.reach_step = 1.2;
            }
            const Answer expected = one_rank(stream, x);
            for (const LayoutAndMode& run : layouts_and_modes(size)) {
                const double error = worst_error(many_ranks(stream, x, run.layout, run.mode, size), expected);
                EXPECT_LT(error, 1e-13) << stream.name << ", mean logit " << mean_logit << ", " << run.name();
            }
        }
    }
}

// Documents of any length, so that ranks hold several pieces of a document, and pieces of several documents.
TEST_P(DriverTest, BalancesDocumentsOfAnyLength) {
    const int size = GetParam();
    const std::vector<std::vector<int64_t>> offsets{
        {0, 301, 302, 302, 303, 360, 561, 599}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {0, 613}, {0, 7, 620}};
    for (const std::vector<int64_t>& cu_seqlens : offsets) {
        const int64_t seq_len = cu_seqlens.back() + 1;
        const plan::Stream stream{"any length", plan::Packing::kPerDocument, seq_len, cu_seqlens};
        const Case x = make_case(stream, at::kDouble, -3.0, 0);
        const Answer expected = one_rank({"one rank", plan::Packing::kWholeStream, seq_len, cu_seqlens}, x);
        for (const Mode& mode : modes_of(size)) {
            const Answer answer = many_ranks(stream, x, plan::Layout::kBalanced, mode, size);
            EXPECT_LT(worst_error(answer, expected), 1e-13) << mode.name << ", " << cu_seqlens.size() - 1
                                                            << " documents, the first of " << cu_seqlens[1] << " rows";
        }
    }
}

// Ranks exchange only the keys of the documents that they share.
TEST_P(DriverTest, SendsOnlyTheKeysThatRanksNeed) {
    const int size = GetParam();
    if (size == 1) return;
    std::vector<int64_t> offsets{0};
    while (offsets.back() < 64 * size - 20) offsets.push_back(offsets.back() + 3 + 5 * (offsets.size() % 4));
    const plan::Stream stream{"short documents", plan::Packing::kWholeStream, 64 * size, offsets};
    for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
        const Case x = make_case(stream, dtype, -3.0, 0);
        const Answer expected = one_rank(stream, x);
        for (const auto layout : {plan::Layout::kZigzag, plan::Layout::kContiguous, plan::Layout::kBalanced}) {
            for (Mode mode : modes_of(size)) {
                if (mode.comm == Comm::kLocal) continue;
                const auto plan = make_rank_plan(stream.partition(layout, size), 0, at::kCPU, mode.a2a_size);
                ASSERT_TRUE(plan.key_rows.has_value()) << mode.name;
                EXPECT_TRUE(plan.key_rows->own.defined()) << mode.name;
                const auto most_keys = [](const Tensor& table) {
                    return table.defined() ? table.select(1, 3).max().item<int64_t>() : 0;
                };
                EXPECT_EQ(plan.key_rows->own_keys, most_keys(plan.key_rows->own)) << mode.name;
                EXPECT_EQ(plan.gather.most_keys, most_keys(plan.gather.segments[0])) << mode.name;
                EXPECT_EQ(plan.transfer(mode.comm), Comm::kGather) << mode.name;
                EXPECT_TRUE(plan.keeps_keys(Comm::kGather)) << mode.name;
                mode.comm = plan.transfer(mode.comm);
                EXPECT_LT(worst_error(many_ranks(stream, x, layout, mode, size), expected),
                          dtype == at::kDouble ? 1e-13 : 3e-4)
                    << plan::name_of(layout) << ", " << mode.name;
            }
        }
    }
}

// The stream is so long that rows skip tiles, also in the run that is computed before its carry is known.
TEST_P(DriverTest, StaysWithinTheErrorBoundOfSkipping) {
    const int size = GetParam();
    const plan::Stream stream{"dense", plan::Packing::kPerDocument, size == 5 ? 800 : 768, std::nullopt};
    const Case x = make_case(stream, at::kDouble, 0, 0x1p-24);
    Case full = x;
    full.options.mass_threshold = 0;
    const Answer expected = one_rank(stream, full);
    for (const LayoutAndMode& run : layouts_and_modes(size)) {
        const double error = worst_error(many_ranks(stream, x, run.layout, run.mode, size), expected);
        EXPECT_LT(error, 0x1p-22) << run.name();
        EXPECT_GT(error, 1e-12) << run.name() << ": no tile was skipped, so the bound above holds trivially";
    }
}

// Chunks consist of whole tiles, so every layout has the same tiles. A row that is used up before the tile with the NaN
// has a NaN only if its query tile contains a row that reads the NaN. The gradients of keys in other tiles have no NaN.
TEST_P(DriverTest, ANanSpreadsNoFurtherThanOnOneRank) {
    const int size = GetParam();
    const plan::Stream stream{"dense", plan::Packing::kPerDocument, 128 * size, std::nullopt};
    for (const double mean_logit : {0.0, 3.0}) {
        for (const int64_t row : {stream.seq_len / 5, stream.seq_len / 2 + 3, stream.seq_len - 70}) {
            for (const auto part : {&Case::k, &Case::v}) {
                const Case x = make_case(stream, at::kFloat, mean_logit, 0x1p-24);
                (x.*part).select(1, row).fill_(NAN);
                const Answer expected = one_rank(stream, x);
                for (const plan::Layout layout : {plan::Layout::kZigzag, plan::Layout::kContiguous}) {
                    for (const Mode& mode : modes_of(size)) {
                        const std::string where = concat(name_of(layout), ", ", mode.name, ", mean logit ", mean_logit,
                                                         ", ", part == &Case::k ? "k" : "v", " row ", row);
                        expect_no_more_nans(many_ranks(stream, x, layout, mode, size), expected, where);
                    }
                }
            }
        }
    }
}

// With bf16 operands, several ranks differ from one rank only by fp32 rounding and by the final rounding of the results
// to bf16.
TEST_P(DriverTest, ExchangesPartialResultsInFullPrecision) {
    const int size = GetParam();
    const plan::Stream stream{"dense", plan::Packing::kPerDocument, size == 5 ? 400 : 384, std::nullopt};
    const Case x = make_case(stream, at::kBFloat16, -3.0, 0);
    const Answer expected = one_rank(stream, x);
    for (const Mode& mode : modes_of(size)) {
        const Answer answer = many_ranks(stream, x, plan::Layout::kZigzag, mode, size);
        // About one value in a few hundred is rounded to the other neighbour in bf16 and differs by 2^-8.
        EXPECT_LT(worst_error(answer, expected), 3e-4) << mode.name;
    }
}

// On a GPU the runs of a ring are folded by a kernel of its own, and kernels add outputs and dq to those of earlier
// blocks. All ranks share the GPU and its stream.
TEST_P(DriverTest, OnAGpuIsAsExactAsOneRank) {
    if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
    const int size = GetParam();
    std::vector<plan::Stream> streams = plan::streams(size, 31 * size);
    streams.push_back({"dense, long", plan::Packing::kPerDocument, 400 * size, std::nullopt});
    for (const plan::Stream& stream : streams) {
        for (const double mean_logit : {0.0, -6.0}) {
            Case exact = make_case(stream, at::kBFloat16, mean_logit, 0x1p-24), x = exact;
            for (Tensor* part : {&x.q, &x.k, &x.v, &x.d_o, &x.d_mass}) *part = part->to(at::kCUDA);
            for (Tensor* part : {&exact.q, &exact.k, &exact.v, &exact.d_o, &exact.d_mass})
                *part = part->to(at::kDouble);
            exact.options.mass_threshold = 0;
            const Answer expected = one_rank(stream, exact);
            const double alone = worst_error(one_rank(stream, x), expected);
            EXPECT_LT(alone, 0.02) << stream.name;
            for (const LayoutAndMode& run : layouts_and_modes(size)) {
                const double error = worst_error(many_ranks(stream, x, run.layout, run.mode, size), expected);
                EXPECT_LT(error, 1.5 * alone + 1e-3) << stream.name << ", mean logit " << mean_logit << ", "
                                                     << run.name() << " (one rank: " << alone << ")";
            }
        }
    }
}

TEST_P(DriverTest, RepeatsBitForBit) {
    const int size = GetParam();
    const plan::Stream stream = plan::streams(size, 5)[1];
    const Case x = make_case(stream, at::kFloat, -1.0, 0x1p-24);
    for (const Mode& mode : modes_of(size)) {
        const Answer first = many_ranks(stream, x, plan::Layout::kZigzag, mode, size);
        const Answer second = many_ranks(stream, x, plan::Layout::kZigzag, mode, size);
        for (const auto part : {&Answer::o, &Answer::mass, &Answer::dq, &Answer::dk, &Answer::dv}) {
            EXPECT_TRUE((first.*part).equal(second.*part)) << mode.name;
        }
    }
}

// Partial results in bf16 would make the error against float64 grow with the number of ranks.
TEST(Driver, ErrorDoesNotGrowWithTheRing) {
    const plan::Stream stream{"dense", plan::Packing::kPerDocument, 1024, std::nullopt};
    for (const auto& [dtype, mean_logit] : {std::pair{at::kFloat, -1.0}, {at::kFloat, -6.0}, {at::kBFloat16, -6.0}}) {
        const Case x = make_case(stream, dtype, mean_logit, 0x1p-24);
        Case exact = x;
        exact.options.mass_threshold = 0;
        for (Tensor* part : {&exact.q, &exact.k, &exact.v, &exact.d_o, &exact.d_mass}) *part = part->to(at::kDouble);
        const Answer expected = one_rank(stream, exact);
        const double alone = worst_error(one_rank(stream, x), expected);
        for (const int size : {1, 2, 4, 16, 64}) {
            for (const Mode& mode : modes_of(size)) {
                const double error = worst_error(many_ranks(stream, x, plan::Layout::kZigzag, mode, size), expected);
                std::cout << "[ error    ] " << at::toString(dtype) << ", mean logit " << mean_logit << ", "
                          << mode.name << ", " << size << " ranks: " << error << " (one block: " << alone << ")\n";
                EXPECT_LT(error, 1.25 * alone + 1e-7) << mode.name << ", " << size << " ranks";
            }
        }
    }
}

TEST(Route, ChoosesByHeadsRowsAndMemory) {
    const auto chosen = [](int ranks, int64_t rows, int64_t heads, int64_t num_kv_heads,
                           plan::Layout layout = plan::Layout::kZigzag) {
        const plan::Partition partition(layout, plan::Packing::kPerDocument, ranks, rows, std::nullopt);
        const auto local = [&](int64_t count) { return at::empty({1, rows / ranks, count, 128}, at::kBFloat16); };
        return std::string(
            choose_comm(partition, std::nullopt, local(heads), local(num_kv_heads), local(num_kv_heads)));
    };
    EXPECT_EQ(chosen(4, 16384, 12, 12), "a2a");
    EXPECT_EQ(chosen(8, 16384, 16, 2), "a2a");         // each KV head goes to several ranks
    EXPECT_EQ(chosen(8, 16384, 8, 8), "all_gather");   // one head of 16384 rows for each rank is too little work
    EXPECT_EQ(chosen(8, 65536, 12, 4), "all_gather");  // 8 ranks cannot share 12 heads equally
    EXPECT_EQ(chosen(8, 1 << 20, 12, 12), "p2p");      // 3 GiB of keys and values
    EXPECT_EQ(chosen(8, 1 << 20, 12, 12, plan::Layout::kBalanced), "all_gather");  // which has no ring
    EXPECT_EQ(chosen(1, 4096, 3, 1), "all_gather");
}

// Of `received` rows, a rank receives keys and values twice and gradients once, in fp32.
TEST(Route, ChoosesKeyRowsIfTheyAreFewerThanRowsOfExchangedHeads) {
    const auto chosen = [](plan::Layout layout, int64_t received, int64_t num_kv_heads) {
        const plan::Partition partition(layout, plan::Packing::kWholeStream, 4, 65536, std::vector<int64_t>{0, 65536});
        const auto local = [&](int64_t count) { return at::empty({16384, count, 128}, at::kBFloat16); };
        const plan::KeyRowCounts counts{received, received};
        return std::string(choose_comm(partition, counts, local(12), local(num_kv_heads), local(num_kv_heads)));
    };
    EXPECT_EQ(chosen(plan::Layout::kBalanced, 13823, 12), "all_gather");  // 9/8 of 3/4 of 16384 is 13824
    EXPECT_EQ(chosen(plan::Layout::kBalanced, 13824, 12), "a2a");
    EXPECT_EQ(chosen(plan::Layout::kBalanced, 27647, 4), "all_gather");
    EXPECT_EQ(chosen(plan::Layout::kBalanced, 27648, 4), "a2a");
    EXPECT_EQ(chosen(plan::Layout::kZigzag, 1000, 12), "a2a");  // work would be unequal
}

TEST(Route, GatheredKeysAreTwoGroupsOfHeadsAtATime) {
    const auto bytes = [](int ranks, int64_t num_kv_heads, int64_t rows = 8192) {
        const Tensor x = at::empty({1, 0, num_kv_heads, 64}, at::kBFloat16);  // a rank may have no rows
        return gathered_bytes(ranks * rows, x, x);
    };
    constexpr int64_t kOneHead = 2 * 8192 * 64 * 2;  // keys and values of 8192 rows
    EXPECT_EQ(bytes(4, 1), 4 * kOneHead);
    EXPECT_EQ(bytes(4, 2), 4 * 2 * kOneHead);
    EXPECT_EQ(bytes(4, 8), 4 * 4 * kOneHead);
    EXPECT_EQ(bytes(8, 32), 8 * 16 * kOneHead);
    EXPECT_EQ(bytes(4, 8, 4096), 4 * 8 * kOneHead / 2);  // with so few rows, all heads are gathered at once
    const Tensor packed = at::empty({8192, 8, 64}, at::kBFloat16);
    EXPECT_EQ(gathered_bytes(4 * 8192, packed, packed), 4 * 4 * kOneHead);
}

TEST(Driver, EveryRankInAGroupWithALostRankFails) {
    const int size = 4;
    const plan::Stream stream{"dense", plan::Packing::kPerDocument, 64, std::nullopt};
    const Case x = make_case(stream, at::kFloat, 0, 0);
    const plan::Partition partition = stream.partition(plan::Layout::kZigzag, size);
    for (const Mode& mode : modes_of(size)) {
        const Groups groups(mode, size, std::chrono::milliseconds(300));
        const auto thrown = run_ranks(size, [&](Transport& world) {
            if (world.rank() == 2) return;
            const Tensor rows = index_tensor(partition.local_positions(world.rank()), at::kCPU);
            route_forward(groups.route(partition, world.rank()), x.q.index_select(1, rows), x.k.index_select(1, rows),
                          x.v.index_select(1, rows), x.options, true, true);
        });
        // In a hierarchy, rank 3 exchanges heads with rank 2 and rank 0 exchanges keys with it. Rank 1 exchanges
        // nothing with it and need not fail.
        const bool one_group = mode.a2a_size == 1 || mode.a2a_size == size;
        for (const int rank : {0, 1, 3}) {
            if (rank == 1 && !one_group) continue;
            EXPECT_NE(message_of<RuntimeFailure>(thrown[rank]), "") << mode.name << ", rank " << rank;
        }
    }
}

}  // namespace
}  // namespace megatron_sb::distributed
