// Functions on segments, for host and device.
#pragma once

#include "core/params.h"

namespace megatron_sb {

SB_HOST_DEVICE inline int32_t clamp_row(int32_t row, int32_t low, int32_t high) {
    return row < low ? low : row > high ? high : row;
}

// Returns the segment with its rows clamped to the rows of q and k. Kernels call it because the host cannot check a
// table in device memory.
SB_HOST_DEVICE inline Segment clamped(const Segment& s, const Sizes& sizes) {
    Segment c = s;
    c.q_begin = clamp_row(s.q_begin, 0, sizes.q_rows);
    c.q_len = clamp_row(s.q_len, 0, sizes.q_rows - c.q_begin);
    c.k_begin = clamp_row(s.k_begin, 0, sizes.k_rows);
    c.k_len = clamp_row(s.k_len, 0, sizes.k_rows - c.k_begin);
    // At -q_len or less no query sees a key, and at k_len or more every query sees every key. Offsets beyond these
    // limits mean the same and are clamped, because sums with them could overflow.
    c.q_pos_minus_k_pos = clamp_row(s.q_pos_minus_k_pos, -c.q_len, c.k_len);
    return c;
}

// Returns the segment of a document with the given rows of q and k. The queries are the last positions of its keys.
SB_HOST_DEVICE inline Segment document_segment(int32_t q_begin, int32_t q_end, int32_t k_begin, int32_t k_end) {
    const int32_t q_len = q_end - q_begin, k_len = k_end - k_begin;
    return {q_begin, q_len, k_begin, k_len, k_len - q_len};
}

}  // namespace megatron_sb
