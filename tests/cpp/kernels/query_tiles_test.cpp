// The rows of a query tile.
#if defined(SB_WITH_CUDA)

#include "kernels/common/query_tiles.h"

#include <gtest/gtest.h>

namespace megatron_sb::common {
namespace {

constexpr int kMultiprocessors = 132;

// Of a call with one sequence, whose rows are the last positions of `keys` keys.
ForwardParams call(int heads, int rows, int keys) {
    ForwardParams params;
    params.sizes = {Dtype::kBFloat16, 0, 1, heads, heads, rows, keys, 128, 128};
    params.segments.whole = {0, rows, 0, keys, keys - rows};
    return params;
}
int rows_of(const ForwardParams& params, int most_rows) {
    return choose_tile_rows(params, most_rows, kMultiprocessors);
}

TEST(QueryTiles, OfFewHeadsHaveTheMeasuredRows) {  // docs/design/kernels-hopper-forward.md
    struct Case {
        int heads, length, of_two_warpgroups, of_three;
    };
    for (const Case c : {Case{1, 16384, 64, 64},
                         {2, 8192, 64, 64},
                         {4, 4096, 64, 64},
                         {2, 16384, 128, 128},
                         {4, 8192, 128, 128},
                         {6, 4096, 128, 128},
                         {8, 4096, 128, 128},
                         {16, 1024, 128, 128},
                         {32, 512, 128, 128},
                         {12, 16384, 128, 192},
                         {24, 4096, 128, 192}}) {
        const ForwardParams params = call(c.heads, c.length, c.length);
        EXPECT_EQ(rows_of(params, 128), c.of_two_warpgroups) << c.heads << " heads, " << c.length;
        EXPECT_EQ(rows_of(params, 192), c.of_three) << c.heads << " heads, " << c.length;
    }
}

TEST(QueryTiles, WhoseRowsSeeAllKeysRunAtOnceOnlyIfEachHasAMultiprocessor) {
    EXPECT_EQ(rows_of(call(2, 4096, 65536), 192), 64);   // 128 tiles of 64 rows
    EXPECT_EQ(rows_of(call(4, 4096, 65536), 192), 128);  // 256, or 128 of 128 rows
    EXPECT_EQ(rows_of(call(8, 4096, 65536), 192), 192);
}

TEST(QueryTiles, OfDocumentsCountAsTheLongest) {
    static const Segment table[3] = {};  // the host does not read it
    ForwardParams params = call(2, 4096, 4096);
    params.segments.data = table;
    params.segments.size = 3;
    EXPECT_EQ(rows_of(params, 192), 64);  // at most 66 tiles of each head
    params.sizes.num_heads = 3;
    EXPECT_EQ(rows_of(params, 192), 128);
    params.sizes.batch = 4;
    EXPECT_EQ(rows_of(params, 192), 192);
}

TEST(QueryTiles, OfEmptyCallsAreSmall) {
    EXPECT_EQ(rows_of(call(1, 1, 0), 192), 64);
    EXPECT_EQ(rows_of(call(1, 1, 1), 128), 64);
    ForwardParams params = call(3, 10, 10);
    params.segments = {nullptr, 0};
    EXPECT_EQ(rows_of(params, 192), 64);
}

}  // namespace
}  // namespace megatron_sb::common

#endif
