// The work of a backward, made on the device from a segment table that the host never reads: which key tiles has_row
// are, which steps each of them takes, and what goes from one key tile to the next.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"
#include "core/restart.h"
#include "core/segment.h"
#include "kernels/hopper/bwd_traits.h"

namespace megatron_sb::hopper {

// A tile of the keys of a run: of the segments that begin at the same key.
struct KeyTile {
    int32_t segment;  // the first of the run; SegmentPlan::next leads to the others
    int32_t tile;
    int32_t num_keys;  // of the run
    int32_t unused;
};

struct SegmentPlan {
    int32_t first_step;  // its steps among those of a head
    int32_t next;        // the next segment of its run, or -1
};

// Where the rows of a step start.
struct StepStarts {
    int32_t oldest_tile;  // the oldest tile, of this step and all newer ones: so the steps that need a tile are a run
    int32_t newest_half;  // of a tile
    int32_t newest_half_so_far;  // the same of this step and all older ones
};
constexpr int kNever = kNeverStarts;

// What a key tile leaves to the next one for each row, in one transaction: valid once `tile` is the next one's.
struct alignas(16) CarrySlot {
    float mass, prefix;
    int32_t tile;
    int32_t unused;
};

struct BackwardPlan {
    int32_t max_steps, max_key_tiles;
    int32_t* counters;      // tickets given out; key_tiles
    SegmentPlan* segments;  // of each segment
    KeyTile* key_tiles;     // the oldest tiles of all key_ranges first
    StepStarts* starts;     // (heads, max_steps)
    int32_t* dq_added;      // (heads, max_steps): key tiles, from the oldest, whose part of dq is in
    CarrySlot* carries;     // (heads, q_rows)
    float* dq;              // (heads, max_steps, 64 * head_dim), as the threads have it
    int32_t* key_ranges;    // (3, k_rows): for planning
    int32_t* tile_offsets;  // (k_rows / 128 + 1): for planning
};

constexpr int kTicket = 0, kNumKeyTiles = 1;

// Bytes of workspace; pointers into it.
int64_t plan_backward(const BackwardParams& params, BackwardPlan* plan);
void launch_plan(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);

// Keys of a segment that its row sees.
SB_HOST_DEVICE inline int visible_keys(const Segment& s, bool attend_current, int row) {
    return clamp_row(row + s.q_pos_minus_k_pos + (attend_current ? 1 : 0), 0, s.k_len);
}
// The half tile in which a row starts that sees `visible` keys: -1 before them all, or if has_row are none.
SB_HOST_DEVICE inline int start_of(int edge, float mass, int visible) {
    static_assert(kHalfTileKeys == kRestartTile, "a restart record names a half tile");
    return visible == 0 ? kBeforeAllKeys : restart_tile(edge, mass > 0.f, (visible - 1) / kHalfTileKeys + 1);
}
SB_HOST_DEVICE inline int num_steps(const Segment& s) {
    return s.k_len > 0 ? (s.q_len + kStepRows - 1) / kStepRows : 0;
}

}  // namespace megatron_sb::hopper
