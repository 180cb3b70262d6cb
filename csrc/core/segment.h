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

// Returns the segment of document i of cu_seqlens (rows of q) and cu_seqlens_k (rows of k). The queries of a document
// are the last positions of its keys. Bounds are clamped to the rows of q and k. So values that the host has not
// checked cannot cause an access out of bounds.
SB_HOST_DEVICE inline Segment document_segment(const int32_t* cu_seqlens, const int32_t* cu_seqlens_k, int32_t i,
                                               int32_t q_rows, int32_t k_rows) {
    Segment s;
    s.q_begin = clamp_row(cu_seqlens[i], 0, q_rows);
    s.q_len = clamp_row(cu_seqlens[i + 1], s.q_begin, q_rows) - s.q_begin;
    s.k_begin = clamp_row(cu_seqlens_k[i], 0, k_rows);
    s.k_len = clamp_row(cu_seqlens_k[i + 1], s.k_begin, k_rows) - s.k_begin;
    s.q_pos_minus_k_pos = s.k_len - s.q_len;
    return s;
}

}  // namespace megatron_sb
