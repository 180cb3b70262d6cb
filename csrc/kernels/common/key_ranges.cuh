// The key ranges of a call's segments. Segments that begin at the same key share a key range: the keys of the longest
// of them. The backward kernels make one list of key tiles for each range.
#pragma once

#include "core/segment.h"

namespace megatron_sb::common {

// Three tables in global memory, indexed by the first key of a range. They must be zero before add(), and add() of all
// segments must come before any other function: separate them by a launch, or by __syncthreads() in one CTA.
class KeyRanges {
  public:
    static __host__ __device__ int64_t entries(int32_t k_rows) { return 3 * int64_t(k_rows); }

    __device__ KeyRanges(int32_t* tables, int32_t k_rows, int32_t num_segments)
        : from_end_(tables), size_(tables + k_rows), longest_(tables + 2 * int64_t(k_rows)), segments_(num_segments) {}

    // Adds segment i, which has queries and keys.
    __device__ void add(const Segment& s, int i) const {
        atomicMax(&from_end_[s.k_begin], segments_ - i);
        atomicAdd(&size_[s.k_begin], 1);
        atomicMax(&longest_[s.k_begin], s.k_len);
    }
    // Whether segment i is the first one of its range.
    __device__ bool is_first(const Segment& s, int i) const { return __ldcg(&from_end_[s.k_begin]) == segments_ - i; }
    __device__ bool is_shared(const Segment& s) const { return __ldcg(&size_[s.k_begin]) > 1; }
    __device__ int num_keys(const Segment& s) const { return __ldcg(&longest_[s.k_begin]); }

  private:
    int32_t* from_end_;  // number of segments minus the index of the first one in the range; 0: no segment
    int32_t* size_;      // number of segments in the range
    int32_t* longest_;   // largest number of keys of a segment in the range
    int32_t segments_;
};

// Returns the next segment of the key range of segment i, or -1.
__device__ inline int next_in_range(const KeyRanges& ranges, const Segments& segments, const Sizes& sizes, int i) {
    const Segment s = clamped(segments[i], sizes);
    if (!ranges.is_shared(s)) return -1;
    for (int j = i + 1; j < segments.size; ++j) {
        const Segment other = clamped(segments[j], sizes);
        if (other.k_begin == s.k_begin && other.q_len > 0 && other.k_len > 0) return j;
    }
    return -1;
}

}  // namespace megatron_sb::common
