// Plans a backward call on the device. With a segment table, plan_work numbers the steps, sorts the key tiles, and
// zeroes the gradients of rows in no segment. plan_starts finds where the rows of each step start. After plan_work, it
// starts before the kernel before it has ended (programmatic dependent launch), as the main kernel does, and both wait
// for that end before they read what it writes.
#include <algorithm>
#include <type_traits>

#include "core/limits.h"
#include "kernels/common/block_scan.cuh"
#include "kernels/common/key_tiles.cuh"
#include "kernels/common/launch.h"
#include "kernels/hopper/bwd_plan.h"
#include "kernels/hopper/hopper.h"
#include "kernels/hopper/ptx.cuh"

namespace megatron_sb::hopper {
namespace {

constexpr int kStepsAtOnce = 4;  // steps that a warp handles at once in find_starts

using Planner = common::KeyTilePlanner;
static_assert(Planner::kMostGroups == kMostDocumentGroups);
using common::kMaxWarps, common::kPlanThreads, common::RowRange, common::scan_over_block;

// Whether part 0 of a key tile has all its steps. `segment` is the first segment of its key range.
__device__ bool is_whole(const BackwardParams& p, const BackwardPlan& plan, int segment, int tile) {
    if (plan.parts.count() == 1) return true;
    const int first_key = tile * backward_key_tile(p.sizes);
    for (int i = segment; i >= 0; i = plan.segments[i].next) {
        const Segment s = clamped(p.segments[i], p.sizes);
        if (!plan.parts.is_whole(num_steps(s), oldest_step(s, p.options.attend_current, first_key))) return false;
    }
    return true;
}

// Number of thread blocks that zero rows of dq.
SB_HOST_DEVICE int blocks_that_clear_dq(const BackwardParams& p) {
    return p.add_dq ? 0 : common::blocks_to_examine(p.sizes.q_rows);
}

__device__ void clear_uncovered(const BackwardParams& p, int block, int* changes, int* warp_sums) {
    const Sizes& z = p.sizes;
    const int q_blocks = blocks_that_clear_dq(p);
    const auto clear = [&](const Rows<void*>& to, int heads, int columns, int row) {
        common::clear_row(to, z.batch, heads, columns, p.grad_dtype == Dtype::kFloat32 ? 4 : 2, row);
    };
    const bool of_queries = block < q_blocks;
    const auto covered = [&](const Segment& s) {
        if (num_steps(s) == 0) return RowRange{0, 0};
        return of_queries ? RowRange{s.q_begin, s.q_len} : RowRange{s.k_begin, s.k_len};
    };
    const auto clear_row = [&](int row) {
        if (of_queries) return clear(p.dq, z.num_heads, z.head_dim, row);
        clear(p.dk, z.num_kv_heads, z.head_dim + (p.options.forget_gate ? kGateColumns : 0), row);
        clear(p.dv, z.num_kv_heads, z.head_dim_v, row);
    };
    common::for_uncovered_row(z, p.segments, of_queries ? block : block - q_blocks, of_queries ? z.q_rows : z.k_rows,
                              changes, warp_sums, covered, clear_row);
}

// Does what plan_work does for a dense call, whose key tiles are in order.
__device__ void plan_segment(const BackwardParams& p, const BackwardPlan& plan) {
    const Segment s = clamped(p.segments[0], p.sizes);
    const int tile_keys = backward_key_tile(p.sizes);
    const int key_tiles = common::has_pairs(s) ? (s.k_len + tile_keys - 1) / tile_keys : 0;
    if (threadIdx.x == 0) {
        plan.segments[0] = {0, -1};
        plan.counters[kNumKeyTiles] = key_tiles;
        plan.counters[kNumSteps] = key_tiles > 0 ? num_steps(s) : 0;
    }
    __syncthreads();  // is_whole() reads plan.segments
    for (int tile = threadIdx.x; tile < key_tiles; tile += blockDim.x)
        plan.key_tiles[tile] = {0, tile, s.k_len, is_whole(p, plan, 0, tile)};
}

// Thread block 0 plans. The other thread blocks zero the gradients of query rows and keys that belong to no segment.
__global__ void __launch_bounds__(kPlanThreads)
    plan_work(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardPlan plan) {
    __shared__ int warp_values[kMaxWarps], changes[kPlanThreads];
    __shared__ int64_t warp_sums[kMaxWarps];
    allow_next_kernel();
    if (blockIdx.x > 0) return clear_uncovered(p, blockIdx.x - 1, changes, warp_values);
    Planner planner(p.sizes, p.segments, backward_key_tile(p.sizes), plan.key_tile_tables);
    const int64_t steps = common::number_units(
        p.sizes, p.segments, warp_sums, [](const Segment& s) { return num_steps(s); },
        [&](int i, const Segment& s, int64_t first) {
            const int64_t last_place = plan.max_steps - num_steps(s);
            plan.segments[i] = {int32_t(min(first, last_place)), -1};
            if (common::has_pairs(s)) planner.add(s, i);
        });
    planner.link([&](int i, int next) { plan.segments[i].next = next; });
    const auto group_of = [&](int segment) {
        return min(plan.segments[segment].first_step / plan.head_order.steps_together, Planner::kMostGroups - 1);
    };
    const int key_tiles = planner.list(warp_sums, group_of, [&](int at, int segment, int tile, int num_keys) {
        if (at < plan.max_key_tiles) plan.key_tiles[at] = {segment, tile, num_keys, is_whole(p, plan, segment, tile)};
    });
    if (threadIdx.x > 0) return;
    plan.counters[kNumKeyTiles] = min(key_tiles, plan.max_key_tiles);
    plan.counters[kNumSteps] = int(min(steps, int64_t(plan.max_steps)));
}

// Writes the starts of each step of segment i, over the rows of this step alone. `first_row` is the index of the first
// query row of the segment in a tensor (batch, head, row).
__device__ void find_starts(const BackwardParams& p, int i, const Segment& s, int64_t first_row, StepStarts* starts) {
    constexpr int kRows = kStepsAtOnce * kStepRows / 32;  // rows per lane
    const int steps = num_steps(s), lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const bool two_halves = halves_of_tile(p.sizes) == 2;
    for (int begin = threadIdx.x / 32 * kStepsAtOnce; begin < steps; begin += warps * kStepsAtOnce) {
        int edge[kRows];
        float mass[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = begin * kStepRows + 32 * r + lane;
            edge[r] = row < s.q_len ? restart_edge<float>(p, first_row + row) : 0;
            mass[r] = row < s.q_len ? restart_mass<float>(p, first_row + row) : 0.f;
        }
#pragma unroll
        for (int n = 0; n < kStepsAtOnce; ++n) {
            int oldest = kNeverStarts, newest = -1;
#pragma unroll
            for (int r = 2 * n; r < 2 * n + 2; ++r) {
                const int row = begin * kStepRows + 32 * r + lane;
                if (row >= s.q_len) continue;
                const int visible = visible_keys(s, p.options.attend_current, row);
                const int start = start_half(edge[r], mass[r], visible);
                newest = max(newest, start);
                const int tile = start == kNeverStarts ? kNeverStarts : max(start, 0) >> two_halves;
                if (visible > 0) oldest = min(oldest, tile);
            }
            oldest = __reduce_min_sync(~0u, oldest);
            newest = __reduce_max_sync(~0u, newest);
            if (lane == 0 && begin + n < steps) starts[begin + n] = {oldest, oldest, newest, i};
        }
    }
}

// Replaces a field of each step by `join` over this step and all steps before it. The first step is `*first`;
// `direction` (1 or -1) leads to the next one.
template <class Join>
__device__ void scan_starts(StepStarts* first, int steps, int direction, int32_t StepStarts::*field, int none,
                            int* warp_values, Join join) {
    int before = none;
    for (int done = 0; done < steps; done += blockDim.x) {
        const int step = done + int(threadIdx.x);
        int32_t* const at = &(first[direction * step].*field);
        const auto scan = scan_over_block(step < steps ? *at : none, none, warp_values, join);
        if (step < steps) *at = join(before, scan.inclusive);
        before = join(before, scan.total);
    }
}

// Finds where the rows of each step start. A thread block handles one segment of one head. In a dense call one more
// block does what plan_work does in others, which then does not run.
__global__ void __launch_bounds__(kMaxWarps * 32)
    plan_starts(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardPlan plan) {
    __shared__ int warp_values[kMaxWarps];
    const int head = blockIdx.x / p.segments.size, i = blockIdx.x % p.segments.size;
    const Segment s = clamped(p.segments[i], p.sizes);
    const int steps = num_steps(s);
    allow_next_kernel();
    if (p.segments.by_value() && blockIdx.x == gridDim.x - 1) return plan_segment(p, plan);
    if (!p.segments.by_value()) wait_for_previous_kernel();
    const int first_step = p.segments.by_value() ? 0 : plan.segments[i].first_step;
    StepStarts* const starts = plan.starts + int64_t(head) * plan.max_steps + first_step;
    find_starts(p, i, s, int64_t(head) * p.sizes.q_rows + s.q_begin, starts);
    __syncthreads();
    scan_starts(starts + steps - 1, steps, -1, &StepStarts::oldest_from_here, kNeverStarts, warp_values,
                [](int a, int b) { return min(a, b); });
    scan_starts(starts, steps, 1, &StepStarts::newest_half_so_far, -1, warp_values,
                [](int a, int b) { return max(a, b); });
}

}  // namespace

int64_t plan_backward(const BackwardParams& p, BackwardPlan* plan) {
    const Sizes& z = p.sizes;
    const int64_t heads = int64_t(z.batch) * z.num_heads;
    plan->max_steps = z.q_rows / kStepRows + std::min(p.segments.size, z.q_rows);
    plan->max_key_tiles = z.k_rows / backward_key_tile(z) + std::min(p.segments.size, z.k_rows);
    plan->num_kv_heads = z.batch * z.num_kv_heads;
    plan->parts = choose_tile_parts(z, p.segments.size);
    plan->head_order = choose_head_order(z, p.segments, p.options.attend_current);
    const int64_t parts = plan->parts.count() > 1 ? int64_t(plan->parts.count()) * plan->num_kv_heads : 0;
    // The arrays lie one after another. Without a workspace, their bytes are only counted.
    char* const base = static_cast<char*>(p.workspace);
    int64_t bytes = 0;
    const auto place = [&](auto*& array, int64_t count) {
        array = reinterpret_cast<std::decay_t<decltype(array)>>(base == nullptr ? nullptr : base + bytes);
        bytes += align_workspace(count * int64_t(sizeof(*array)));
    };
    place(plan->counters, 3);
    place(plan->dq_next_tile, heads * plan->max_steps + 1);
    place(plan->carries, heads * z.q_rows);
    place(plan->key_tile_tables, Planner::entries(z.k_rows, backward_key_tile(z)));
    place(plan->has_sums, parts * z.k_rows);
    // launch_plan() sets the arrays before this one to zero.
    place(plan->segments, p.segments.size);
    place(plan->key_tiles, plan->max_key_tiles);
    place(plan->starts, heads * plan->max_steps);
    place(plan->dq, (heads * plan->max_steps + 1) * dq_floats_of_step(z));
    place(plan->partial_dk, parts * z.k_rows * stored_columns(z));
    place(plan->partial_dv, parts * z.k_rows * stored_columns(z));
    place(plan->partial_gates, p.options.forget_gate ? parts * z.k_rows : 0);
    return bytes;
}

void launch_plan(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream) {
    const size_t zeroed = reinterpret_cast<char*>(plan.segments) - static_cast<char*>(params.workspace);
    common::check("hopper backward", "cudaMemsetAsync", cudaMemsetAsync(params.workspace, 0, zeroed, stream));
    const int64_t starts = int64_t(params.sizes.batch) * params.sizes.num_heads * params.segments.size;
    const int steps = plan.max_steps / params.segments.size;  // of an average segment
    const int threads = 32 * std::clamp(steps / kStepsAtOnce, 4, kMaxWarps);
    if (params.segments.by_value())
        return common::launch("hopper backward: plan_starts", plan_starts, starts + 1, threads, 0, stream, params,
                              plan);
    const int64_t blocks = 1 + int64_t(blocks_that_clear_dq(params)) + common::blocks_to_examine(params.sizes.k_rows);
    common::launch("hopper backward: plan_work", plan_work, blocks, kPlanThreads, 0, stream, params, plan);
    common::launch<common::Start::kBeforeEnd>("hopper backward: plan_starts", plan_starts, starts, threads, 0, stream,
                                              params, plan);
}

}  // namespace megatron_sb::hopper
