// Tests of the two streams for computations side by side. They run on a CPU and, if there is one, on a GPU.
#include "ops/side_stream.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace megatron_sb::ops {
namespace {

using at::Tensor;

// So much work that a missing order between the streams shows.
constexpr int64_t kNumbers = 1 << 24;
constexpr int kPasses = 20;

// Adds 1 to x kPasses times.
void count_up(const Tensor& x) {
    for (int pass = 0; pass < kPasses; ++pass) x.add_(1);
}

void expect_all_equal(const Tensor& x, double value) {
    EXPECT_EQ(x.min().item<double>(), value);
    EXPECT_EQ(x.max().item<double>(), value);
}

void check_order(at::Device device) {
    for (int round = 0; round < 5; ++round) {
        const Tensor before = at::zeros({kNumbers}, device), other = at::zeros({kNumbers}, device);
        Tensor made;
        count_up(before);
        side_by_side(
            device, [&] { count_up(other); },
            [&] {
                made = before.clone();
                count_up(made);
                return std::vector<Tensor>{made, Tensor()};
            });
        expect_all_equal(made + other, 3 * kPasses);
    }
}

TEST(SideStream, OrdersWorkBeforeAndAfter) {
    check_order(at::kCPU);
}

TEST(SideStream, OrdersWorkBeforeAndAfterOnAGpu) {
    if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
    check_order(at::kCUDA);
}

// A tensor that a second call has made is freed while the current stream still reads it. A later second call must not
// get its memory before that.
TEST(SideStream, KeepsMemoryThatTheCurrentStreamReadsOnAGpu) {
    if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
    const Tensor sum = at::zeros({kNumbers}, at::kCUDA);
    const auto nothing = [] {};
    for (int round = 0; round < kPasses; ++round) {
        Tensor made;
        side_by_side(at::kCUDA, nothing, [&] { return std::vector<Tensor>{made = at::ones_like(sum)}; });
        count_up(sum);
        sum.add_(made);
        made = Tensor();
        side_by_side(at::kCUDA, nothing, [&] { return std::vector<Tensor>{at::full_like(sum, NAN)}; });
    }
    expect_all_equal(sum, kPasses * (kPasses + 1));
}

TEST(SideStream, AnErrorOfTheSecondCallIsPassedOn) {
    const auto second = []() -> std::vector<Tensor> { throw std::runtime_error("second"); };
    EXPECT_THROW(side_by_side(
                     at::kCPU, [] {}, second),
                 std::runtime_error);
    if (at::hasCUDA()) {
        EXPECT_THROW(side_by_side(
                         at::kCUDA, [] {}, second),
                     std::runtime_error);
    }
}

}  // namespace
}  // namespace megatron_sb::ops
