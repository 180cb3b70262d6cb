// Not a test: times the computations of a ring on one GPU, without a network. All ranks share the GPU and its stream,
// so the times are the sums over the ranks. Run
//     sb_test_distributed --gtest_also_run_disabled_tests --gtest_filter='*RingSpeed*'
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>

#include "distributed/in_process_transport.h"
#include "distributed/route.h"

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

constexpr int64_t kHeads = 12, kHeadDim = 128;
constexpr int kRounds = 9;

// The inputs of all ranks for one sequence in zigzag. Their mean logit is -11, so that no tile is skipped.
struct Ring {
    std::vector<Tensor> q, k, v, d_o;
    std::vector<Route> routes;
    const InProcessGroup group;
    const ops::BlockOptions options{1 / std::sqrt(double(kHeadDim)), 0x1p-24, false};

    Ring(int size, int64_t seq_len) : group(size, std::chrono::seconds(60)) {
        const plan::Partition partition(plan::Layout::kZigzag, plan::Packing::kPerDocument, size, seq_len, {});
        const double component = std::sqrt(11.0) * std::pow(double(kHeadDim), 0.25);
        for (int rank = 0; rank < size; ++rank) {
            for (std::vector<Tensor>* part : {&q, &k, &v, &d_o})
                part->push_back(at::randn({1, seq_len / size, kHeads, kHeadDim},
                                          at::TensorOptions(at::kCUDA).dtype(at::kBFloat16)));
            q.back().select(-1, 0).fill_(component);
            k.back().select(-1, 0).fill_(-component);
            auto plan = std::make_shared<RankPlan>(make_rank_plan(partition, rank, at::kCUDA));
            routes.push_back({nullptr, group.transport(rank), Comm::kRing, std::move(plan)});
        }
    }

    template <class F>
    void on_all_ranks(const F& f) const {
        std::vector<std::thread> threads;
        for (size_t rank = 0; rank < routes.size(); ++rank) threads.emplace_back([&f, rank] { f(rank); });
        for (std::thread& thread : threads) thread.join();
    }
    RouteOutput forward(size_t rank) const {
        return route_forward(routes[rank], q[rank], k[rank], v[rank], options, true, true);
    }
    void backward(size_t rank, const RouteRecord& record) const {
        route_backward(routes[rank], d_o[rank], {}, kHeads, record, options, true);
    }
};

template <class F>
double median_ms(const F& f) {
    const auto wait_for_gpu = [] { at::zeros({1}, at::kCUDA).item<float>(); };
    std::vector<double> times;
    for (int round = 0; round < kRounds; ++round) {
        wait_for_gpu();
        const auto begin = std::chrono::steady_clock::now();
        f();
        wait_for_gpu();
        times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    }
    std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
    return times[kRounds / 2];
}

TEST(RingSpeed, DISABLED_OnAGpu) {
    if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
    for (const int64_t seq_len : {16384, 65536}) {
        for (const int size : {4, 8}) {
            const Ring ring(size, seq_len);
            std::vector<RouteOutput> out(size);
            const auto forward = [&] { ring.on_all_ranks([&](size_t rank) { out[rank] = ring.forward(rank); }); };
            const auto backward = [&] {
                ring.on_all_ranks([&](size_t rank) { ring.backward(rank, out[rank].record); });
            };
            forward();
            backward();
            std::printf("%ld rows, %d ranks: forward %.3f ms, backward %.3f ms\n", long(seq_len), size,
                        median_ms(forward), median_ms(backward));
        }
    }
}

}  // namespace
}  // namespace megatron_sb::distributed
