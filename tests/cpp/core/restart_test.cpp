#include "core/restart.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "core/limits.h"

namespace megatron_sb {
namespace {

TEST(RestartTile, EndsAtTheRecordedEdge) {
    EXPECT_EQ(restart_tile(64, true, 4), 0);
    EXPECT_EQ(restart_tile(128, true, 4), 1);
    EXPECT_EQ(restart_tile(200, true, 4), 3) << "for a k_len that is not a multiple of the tile";
}

TEST(RestartTile, OfEdgeZeroDependsOnWhetherThereIsMass) {
    EXPECT_EQ(restart_tile(0, true, 4), kBeforeAllKeys);
    EXPECT_EQ(restart_tile(0, false, 4), kNeverStarts);
}

TEST(RestartTile, IsNeverStartsForATileThatTheCallerDoesNotProcess) {
    EXPECT_EQ(restart_tile(256, true, 4), 3);
    EXPECT_EQ(restart_tile(257, true, 4), kNeverStarts);
    EXPECT_GT(kNeverStarts, kMaxRows / kRestartTile) << "the index of a tile could equal kNeverStarts";
}

TEST(RestartTile, OfARowComesFromTheRecordOfTheRow) {
    int32_t edge[] = {0, 0, 65};
    double mass[] = {0.0, 0.5, 0.25};
    BackwardParams params = {};
    params.restart = {edge, mass};
    EXPECT_EQ(restart_tile<double>(params, 0, 2), kNeverStarts);
    EXPECT_EQ(restart_tile<double>(params, 1, 2), kBeforeAllKeys);
    EXPECT_EQ(restart_tile<double>(params, 2, 2), 1);
}

TEST(RestartMass, IsScaledByMassIn) {
    double mass[] = {0.5, 0.25}, mass_in[] = {1.0, 0.5};
    BackwardParams params = {};
    params.restart = {nullptr, mass};
    EXPECT_EQ(restart_mass<double>(params, 1), 0.25);
    params.mass_in = mass_in;
    EXPECT_EQ(restart_mass<double>(params, 1), 0.125);
}

TEST(Limits, HeadDimIsAPositiveMultipleOf8UpTo256) {
    EXPECT_TRUE(is_supported_head_dim(8));
    EXPECT_TRUE(is_supported_head_dim(256));
    for (const int64_t head_dim : {-8, 0, 12, 264}) EXPECT_FALSE(is_supported_head_dim(head_dim)) << head_dim;
}

TEST(Limits, WorkspacesAreRoundedUpToTheirAlignment) {
    EXPECT_EQ(align_workspace(0), 0);
    EXPECT_EQ(align_workspace(1), kWorkspaceAlignment);
    EXPECT_EQ(align_workspace(kWorkspaceAlignment), kWorkspaceAlignment);
}

}  // namespace
}  // namespace megatron_sb
