// Errors of CUDA calls and launches.
#if defined(SB_WITH_CUDA)

#include "kernels/common/launch.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/limits.h"
#include "messages.h"

namespace megatron_sb {
namespace {

template <class F>
std::string message_of(const F& f) {
    try {
        f();
    } catch (const RuntimeFailure& failure) {
        return failure.what();
    }
    return "no error";
}

TEST(Check, NamesTheKernelsTheCallAndTheError) {
    common::check("decode", "cudaMemsetAsync", cudaSuccess);
    const std::string message = message_of([] { common::check("decode", "cudaMemsetAsync", cudaErrorInvalidValue); });
    EXPECT_TRUE(mentions(message, "decode cudaMemsetAsync cudaErrorInvalidValue"));
}

TEST(Check, WithoutCodeForTheGpuTheErrorNamesTheBuildOption) {
    for (const cudaError_t error : {cudaErrorNoKernelImageForDevice, cudaErrorUnsupportedPtxVersion}) {
        const std::string message = message_of([=] { common::check("decode", "launch", error); });
        EXPECT_TRUE(mentions(message, "decode launch sm_80 SB_CUDA_ARCHITECTURES"));
    }
    const std::string message = message_of([] { common::check("decode", "launch", cudaErrorInvalidValue); });
    EXPECT_FALSE(mentions(message, "SB_CUDA_ARCHITECTURES"));
}

TEST(Check, FailedCallIsNotReportedForTheNextLaunch) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) GTEST_SKIP() << "there is no CUDA device";
    const cudaError_t error = cudaSetDevice(-1);
    EXPECT_NE(error, cudaSuccess);
    EXPECT_TRUE(mentions(message_of([&] { common::check("decode", "cudaSetDevice", error); }), "cudaSetDevice"));
    EXPECT_NO_THROW(common::check_launch("another launch"));
}

TEST(Launch, TooManyThreadBlocksAreAnError) {
    const auto launch = [] { common::launch_with("decode", nullptr, kMaxThreadBlocks + 1, 32, 0, nullptr, nullptr); };
    EXPECT_TRUE(mentions(message_of(launch), "decode 2147483648 2147483647"));
}

TEST(Launch, NothingIsLaunchedWithoutThreadBlocks) {
    EXPECT_NO_THROW(common::launch_with("decode", nullptr, 0, 32, 0, nullptr, nullptr));
}

}  // namespace
}  // namespace megatron_sb

#endif
