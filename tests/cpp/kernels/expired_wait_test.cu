// A wait without a partner expires, and the error names it. The kernel ends with an error of the CUDA context, so it
// runs in another process: a death test.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "core/error.h"
#include "kernels/common/expired_wait.h"
#include "kernels/common/launch.h"
#include "kernels/hopper/wait.cuh"

namespace megatron_sb {
namespace {

using hopper::ExpiredWait, hopper::Wait;

struct Barriers {
    uint64_t own, of_other_warp;
};
template <class Visit>
__device__ void visit_barriers(Barriers& b, const Visit& visit) {
    hopper::visit_each(Wait::kTest, b.own, visit);
    hopper::visit_each(Wait::kTestOfOtherWarp, b.of_other_warp, visit);
}

// Two threads of CTA 2 wait for arrivals that never come. One of them is a watchdog with the shortest limit.
__global__ void wait_without_partner(ExpiredWait* record) {
    __shared__ hopper::NotedBarriers<Barriers> barriers;
    if (threadIdx.x == 0) {
        barriers.init_notes();
        hopper::mbarrier_init(&barriers.own, 1);
        hopper::mbarrier_init(&barriers.of_other_warp, 1);
        hopper::fence_mbarrier_init();
    }
    __syncthreads();
    if (blockIdx.x != 2) return;
    if (threadIdx.x == 0)
        hopper::watch_until<Wait::kTest, 0>(barriers, record,
                                            [&] { return hopper::mbarrier_try_wait(&barriers.own, 0); });
    if (threadIdx.x == 32) hopper::mbarrier_wait(&barriers.of_other_warp, 0);
}

// Returns the error of the kernel.
cudaError_t run_wait_without_partner() {
    wait_without_partner<<<3, 64>>>(common::expired_wait_record());
    common::check_launch("wait_without_partner");
    return cudaDeviceSynchronize();
}

bool has_hopper_gpu() {
    int devices = 0, major = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
}

class ExpiredWaitDeathTest : public testing::Test {
  protected:
    void SetUp() override {
        if (!has_hopper_gpu()) GTEST_SKIP() << "needs a GPU with sm_90";
        testing::GTEST_FLAG(death_test_style) = "threadsafe";  // starts a new process: CUDA does not survive fork()
    }
};

constexpr const char* kText = "kernel 'test' on GPU 0 .*CTA 2, .*a partner that never arrives, another one";

TEST_F(ExpiredWaitDeathTest, IsPartOfLaterErrors) {
    const auto fail = [] {
        try {
            common::check("test", "cudaDeviceSynchronize", run_wait_without_partner());
        } catch (const RuntimeFailure& failure) {
            std::fprintf(stderr, "error: %s\n", failure.what());
            std::exit(3);
        }
    };
    EXPECT_EXIT(fail(), testing::ExitedWithCode(3), std::string("error: test: cudaDeviceSynchronize failed.*") + kText);
}

TEST_F(ExpiredWaitDeathTest, IsPrintedAtExitIfNobodyHasSeenIt) {
    EXPECT_EXIT(std::exit(run_wait_without_partner() == cudaSuccess ? 0 : 4), testing::ExitedWithCode(4),
                std::string("megatron_sb: A wait of the ") + kText);
}

TEST(ExpiredWait, NothingIsDescribedWithoutOne) {
    EXPECT_EQ(common::describe_expired_waits(), "");
}

}  // namespace
}  // namespace megatron_sb
