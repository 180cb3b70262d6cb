#include "distributed/head_exchange.h"

#include <ATen/ATen.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

namespace megatron_sb::distributed {
namespace {

// One of two ranks, to which the other one sends what it receives.
class Mirror final : public Transport {
  public:
    int rank() const override { return 0; }
    int size() const override { return 2; }
    c10::Device control_device() const override { return at::kCPU; }

    std::unique_ptr<Pending> exchange(const std::vector<Message>& sends,
                                      const std::vector<Message>& receives) override {
        for (size_t i = 0; i < receives.size(); ++i) receives[i].tensor.copy_(sends[i].tensor);
        return std::make_unique<Done>();
    }
    std::unique_ptr<Pending> all_to_all(const at::Tensor& input, const std::vector<int64_t>&, const at::Tensor& output,
                                        const std::vector<int64_t>&) override {
        output.copy_(input.view_as(output));
        return std::make_unique<Done>();
    }
    std::unique_ptr<Pending> all_gather(const at::Tensor&, const at::Tensor&) override { return nullptr; }
    std::unique_ptr<Pending> reduce_scatter_sum(const at::Tensor&, const at::Tensor&) override { return nullptr; }

  private:
    struct Done final : Pending {
        void wait() override {}
    };
};

// The most bytes of tensors that this thread had at a time, of those that it made while this object exists.
class PeakMemory final : public c10::MemoryReportingInfoBase {
  public:
    void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
        now_ += bytes;
        peak_ = std::max(peak_, now_);
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t peak() const { return peak_; }

  private:
    int64_t now_ = 0, peak_ = 0;
};

// Gradients of q, k and v are packed, sent, received and written: at each time there are two of these four copies.
TEST(HeadExchange, HoldsTwoCopiesOfTheGradients) {
    constexpr int64_t kRows = 256, kHeads = 8, kWidth = 64;
    Mirror transport;
    const plan::Partition partition(plan::Layout::kContiguous, plan::Packing::kPerDocument, 2, kRows, std::nullopt);
    for (const int64_t rows_to_split : {kRows, kRows + 1}) {
        const RankPlan plan = make_rank_plan(partition, 0, at::kCPU, 2, rows_to_split);
        EXPECT_EQ(plan.to_joint.defined(), rows_to_split > kRows);  // both ways to send rows
        const HeadExchange exchange(transport, plan, kHeads, kHeads);
        const auto memory = std::make_shared<PeakMemory>();
        const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
        std::vector<at::Tensor> gradients, results;
        for (int i = 0; i < 3; ++i) gradients.push_back(at::ones({1, kRows, kHeads / 2, kWidth}, at::kBFloat16));
        for (const at::Tensor& by_rank : exchange.to_rows(std::move(gradients))) {
            results.push_back(at::empty({1, kRows / 2, kHeads, kWidth}, at::kBFloat16));
            write_heads(results.back(), by_rank);
        }
        for (const at::Tensor& x : results) EXPECT_TRUE(x.eq(1).all().item<bool>());
        const double copies = double(memory->peak()) / (3 * kRows * kHeads / 2 * kWidth * 2);
        EXPECT_GT(copies, 1.99) << "tensors are not counted";
        EXPECT_LT(copies, 2.05);
    }
}

}  // namespace
}  // namespace megatron_sb::distributed
