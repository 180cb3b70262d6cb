// A wait without a partner expires, and the error names it. The kernel ends with an error of the CUDA context, so it
// runs in another process: a death test.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "core/error.h"
#include "kernels/common/expired_wait.h"
#include "kernels/common/launch.h"
#include "kernels/hopper/ring.cuh"

namespace megatron_sb {
namespace {

using hopper::Wait, hopper::WaitRecord;

struct Barriers {
    hopper::Event<Wait::kTest, 1, 1> own;
    hopper::Event<Wait::kTestOfOtherWarp, 1, 1> of_other_warp;

    template <class Visit>
    __device__ void visit(const Visit& f) {
        f(own);
        f(of_other_warp);
    }
};

// Two threads of CTA 2 wait for arrivals that never come. One of them is a watchdog.
__global__ void wait_without_partner(WaitRecord* record) {
    __shared__ hopper::NotedBarriers<Barriers> barriers;
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();
    if (blockIdx.x != 2) return;
    if (threadIdx.x == 0) hopper::watch_until<Wait::kTest>(barriers, record, [&] { return barriers.own.try_wait({}); });
    if (threadIdx.x == 32) barriers.of_other_warp.wait({});
}

// Returns the error of the kernel.
cudaError_t run_wait_without_partner() {
    WaitRecord* const record = common::wait_record();
    const uint32_t shortest = 0;
    common::check("test", "cudaMemcpy", cudaMemcpy(&record->limit, &shortest, sizeof(shortest), cudaMemcpyDefault));
    wait_without_partner<<<3, 64>>>(record);
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

// Starts a new process, because the variable is read once. Exits with 0 if the limit is `expected`, and with 3 if the
// value is an error.
void exit_with_limit(const char* value, uint32_t expected) {
    setenv("MEGATRON_SB_WAIT_LIMIT_SECONDS", value, 1);
    try {
        std::exit(common::wait_limit_seconds() == expected ? 0 : 1);
    } catch (const InvalidArgument& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        std::exit(3);
    }
}

TEST(WaitLimitDeathTest, IsReadFromTheEnvironment) {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
    EXPECT_EXIT(exit_with_limit("1", 1), testing::ExitedWithCode(0), "");
    EXPECT_EXIT(exit_with_limit("86400", 86400), testing::ExitedWithCode(0), "");
    for (const char* const wrong : {"", "0", "-1", "86401", "60 s", "1e3", "99999999999999999999"})
        EXPECT_EXIT(
            exit_with_limit(wrong, 0), testing::ExitedWithCode(3),
            std::string("MEGATRON_SB_WAIT_LIMIT_SECONDS must be an integer from 1 to 86400, got '") + wrong + "'");
}

TEST(ExpiredWait, NothingIsDescribedWithoutOne) {
    EXPECT_EQ(common::describe_expired_waits(), "");
}

}  // namespace
}  // namespace megatron_sb
