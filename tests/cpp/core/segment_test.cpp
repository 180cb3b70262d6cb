#include "core/segment.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/error.h"

namespace megatron_sb {
namespace {

TEST(Segment, HasNoPaddingBetweenItsIntegers) {
    EXPECT_EQ(sizeof(Segment), kSegmentFields * sizeof(int32_t));
}

TEST(DocumentSegment, QueriesAreTheLastPositionsOfTheKeys) {
    const Segment s = document_segment(2, 5, 7, 12);
    EXPECT_EQ(s.q_begin, 2);
    EXPECT_EQ(s.q_len, 3);
    EXPECT_EQ(s.k_begin, 7);
    EXPECT_EQ(s.k_len, 5);
    EXPECT_EQ(s.q_pos_minus_k_pos, 2);
}

TEST(Clamped, BoundsTheOffsetByTheNumberOfRows) {
    const Sizes sizes = {Dtype::kFloat32, 0, 1, 1, 1, 10, 100, 64, 64};
    const int32_t largest = std::numeric_limits<int32_t>::max();
    EXPECT_EQ(clamped({0, 10, 0, 100, 90}, sizes).q_pos_minus_k_pos, 90);
    EXPECT_EQ(clamped({0, 10, 0, 100, largest}, sizes).q_pos_minus_k_pos, 100) << "every query sees all 100 keys";
    EXPECT_EQ(clamped({4, 10, 0, 100, -largest}, sizes).q_pos_minus_k_pos, -6) << "none of the 6 queries sees a key";
}

TEST(Error, ConcatenatesItsParts) {
    EXPECT_STREQ(InvalidArgument(concat("a is ", 3, "; ", 0.5)).what(), "a is 3; 0.5");
}

}  // namespace
}  // namespace megatron_sb
