// The shared memory that the decode kernel needs, which decides where it serves a cache.
#if defined(SB_WITH_CUDA)

#include "kernels/decode/decode.h"

#include <gtest/gtest.h>

namespace megatron_sb::decode {
namespace {

constexpr int kOfSm86 = 99 << 10, kOfSm80 = 163 << 10;  // bytes that a CTA can have

int needed(Dtype dtype, int head_dim, int head_dim_v) {
    return least_shared_bytes({dtype, 0, 1, 8, 2, 1, 4096, head_dim, head_dim_v});
}

TEST(Decode, SharedMemoryFitsEveryGpuExceptForWideRowsOfFp32) {
    for (const int head_dim : {8, 64, 72, 128, 136, 256})
        for (const int head_dim_v : {8, 64, 128, 256}) {
            for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16})
                EXPECT_LE(needed(dtype, head_dim, head_dim_v), kOfSm86);
            const bool wide = head_dim > 128 || head_dim_v > 128;
            EXPECT_EQ(needed(Dtype::kFloat32, head_dim, head_dim_v) > kOfSm86, wide);
            EXPECT_LE(needed(Dtype::kFloat32, head_dim, head_dim_v), kOfSm80);
        }
}

}  // namespace
}  // namespace megatron_sb::decode

#endif
