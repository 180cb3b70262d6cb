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

// Thread 0 of warp 1 of CTA 2 waits for an arrival that never comes, with the shortest limit.
__global__ void wait_without_partner(ExpiredWait* record) {
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) {
        hopper::mbarrier_init(&barrier, 1);
        hopper::fence_mbarrier_init();
    }
    __syncthreads();
    if (blockIdx.x == 2 && threadIdx.x == 32) hopper::mbarrier_wait<0>(&barrier, 0, {Wait::kTest, 17, record});
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

constexpr const char* kText = "kernel 'test' on GPU 0 .*CTA 2, warp 1 .*partner.*, number 17";

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
