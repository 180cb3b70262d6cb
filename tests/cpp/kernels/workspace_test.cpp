// Workspace sizes of the CUDA kernels. The host computes them without a device.
#if defined(SB_WITH_CUDA)

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "kernels/portable/portable.h"

namespace megatron_sb {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

BackwardParams one_head(int32_t rows) {
    BackwardParams params = {};
    params.sizes = {Dtype::kFloat32, 0, 1, 1, 1, rows, rows, 64, 64};
    params.options.mass_threshold = 0x1p-24;
    params.segments.whole = {0, rows, 0, rows, 0};
    return params;
}

// Query tile i of 64 rows sees i + 1 key tiles of 64 rows. For each pair of tiles the workspace holds two floats for
// each row.
TEST(PortableWorkspace, CountsMorePairsOfTilesThanAnInt32Holds) {
    for (const int32_t rows : {1 << 20, 6'000'000}) {
        const int64_t tiles = rows / 64, pairs = tiles * (tiles + 1) / 2;
        const int64_t bytes = portable::backward_workspace(one_head(rows), kNoLimit);
        EXPECT_GE(bytes, pairs * 512) << rows;
        EXPECT_LE(bytes, pairs * 544) << rows;
    }
}

// Every q_pos_minus_k_pos of k_len or more means that every query sees every key.
TEST(PortableWorkspace, IsTheSameForAllOffsetsThatHideNoKey) {
    BackwardParams params = one_head(4096);
    params.segments.whole.q_pos_minus_k_pos = 4096;
    const int64_t all = portable::backward_workspace(params, kNoLimit);
    params.segments.whole.q_pos_minus_k_pos = std::numeric_limits<int32_t>::max();
    EXPECT_EQ(portable::backward_workspace(params, kNoLimit), all);
}

}  // namespace
}  // namespace megatron_sb

#endif
