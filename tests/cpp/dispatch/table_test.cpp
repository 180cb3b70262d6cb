#include "dispatch/table.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "messages.h"

namespace megatron_sb::dispatch {
namespace {

TEST(Dispatch, CpuSupportsEveryDtypeAndHeadDim) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kBFloat16, Dtype::kFloat16})
        for (int head_dim = 8; head_dim <= 256; head_dim += 8)
            EXPECT_STREQ(find({Device::kCpu, 0, dtype, head_dim, 264 - head_dim}).name, "cpu");
}

TEST(Dispatch, TheErrorNamesTheRequestAndTheSupportedSizes) {
    try {
        find({Device::kCpu, 0, Dtype::kBFloat16, 12, 64});
        FAIL() << "head_dim 12 raised no error";
    } catch (const InvalidArgument& error) {
        EXPECT_TRUE(mentions(error.what(), "bf16 head_dim 12 head_dim_v 64 8 256"));
    }
}

TEST(Dispatch, AnUnsupportedGpuDoesNotGetTheCpuKernels) {
    // No GPU kernel supports sm_70.
    EXPECT_THROW(find({Device::kCuda, 70, Dtype::kBFloat16, 64, 64}), InvalidArgument);
}

TEST(Dispatch, UsesTheFirstGpuKernelsThatSupportTheRequest) {
    if (!built_with_cuda()) GTEST_SKIP() << "this is a build without CUDA";
    const auto name = [](int architecture, Dtype dtype, int head_dim, int head_dim_v) {
        return std::string(find({Device::kCuda, architecture, dtype, head_dim, head_dim_v}).name);
    };
    // A build without machine code for sm_90 has no Hopper kernels.
    const std::string fastest = describe().find("hopper: ") == std::string::npos ? "portable" : "hopper";
    EXPECT_EQ(name(90, Dtype::kBFloat16, 128, 128), fastest);
    EXPECT_EQ(name(90, Dtype::kFloat16, 64, 64), fastest);
    EXPECT_EQ(name(90, Dtype::kBFloat16, 128, 8), fastest);
    EXPECT_EQ(name(90, Dtype::kFloat16, 24, 96), fastest);
    EXPECT_EQ(name(90, Dtype::kBFloat16, 192, 128), fastest);
    EXPECT_EQ(name(90, Dtype::kFloat16, 8, 256), fastest);
    EXPECT_EQ(name(90, Dtype::kFloat32, 128, 128), "portable");
    EXPECT_EQ(name(90, Dtype::kFloat32, 256, 256), "portable");
    EXPECT_EQ(name(80, Dtype::kBFloat16, 128, 128), "portable");
    EXPECT_EQ(name(100, Dtype::kFloat16, 64, 64), "portable");
    const auto gated = [](int head_dim, int head_dim_v, int bias_columns = 0) {
        return std::string(
            find({Device::kCuda, 90, Dtype::kBFloat16, head_dim, head_dim_v, true, false, bias_columns}).name);
    };
    EXPECT_EQ(gated(128, 128), fastest);
    EXPECT_EQ(gated(136, 128, kBiasColumns), fastest);
    EXPECT_EQ(gated(136, 128), "portable");
    EXPECT_EQ(gated(136, 136, kBiasColumns), "portable");
    EXPECT_EQ(gated(144, 128), "portable");
    EXPECT_STREQ(find({Device::kCuda, 90, Dtype::kBFloat16, 128, 128, false, true}).name, "portable");  // paged cache
    EXPECT_THROW(find({Device::kCuda, 90, Dtype::kFloat64, 64, 64}), InvalidArgument);
}

TEST(Dispatch, OnlyTheHopperKernelsWriteGradients) {
    std::vector<Request> requests{{Device::kCpu, 0, Dtype::kFloat32, 64, 64}};
    if (built_with_cuda()) {
        requests.push_back({Device::kCuda, 80, Dtype::kBFloat16, 64, 64});
        requests.push_back({Device::kCuda, 90, Dtype::kBFloat16, 64, 64});
    }
    for (const Request& request : requests) {
        const Kernels& kernels = find(request);
        EXPECT_EQ(kernels.writes_gradients, std::string(kernels.name) == "hopper") << kernels.name;
    }
}

TEST(Dispatch, TheDecodeKernelSupportsAllButFp64FromSm80On) {
    const auto served = [](Device device, int architecture, Dtype dtype, int head_dim, int head_dim_v) {
        return decode_serves({device, architecture, dtype, head_dim, head_dim_v});
    };
    for (const int architecture : {80, 86, 90, 100})
        for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat32})
            EXPECT_EQ(served(Device::kCuda, architecture, dtype, 40, 256), built_with_cuda());
    EXPECT_FALSE(served(Device::kCuda, 90, Dtype::kFloat64, 64, 64));
    EXPECT_FALSE(served(Device::kCuda, 75, Dtype::kFloat16, 64, 64));
    EXPECT_FALSE(served(Device::kCpu, 0, Dtype::kBFloat16, 64, 64));
    EXPECT_EQ(describe().find("decode: ") != std::string::npos, built_with_cuda());
}

}  // namespace
}  // namespace megatron_sb::dispatch
