// The numbers of carry blocks in the portable backward, against a count of the keys that each query row sees.
#if defined(SB_WITH_CUDA)

#include "kernels/portable/carry_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace megatron_sb::portable {
namespace {

// The key tiles that some row of [row, row + rows) sees.
int counted(const Segment& s, bool attend_current, int row, int rows) {
    int tiles = 0;
    for (int r = row; r < row + rows; ++r)
        for (int key = 0; key < s.k_len; ++key)
            if (key < r + s.q_pos_minus_k_pos + int(attend_current)) tiles = std::max(tiles, key / kKeyTile + 1);
    return tiles;
}

TEST(CarryBlocks, AreThoseThatTheRowsSee) {
    for (const int q_len : {1, 64, 65, 200, 384})
        for (const int k_len : {1, 63, 64, 130, 257})
            for (const int offset : {-q_len, -130, -64, -1, 0, 1, 63, 64, 100, k_len})
                for (const bool attend_current : {false, true})
                    for (const int tile_rows : {64, 128}) {
                        const Segment s = {0, q_len, 0, k_len, std::clamp(offset, -q_len, k_len)};
                        const CarryBlocks blocks(s, attend_current, tile_rows);
                        int64_t before = 0;
                        for (int tile = 0; tile < blocks.query_tiles(); ++tile) {
                            const int row = tile * tile_rows, rows = std::min(tile_rows, q_len - row);
                            ASSERT_EQ(blocks.before(tile), before);
                            ASSERT_EQ(blocks.of_tile(tile), counted(s, attend_current, row, rows));
                            before += blocks.of_tile(tile);
                        }
                        ASSERT_EQ(blocks.all(), before);
                    }
}

TEST(CarryBlocks, DoNotOverflow) {
    constexpr int kRows = 1 << 30;
    const CarryBlocks blocks({0, kRows, 0, kRows, 0}, false, 128);
    const int64_t tiles = kRows / 128;
    EXPECT_EQ(blocks.all(), tiles * (tiles + 1));  // tile i sees 2 i + 2 key tiles
}

TEST(CarryBlocks, OfAnEmptySegmentAreNone) {
    EXPECT_EQ(CarryBlocks({5, 0, 3, 100, 0}, true, 64).all(), 0);
    EXPECT_EQ(CarryBlocks({5, 100, 3, 0, 0}, true, 64).all(), 0);
}

}  // namespace
}  // namespace megatron_sb::portable

#endif
