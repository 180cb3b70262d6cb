#include "dispatch/table.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace megatron_sb::dispatch {
namespace {

TEST(Dispatch, CpuServesEveryDtypeAndMultipleOfEight) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kBFloat16, Dtype::kFloat16})
        for (int head_dim = 8; head_dim <= 256; head_dim += 8)
            EXPECT_STREQ(find({Device::kCpu, 0, dtype, head_dim, 264 - head_dim}).name, "cpu");
}

TEST(Dispatch, WhatIsMissingIsNamedBesideWhatThereIs) {
    try {
        find({Device::kCpu, 0, Dtype::kBFloat16, 12, 64});
        FAIL() << "head_dim 12 was served";
    } catch (const InvalidArgument& error) {
        const std::string message = error.what();
        EXPECT_NE(message.find("bf16, head_dim 12, head_dim_v 64"), std::string::npos) << message;
        EXPECT_NE(message.find("multiples of 8 up to 256"), std::string::npos) << message;
    }
}

TEST(Dispatch, CpuKernelsServeNoGpu) {
    // sm_70 is older than any GPU kernel here will be.
    EXPECT_THROW(find({Device::kCuda, 70, Dtype::kBFloat16, 64, 64}), InvalidArgument);
}

}  // namespace
}  // namespace megatron_sb::dispatch
