// Compares the CPU kernels, called through raw pointers, with the definition in float64, for every instruction set of
// this machine.
#include "kernels/cpu/cpu.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <limits>

#include "kernels/oracle.h"

namespace megatron_sb::cpu {
namespace {

template <class T>
constexpr Dtype kDtypeOf = sizeof(T) == 8 ? Dtype::kFloat64 : Dtype::kFloat32;

template <class T>
const T kPoison = std::numeric_limits<T>::quiet_NaN();

// A call with one head, one batch element and the keys [begin, end) of the problem.
template <class T>
struct Block {
    const oracle::Problem& p;
    int k_begin, k_rows;
    double mass_threshold;
    std::vector<T> q, k, v, d_o, o, mass_out, restart_mass, dq, dk, dv, prefix_out;
    std::vector<int32_t> restart_edge;
    Segment segment;

    Block(const oracle::Problem& problem, int begin, int end, double threshold = 0)
        : p(problem),
          k_begin(begin),
          k_rows(end - begin),
          mass_threshold(threshold),
          q(p.q.begin(), p.q.end()),
          k(p.k.begin() + begin * p.d, p.k.begin() + end * p.d),
          v(p.v.begin() + begin * p.d_v, p.v.begin() + end * p.d_v),
          d_o(p.d_o.begin(), p.d_o.end()),
          o(p.q_rows * p.d_v, kPoison<T>),
          mass_out(p.q_rows, kPoison<T>),
          restart_mass(p.q_rows, kPoison<T>),
          dq(p.q_rows * p.d),
          dk(k_rows * p.d),
          dv(k_rows * p.d_v),
          prefix_out(p.q_rows, kPoison<T>),
          restart_edge(p.q_rows, -1),
          segment{0, p.q_rows, 0, k_rows, p.q_pos_minus_k_pos - begin} {}

    Sizes sizes() const { return {kDtypeOf<T>, 0, 1, 1, 1, p.q_rows, k_rows, p.d, p.d_v}; }
    Options options() const { return {p.scale, mass_threshold, p.attend_current}; }

    template <class Params>
    Params inputs(const T* mass_in) {
        Params params;
        params.sizes = sizes();
        params.options = options();
        params.segments = {&segment, 1, {}};
        params.q = {q.data(), 0, p.d, 0};
        params.k = {k.data(), 0, p.d, 0};
        params.v = {v.data(), 0, p.d_v, 0};
        params.mass_in = mass_in;
        params.restart = {restart_edge.data(), restart_mass.data()};
        return params;
    }

    void forward(const Level& level, const T* mass_in = nullptr, bool add_o = false) {
        ForwardParams params = inputs<ForwardParams>(mass_in);
        params.o = {o.data(), 0, p.d_v, 0};
        params.o_dtype = kDtypeOf<T>;
        params.add_o = add_o;
        params.mass_out = mass_out.data();
        std::vector<char> workspace(forward_workspace(params, level));
        params.workspace = workspace.data();
        block_forward(params, level);
    }

    void backward(const Level& level, const T* prefix_in, const T* mass_in = nullptr, int64_t limit = INT64_MAX) {
        BackwardParams params = inputs<BackwardParams>(mass_in);
        params.d_o = {d_o.data(), 0, p.d_v, 0};
        params.dq = {dq.data(), 0, p.d, 0};
        params.dk = {dk.data(), 0, p.d, 0};
        params.dv = {dv.data(), 0, p.d_v, 0};
        params.prefix_in = prefix_in;
        params.prefix_out = prefix_out.data();
        params.workspace_bytes = backward_workspace(params, limit, level);
        std::vector<char> workspace(params.workspace_bytes);
        params.workspace = workspace.data();
        block_backward(params, level);
    }
};

template <class T>
oracle::Vector wide(const std::vector<T>& x) {
    return oracle::Vector(x.begin(), x.end());
}

template <class T>
std::vector<T> prefix_of(const oracle::Problem& p, const oracle::Answer& answer) {
    std::vector<T> prefix(p.q_rows);
    for (int j = 0; j < p.q_rows; ++j) prefix[j] = T(answer.mass[j] * p.d_mass[j]);
    return prefix;
}

class CpuKernels : public testing::TestWithParam<const Level*> {
  protected:
    static const Level& level() { return *GetParam(); }
};

template <class T>
void expect_answer(const Level& level, const oracle::Problem& p, double tolerance) {
    const oracle::Answer want = oracle::solve(p);
    Block<T> block(p, 0, p.k_rows);
    block.forward(level);
    const std::vector<T> prefix = prefix_of<T>(p, want);
    block.backward(level, prefix.data());
    EXPECT_LT(oracle::relative_error(wide(block.o), want.o), tolerance);
    EXPECT_LT(oracle::relative_error(wide(block.mass_out), want.mass, 0x1p-126), tolerance);
    EXPECT_LT(oracle::relative_error(wide(block.dq), want.dq), tolerance);
    EXPECT_LT(oracle::relative_error(wide(block.dk), want.dk), tolerance);
    EXPECT_LT(oracle::relative_error(wide(block.dv), want.dv), tolerance);
}

TEST_P(CpuKernels, AgreeWithTheDefinitionAtRaggedLengths) {
    unsigned seed = 0;
    for (const int rows : {1, 2, 3, 4, 5, 63, 64, 65, 127, 130})
        for (const bool attend_current : {false, true}) {
            SCOPED_TRACE(testing::Message() << rows << " rows, attend_current " << attend_current);
            oracle::Problem p = oracle::random_problem(rows, rows, 24, 40, -1, ++seed);
            p.attend_current = attend_current;
            expect_answer<double>(level(), p, 1e-12);
            expect_answer<float>(level(), p, 2e-6);
        }
}

TEST_P(CpuKernels, AgreeWithTheDefinitionFarFromTheDiagonal) {
    for (const double mean : {-6.0, -3.2, 3.0})
        expect_answer<float>(level(), oracle::random_problem(20, 3000, 16, 16, mean, 7), 3e-5);
}

// 1 - beta must not be derived from a clamped e: at mean logit 30 it is 1e-13.
TEST_P(CpuKernels, AreAccurateWithSaturatedLogits) {
    for (const double mean : {15.0, 30.0}) {
        oracle::Problem p = oracle::random_problem(100, 100, 16, 16, mean, 11);
        SCOPED_TRACE(testing::Message() << "mean logit " << mean);
        const oracle::Answer want = oracle::solve(p);
        Block<float> block(p, 0, p.k_rows);
        block.forward(level());
        block.backward(level(), nullptr);
        EXPECT_LT(oracle::relative_error(wide(block.o), want.o), 2e-6);
        EXPECT_LT(oracle::relative_error(wide(block.dv), want.dv), 2e-6);
        std::fill(p.d_mass.begin(), p.d_mass.end(), 0.0);
        const oracle::Answer without_mass = oracle::solve(p);
        EXPECT_LT(oracle::relative_error(wide(block.dq), without_mass.dq), 2e-5);
        EXPECT_LT(oracle::relative_error(wide(block.dk), without_mass.dk), 2e-5);
    }
}

// Two blocks of keys that hand over their carries give the result of one block with all keys, at every cut.
TEST_P(CpuKernels, GiveTheSameResultInTwoBlocks) {
    const oracle::Problem p = oracle::random_problem(40, 200, 16, 8, -4, 3);
    const oracle::Answer want = oracle::solve(p);
    for (const int cut : {1, 63, 64, 65, 100, 161, 199}) {
        SCOPED_TRACE(testing::Message() << "cut at " << cut);
        Block<double> newer(p, cut, p.k_rows), older(p, 0, cut);
        newer.forward(level());
        older.o = newer.o;
        older.forward(level(), newer.mass_out.data(), true);
        EXPECT_LT(oracle::relative_error(older.mass_out, want.mass), 1e-12);
        const std::vector<double> prefix = prefix_of<double>(p, want);
        older.backward(level(), prefix.data());
        newer.backward(level(), older.prefix_out.data());
        oracle::Vector o = older.o, dq = older.dq, dk = older.dk, dv = older.dv;
        for (size_t i = 0; i < dq.size(); ++i) dq[i] += newer.dq[i];
        dk.insert(dk.end(), newer.dk.begin(), newer.dk.end());
        dv.insert(dv.end(), newer.dv.begin(), newer.dv.end());
        EXPECT_LT(oracle::relative_error(o, want.o), 1e-12);
        EXPECT_LT(oracle::relative_error(dq, want.dq), 1e-12);
        EXPECT_LT(oracle::relative_error(dk, want.dk), 1e-12);
        EXPECT_LT(oracle::relative_error(dv, want.dv), 1e-12);
    }
}

// The forward can run before the carry of its block is known. The backward then gets the carry as mass_in and scales
// the mass of the restart record by it.
TEST_P(CpuKernels, BackwardScalesARestartRecordByMassIn) {
    const oracle::Problem p = oracle::random_problem(30, 150, 16, 16, -4, 5);
    Block<double> newer(p, 70, p.k_rows), with_carry(p, 0, 70), without(p, 0, 70);
    newer.forward(level());
    with_carry.forward(level(), newer.mass_out.data());
    with_carry.backward(level(), nullptr);
    without.forward(level());
    without.backward(level(), nullptr, newer.mass_out.data());
    EXPECT_LT(oracle::relative_error(without.dq, with_carry.dq), 1e-12);
    EXPECT_LT(oracle::relative_error(without.dk, with_carry.dk), 1e-12);
    EXPECT_LT(oracle::relative_error(without.prefix_out, with_carry.prefix_out), 1e-12);
}

TEST_P(CpuKernels, StayWithinTheErrorBoundOfSkipping) {
    const oracle::Problem p = oracle::random_problem(300, 300, 16, 16, 0, 9);
    const oracle::Answer want = oracle::solve(p);
    const double threshold = 0x1p-24;
    double largest_v = 0;
    for (const double v : p.v) largest_v = std::max(largest_v, std::abs(v));
    Block<double> block(p, 0, p.k_rows, threshold);
    block.forward(level());
    // Each element alone: std::max would lose a NaN.
    for (size_t i = 0; i < want.o.size(); ++i) {
        ASSERT_LE(std::abs(block.o[i] - want.o[i]), threshold * largest_v + 1e-14) << "element " << i;
    }
    int skipped = 0;
    for (const int32_t edge : block.restart_edge) skipped += edge > 64;
    EXPECT_GT(skipped, 100);  // without skipping, the bound above would hold trivially
}

TEST_P(CpuKernels, SpreadANanOnlyWithinItsTileAndToRowsThatReadIt) {
    oracle::Problem p = oracle::random_problem(256, 256, 16, 16, -6, 13);
    p.k[100 * p.d] = std::nan("");  // key 100 is in the tile of keys 64..127
    Block<float> block(p, 0, p.k_rows);
    block.forward(level());
    block.backward(level(), nullptr);
    for (int j = 0; j < 64; ++j) EXPECT_TRUE(std::isfinite(block.o[j * p.d_v])) << j;
    for (int j = 101; j < 256; ++j) EXPECT_TRUE(std::isnan(block.o[j * p.d_v])) << j;
    for (int i = 0; i < 256; ++i) {
        const bool outside_the_tile = i < 64 || i >= 128;
        if (outside_the_tile) {
            EXPECT_TRUE(std::isfinite(block.dk[i * p.d])) << i;
        }
    }

    p = oracle::random_problem(256, 256, 16, 16, -6, 13);
    p.q[200 * p.d] = std::nan("");  // ends the row of query 200 in its newest tile, keys 192..255
    Block<float> other(p, 0, p.k_rows);
    other.forward(level());
    other.backward(level(), nullptr);
    for (int j = 0; j < 256; ++j) EXPECT_EQ(std::isnan(other.o[j * p.d_v]), j == 200) << j;
    for (int i = 0; i < 192; ++i)
        EXPECT_TRUE(std::isfinite(other.dk[i * p.d]) && std::isfinite(other.dv[i * p.d_v])) << i;
}

// Query tiles add to dk and dv in a fixed order, whichever threads process them.
TEST_P(CpuKernels, GiveBitwiseTheSameResultsWithAnyNumberOfThreads) {
    const oracle::Problem p = oracle::random_problem(1000, 1000, 24, 16, -6, 17);
    const auto gradients = [&](int threads, int64_t limit) {
        omp_set_num_threads(threads);
        Block<float> block(p, 0, p.k_rows, 0x1p-24);
        block.forward(level());
        block.backward(level(), nullptr, nullptr, limit);
        block.dk.insert(block.dk.end(), block.dv.begin(), block.dv.end());
        block.dk.insert(block.dk.end(), block.dq.begin(), block.dq.end());
        return block.dk;
    };
    const int threads_before = omp_get_max_threads();
    const std::vector<float> expected = gradients(1, INT64_MAX);
    for (const int threads : {2, 3, 16, 64}) EXPECT_EQ(gradients(threads, INT64_MAX), expected) << threads;
    EXPECT_EQ(gradients(64, 1), expected);  // no room for a second thread
    omp_set_num_threads(threads_before);
}

// The documents of a packed batch have keys of their own, so their query tiles do not wait for each other's.
TEST_P(CpuKernels, ProcessSegmentsWithDifferentKeysOnManyThreads) {
    const int rows = 200, d = 16, documents = 5;
    std::vector<Segment> segments;
    std::vector<oracle::Problem> problems;
    std::vector<float> q, k, v, d_o;
    for (int i = 0; i < documents; ++i) {
        segments.push_back({i * rows, rows, i * rows, rows, 0});
        problems.push_back(oracle::random_problem(rows, rows, d, d, -3, unsigned(i)));
        std::fill(problems[i].d_mass.begin(), problems[i].d_mass.end(), 0.0);
        for (const auto& [to, from] :
             {std::pair{&q, &problems[i].q}, {&k, &problems[i].k}, {&v, &problems[i].v}, {&d_o, &problems[i].d_o}})
            to->insert(to->end(), from->begin(), from->end());
    }
    const int threads_before = omp_get_max_threads();
    omp_set_num_threads(16);
    const int total = documents * rows;
    std::vector<float> o(total * d), mass(total), restart_mass(total), dq(total * d), dk(total * d), dv(total * d),
        prefix(total);
    std::vector<int32_t> restart_edge(total);
    const auto run = [&](auto params, auto workspace_of, auto block) {
        params.sizes = {Dtype::kFloat32, 0, 1, 1, 1, total, total, d, d};
        params.options = {problems[0].scale, 0, false};
        params.segments = {segments.data(), documents, {}};
        params.q = {q.data(), 0, d, 0};
        params.k = {k.data(), 0, d, 0};
        params.v = {v.data(), 0, d, 0};
        params.restart = {restart_edge.data(), restart_mass.data()};
        std::vector<char> workspace(workspace_of(params));
        params.workspace = workspace.data();
        block(params, workspace.size());
    };
    ForwardParams forward;
    forward.o = {o.data(), 0, d, 0};
    forward.o_dtype = Dtype::kFloat32;
    forward.mass_out = mass.data();
    run(
        forward, [](const auto& p) { return forward_workspace(p, level()); },
        [](const auto& p, size_t) { block_forward(p, level()); });
    BackwardParams backward;
    backward.d_o = {d_o.data(), 0, d, 0};
    backward.dq = {dq.data(), 0, d, 0};
    backward.dk = {dk.data(), 0, d, 0};
    backward.dv = {dv.data(), 0, d, 0};
    backward.prefix_out = prefix.data();
    run(
        backward, [](const auto& p) { return backward_workspace(p, INT64_MAX, level()); },
        [](auto p, size_t bytes) {
            p.workspace_bytes = int64_t(bytes);
            block_backward(p, level());
        });
    omp_set_num_threads(threads_before);
    for (int i = 0; i < documents; ++i) {
        const oracle::Answer want = oracle::solve(problems[i]);
        const auto part = [&](const std::vector<float>& x) {
            return oracle::Vector(x.begin() + i * rows * d, x.begin() + (i + 1) * rows * d);
        };
        EXPECT_LT(oracle::relative_error(part(dk), want.dk), 5e-6) << i;
        EXPECT_LT(oracle::relative_error(part(dv), want.dv), 5e-6) << i;
        EXPECT_LT(oracle::relative_error(part(dq), want.dq), 5e-6) << i;
    }
}

// README: memory is linear in the length. The limit bounds the number of threads.
TEST_P(CpuKernels, NeedLittleMemoryForManyThreads) {
    const int threads_before = omp_get_max_threads();
    omp_set_num_threads(64);
    BackwardParams params;
    params.sizes = {Dtype::kFloat32, 0, 1, 1, 1, 1 << 16, 1 << 16, 128, 128};
    params.segments.whole = {0, 1 << 16, 0, 1 << 16, 0};
    const int64_t one_gradient = int64_t(1 << 16) * 128 * 4;
    EXPECT_LT(backward_workspace(params, INT64_MAX, level()), 2 * one_gradient);
    EXPECT_LE(backward_workspace(params, 4 << 20, level()), 4 << 20);
    omp_set_num_threads(threads_before);
}

INSTANTIATE_TEST_SUITE_P(Levels, CpuKernels, testing::ValuesIn(supported_levels()),
                         [](const auto& info) { return std::string(name_of(*info.param)); });

}  // namespace
}  // namespace megatron_sb::cpu
