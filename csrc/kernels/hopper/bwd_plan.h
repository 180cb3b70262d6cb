// The plan of a backward call: the key tiles, the steps of each key tile, and the buffers that pass data from one key
// tile to the next. A kernel makes it on the device, because the host never reads the segment table.
//
// Terms. A key range is what segments share that begin at the same key (kernels/common/key_tiles.cuh). A key tile is
// 128 keys of a key range, or 64 in the wide kernels. A step is 64 query rows of one head. A half is 64 keys, the grid
// of restart records.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"
#include "core/restart.h"
#include "core/segment.h"
#include "kernels/hopper/bwd_order.h"
#include "kernels/hopper/bwd_parts.h"
#include "kernels/hopper/bwd_traits.h"

namespace megatron_sb::hopper {

// One tile of a key range.
struct KeyTile {
    int32_t segment;  // first segment of the key range; SegmentPlan::next links the others
    int32_t tile;
    int32_t num_keys;  // of the key range
    int32_t is_whole;  // 1: part 0 has all its steps and writes dk and dv; 0: each part writes a partial sum
};

struct SegmentPlan {
    int32_t first_step;  // number of its first step, counted over all segments of a head
    int32_t next;        // next segment with the same key range, or -1
};

// Where the rows of a step start. From a step to the next newer one, oldest_from_here and newest_half_so_far never
// decrease. So the step loader finds the newest step that needs a key tile by binary search, and the slow steps of a
// tile are newer than its fast ones.
struct StepStarts {
    int32_t oldest_tile;         // oldest key tile that a row of this step needs
    int32_t oldest_from_here;    // minimum of oldest_tile over this step and all newer ones
    int32_t newest_half_so_far;  // newest half in which a row of this step, or of an older one, starts
    int32_t segment;
};

// The carry of a row at the newer edge of a key tile, on its way to the next newer one. The publisher writes it, and
// the carry reader of the other CTA reads it, in one 16-byte transaction. `tile` is the key tile that must read it.
struct alignas(16) CarrySlot {
    float mass, prefix;
    int32_t tile;
    int32_t unused;
};

struct BackwardPlan {
    int32_t max_steps, max_key_tiles;
    int32_t num_kv_heads;  // of all batch elements
    TileParts parts;       // into which the work of a key tile is divided
    HeadOrder head_order;
    int32_t* counters;         // number of tickets taken, number of key tiles, number of steps of a head
    SegmentPlan* segments;     // one per segment
    KeyTile* key_tiles;        // ordered by tile number, the oldest first
    StepStarts* starts;        // (heads, max_steps)
    int32_t* dq_next_tile;     // (heads, max_steps), then one for steps without rows: number of the key tile that adds
                               // to dq next; 0 before the first
    CarrySlot* carries;        // (heads, q_rows)
    float* dq;                 // (heads, max_steps, dq_floats_of_step()), in the order of the accumulator registers;
                               // then a place for steps without rows
    int32_t* key_tile_tables;  // of KeyTilePlanner, used while planning
    // The next four have elements only if a key tile can have several parts.
    int32_t* has_sums;               // (parts, kv_heads, k_rows): 1 at the first key of a tile if the part has steps
    float *partial_dk, *partial_dv;  // (parts, kv_heads, k_rows, stored_columns()), undefined without has_sums
    float* partial_gates;            // (parts, kv_heads, k_rows): of the gradients of forget gates

    // Index of a key in has_sums, and of its row in partial_dk and partial_dv. KV heads are counted over the batch.
    SB_HOST_DEVICE int64_t partial_row(const Sizes& sizes, int part, int kv_head, int key) const {
        return (int64_t(part) * num_kv_heads + kv_head) * sizes.k_rows + key;
    }
};

// Of 64 columns of BackwardPlan::dq: the threads that add a step, and the vectors of four floats of each.
constexpr int kDqThreads = 128, kDqVectors = kStepRows * 64 / kDqThreads / 4;
constexpr int kTicket = 0, kNumKeyTiles = 1, kNumSteps = 2;

// Sets the pointers of `plan` into params.workspace and returns the number of bytes that the workspace needs.
int64_t plan_backward(const BackwardParams& params, BackwardPlan* plan);
// Launches the kernels that fill the plan. Throws RuntimeFailure if a launch fails.
void launch_plan(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);
// Launches what follows the main kernel: it writes dq or adds to it, and adds the partial sums of dk and dv if key
// tiles have several parts. Throws RuntimeFailure if a launch fails.
void finish_gradients(const BackwardParams& params, const BackwardPlan& plan, float scale, cudaStream_t stream);

// Number of keys of a segment that are visible to its row `row`.
SB_HOST_DEVICE inline int visible_keys(const Segment& s, bool attend_current, int row) {
    return clamp_row(row + s.q_pos_minus_k_pos + (attend_current ? 1 : 0), 0, s.k_len);
}
// The half in which a row starts, if it sees `visible` keys. kBeforeAllKeys (-1): it starts before all keys, or sees
// none. kNeverStarts: no key contributes to it.
SB_HOST_DEVICE inline int start_half(int edge, float mass, int visible) {
    static_assert(kHalfTileKeys == kRestartTile, "half a key tile must be one tile of the restart grid");
    return visible == 0 ? kBeforeAllKeys : restart_tile(edge, mass > 0.f, (visible - 1) / kHalfTileKeys + 1);
}

}  // namespace megatron_sb::hopper
