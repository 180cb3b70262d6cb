// What the plans of the portable and the Hopper backward share. Each plan is made by one CTA of kPlanThreads threads,
// because the host never reads the segment table. The work is linear in the number of segments and of tiles.
//
// Segments that begin at the same key share a key range: the keys of the longest of them. A key range is divided into
// key tiles. A backward kernel visits, for a key tile, the segments of its range.
//
// The planner reads clamped segments. Rows that are in several segments, which no caller may pass, can still make the
// counts larger than the arrays, so callers clamp every index that they write.
#pragma once

#include "core/segment.h"
#include "kernels/common/block_scan.cuh"

namespace megatron_sb::common {

constexpr int kPlanThreads = 1024;

SB_HOST_DEVICE inline bool has_pairs(const Segment& s) {
    return s.q_len > 0 && s.k_len > 0;
}

// Calls f(i, segment, units of all segments before it) for each segment, and returns the units of all segments.
// units(segment) counts, for example, steps. All threads of the CTA must call this.
template <class Units, class F>
__device__ inline int64_t number_units(const Sizes& sizes, const Segments& segments, int64_t* warp_sums, Units units,
                                       F f) {
    int64_t before = 0;
    for (int round = 0; round < segments.size; round += kPlanThreads) {
        const int i = round + int(threadIdx.x);
        const Segment s = i < segments.size ? clamped(segments[i], sizes) : Segment{};
        const int64_t mine = has_pairs(s) ? units(s) : 0;
        const auto sums = scan_over_block(mine, int64_t(0), warp_sums, Sum());
        if (i < segments.size) f(i, s, before + sums.inclusive - mine);
        before += sums.total;
    }
    return before;
}

// Calls f(i, segment, n) for each segment and each n < count(i, segment). The threads are divided evenly among the
// segments.
template <class Count, class F>
__device__ inline void for_each_part(const Sizes& sizes, const Segments& segments, Count count, F f) {
    int threads = kPlanThreads;
    while (threads > 1 && threads * int64_t(segments.size) > kPlanThreads) threads /= 2;
    for (int i = threadIdx.x / threads; i < segments.size; i += kPlanThreads / threads) {
        const Segment s = clamped(segments[i], sizes);
        const int size = has_pairs(s) ? count(i, s) : 0;
        for (int n = threadIdx.x % threads; n < size; n += threads) f(i, s, n);
    }
}

// Plans the key tiles: add() every segment with pairs, then link(), then list(). All threads of the CTA call link() and
// list(). `tables` are entries() integers in global memory, which must be zero before the first add().
class KeyTilePlanner {
  public:
    static constexpr int kMostGroups = 64;

    static int64_t entries(int32_t k_rows, int tile_keys) {
        return 3 * int64_t(k_rows) + num_places(k_rows, tile_keys) + kMostGroups + 1;
    }

    __device__ KeyTilePlanner(const Sizes& sizes, const Segments& segments, int tile_keys, int32_t* tables)
        : sizes_(sizes),
          segments_(segments),
          tile_keys_(tile_keys),
          from_end_(tables),
          latest_(tables + sizes.k_rows),
          longest_(tables + 2 * int64_t(sizes.k_rows)),
          offsets_(tables + 3 * int64_t(sizes.k_rows)),
          group_begin_(offsets_ + num_places(sizes.k_rows, tile_keys)),
          any_shared_(group_begin_ + kMostGroups) {}

    __device__ void add(const Segment& s, int i) {
        atomicMax(&from_end_[s.k_begin], segments_.size - i);
        atomicMax(&longest_[s.k_begin], s.k_len);
        if (atomicExch(&latest_[s.k_begin], 1) != 0) __stcg(any_shared_, 1);
    }

    // Calls set_next(i, j) for each segment with pairs: j is the next segment of its range, or -1. If segments share
    // ranges, one warp visits them in order, 32 at a time.
    template <class SetNext>
    __device__ void link(SetNext set_next) {
        __syncthreads();
        if (__ldcg(any_shared_) == 0) {
            for (int i = threadIdx.x; i < segments_.size; i += kPlanThreads) set_next(i, -1);
        } else if (threadIdx.x < 32) {
            for (int i = threadIdx.x; i - int(threadIdx.x) < segments_.size; i += 32) {
                link_of_warp(i, set_next);
                __syncwarp();
            }
        }
        __syncthreads();
    }

    // Calls write(at, segment, tile, keys of the range) for each key tile, `at` from 0 on, and returns the number of
    // key tiles. They are sorted with a counting sort: by the group of their range, and in a group by tile number, the
    // oldest first. `segment` is the first of the range. group_of(segment) is from 0 to kMostGroups - 1.
    template <class GroupOf, class Write>
    __device__ int list(int64_t* warp_sums, GroupOf group_of, Write write) {
        const auto tiles = [&](int i, const Segment& s) {
            return is_first(s, i) ? num_tiles(num_keys(s), tile_keys_) : 0;
        };
        const int places_used = begin_groups(warp_sums, group_of, tiles);
        const auto offset = [&](int i, int tile) {
            return &offsets_[min(__ldcg(&group_begin_[group_of(i)]) + tile, places_used - 1)];
        };
        for_each_part(sizes_, segments_, tiles,
                      [&](int i, const Segment&, int tile) { atomicAdd(offset(i, tile), 1); });
        __syncthreads();
        int64_t before = 0;
        for (int round = 0; round < places_used; round += kPlanThreads) {
            const int place = round + int(threadIdx.x);
            const int64_t count = place < places_used ? __ldcg(&offsets_[place]) : 0;
            const auto sums = scan_over_block(count, int64_t(0), warp_sums, Sum());
            if (place < places_used) __stcg(&offsets_[place], int32_t(before + sums.inclusive - count));
            before += sums.total;
        }
        __syncthreads();
        for_each_part(sizes_, segments_, tiles, [&](int i, const Segment& s, int tile) {
            write(atomicAdd(offset(i, tile), 1), i, tile, num_keys(s));
        });
        return int(before);
    }

  private:
    static __host__ __device__ int num_tiles(int keys, int tile_keys) { return (keys + tile_keys - 1) / tile_keys; }
    // In the table of the counting sort: as many for each group as its longest range has tiles.
    static __host__ __device__ int num_places(int k_rows, int tile_keys) {
        return num_tiles(k_rows, tile_keys) + kMostGroups;
    }
    // Writes where the places of each group begin, and returns the number of places.
    template <class GroupOf, class Tiles>
    __device__ int begin_groups(int64_t* warp_sums, GroupOf group_of, Tiles tiles) {
        for (int i = threadIdx.x; i < segments_.size; i += kPlanThreads) {
            const Segment s = clamped(segments_[i], sizes_);
            if (has_pairs(s)) atomicMax(&group_begin_[group_of(i)], tiles(i, s));
        }
        __syncthreads();
        const int64_t mine = threadIdx.x < kMostGroups ? __ldcg(&group_begin_[threadIdx.x]) : 0;
        const auto sums = scan_over_block(mine, int64_t(0), warp_sums, Sum());
        if (threadIdx.x < kMostGroups) __stcg(&group_begin_[threadIdx.x], int32_t(sums.inclusive - mine));
        __syncthreads();
        return int(min(sums.total, int64_t(num_places(sizes_.k_rows, tile_keys_))));
    }
    // Whether segment i is the first one of its range.
    __device__ bool is_first(const Segment& s, int i) const {
        return __ldcg(&from_end_[s.k_begin]) == segments_.size - i;
    }
    __device__ int num_keys(const Segment& s) const { return __ldcg(&longest_[s.k_begin]); }

    // Links segment i of each lane to the segment before it in its range. latest_ holds the last one that was visited.
    template <class SetNext>
    __device__ void link_of_warp(int i, SetNext set_next) {
        const int lane = threadIdx.x % 32, first_of_warp = i - lane;
        const Segment s = i < segments_.size ? clamped(segments_[i], sizes_) : Segment{};
        const bool linked = has_pairs(s);
        const uint32_t same = __match_any_sync(~0u, linked ? s.k_begin : -1 - lane),
                       earlier = same & ((1u << lane) - 1), linking = __ballot_sync(~0u, linked);
        if (!linked) return;
        const uint32_t later = same & ~(earlier | 1u << lane);
        if (earlier == 0 && !is_first(s, i)) set_next(__ldcg(&latest_[s.k_begin]), i);
        __syncwarp(linking);  // the first lane of a range has read the entry that its last lane replaces
        if (later == 0) __stcg(&latest_[s.k_begin], i);
        set_next(i, later == 0 ? -1 : first_of_warp + __ffs(later) - 1);
    }

    const Sizes& sizes_;
    const Segments& segments_;
    const int tile_keys_;
    int32_t* const from_end_;     // at the first key of a range: segments, minus the index of the range's first one
    int32_t* const latest_;       // at the first key of a range: the segment of the range that link() visited last
    int32_t* const longest_;      // at the first key of a range: its number of keys
    int32_t* const offsets_;      // by place: its key tiles, then where the next one is in the list
    int32_t* const group_begin_;  // by group: the tiles of its longest range, then its first place
    int32_t* const any_shared_;   // 1: some segments share a range
};

}  // namespace megatron_sb::common
