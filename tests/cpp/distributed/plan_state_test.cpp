// Tests of the tables of a plan with several threads and streams. The tests of streams need a GPU.
#include "distributed/plan_state.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <future>

namespace megatron_sb::distributed {
namespace {

using State = ContextParallelPlan::State;

constexpr int kRanks = 4;

std::unique_ptr<State> make_state(int64_t rows) {
    plan::Partition partition(plan::Layout::kZigzag, plan::Packing::kWholeStream, kRanks, rows, std::nullopt);
    return std::make_unique<State>("", nullptr, 1, std::move(partition), plan::Packing::kWholeStream, false, "none");
}

c10::Stream new_stream() {
    return c10::impl::VirtualGuardImpl(at::kCUDA).getNewStream(c10::Device(at::kCUDA, 0));
}

// Keeps the current stream busy for some milliseconds.
void delay() {
    const at::Tensor x = at::zeros({4096, 4096}, at::kCUDA);
    for (int i = 0; i < 20; ++i) x.mm(x);
}

TEST(PlanState, ThreadsGetTheSameTables) {
    const std::unique_ptr<State> state = make_state(int64_t{1} << 20);
    std::vector<std::future<std::shared_ptr<const RankPlan>>> plans;
    for (int i = 0; i < 4; ++i) {
        plans.push_back(std::async(std::launch::async, [&] { return state->rank_plan(at::kCPU, 1); }));
    }
    const auto expected = state->rank_plan(at::kCPU, 1);
    for (auto& plan : plans) EXPECT_EQ(plan.get(), expected);
    EXPECT_NE(state->rank_plan(at::kCPU, 2), expected);
}

TEST(PlanState, AnotherStreamReadsWholeTables) {
    if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
    const c10::Device device(at::kCUDA, 0);
    const std::unique_ptr<State> state = make_state(int64_t{1} << 24);  // enough rows for a kernel of a millisecond
    std::vector<c10::Stream> streams;
    for (int i = 0; i < 4; ++i) streams.push_back(new_stream());
    std::vector<std::future<at::Tensor>> sums;
    for (const c10::Stream& stream : streams) {
        sums.push_back(std::async(std::launch::async, [&state, device, stream] {
            const c10::StreamGuard guard(stream);
            const auto plan = state->rank_plan(device, 1);
            return (plan->order.from_stream.index_select(0, plan->order.to_stream) !=
                    at::arange(plan->order.to_stream.numel(), plan->order.to_stream.options()))
                .sum()
                .cpu();
        }));
    }
    for (auto& wrong : sums) EXPECT_EQ(wrong.get().item<int64_t>(), 0);
}

TEST(PlanState, MemoryOfAFreedPlanIsNotReusedWhileAStreamReadsIt) {
    if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
    const c10::Device device(at::kCUDA, 0);
    std::unique_ptr<State> state = make_state(int64_t{1} << 20);
    const int64_t rows = state->rank_plan(device, 1)->order.to_stream.numel();  // allocated on the default stream
    const c10::Stream stream = new_stream();
    at::Tensor read;
    {
        const c10::StreamGuard guard(stream);
        delay();
        read = state->rank_plan(device, 1)->order.to_stream.clone();
    }
    state.reset();
    std::vector<at::Tensor> written;  // on the default stream, in the memory of the plan if the allocator reuses it
    for (int i = 0; i < 8; ++i) written.push_back(at::full({rows}, -1, at::TensorOptions(device).dtype(at::kLong)));
    stream.synchronize();
    EXPECT_EQ(read.min().item<int64_t>(), 0);
}

}  // namespace
}  // namespace megatron_sb::distributed
