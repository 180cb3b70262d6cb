#include "core/segment.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/error.h"

namespace megatron_sb {
namespace {

TEST(Segment, HasNoPaddingBetweenItsIntegers) {
    EXPECT_EQ(sizeof(Segment), kSegmentFields * sizeof(int32_t));
}

TEST(DocumentSegment, QueriesAreTheLastPositionsOfTheKeys) {
    const std::vector<int32_t> q = {0, 2, 2, 5}, k = {0, 7, 7, 12};
    const Segment first = document_segment(q.data(), k.data(), 0, 5, 12);
    EXPECT_EQ(first.q_begin, 0);
    EXPECT_EQ(first.q_len, 2);
    EXPECT_EQ(first.k_len, 7);
    EXPECT_EQ(first.q_pos_minus_k_pos, 5);
    EXPECT_EQ(document_segment(q.data(), k.data(), 1, 5, 12).q_len, 0);
    const Segment last = document_segment(q.data(), k.data(), 2, 5, 12);
    EXPECT_EQ(last.q_begin, 2);
    EXPECT_EQ(last.k_begin, 7);
    EXPECT_EQ(last.q_pos_minus_k_pos, 2);
}

TEST(DocumentSegment, IsClampedToTheRows) {
    const std::vector<int32_t> offsets = {0, 50, 20, 90};  // decreasing, and beyond row 64
    for (int i = 0; i < 3; ++i) {
        const Segment s = document_segment(offsets.data(), offsets.data(), i, 64, 64);
        EXPECT_GE(s.q_len, 0) << i;
        EXPECT_LE(s.q_begin + s.q_len, 64) << i;
        EXPECT_GE(s.k_len, 0) << i;
        EXPECT_LE(s.k_begin + s.k_len, 64) << i;
    }
}

TEST(Clamped, BoundsTheOffsetByTheNumberOfRows) {
    const Sizes sizes = {Dtype::kFloat32, 1, 1, 1, 10, 100, 64, 64};
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
