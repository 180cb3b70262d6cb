#include <algorithm>

#include "kernels/hopper/bwd_plan.h"
#include "kernels/hopper/tile_copy.cuh"
#include "kernels/portable/launch.h"

namespace megatron_sb::hopper {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kStartThreads = 256;

// Inclusive, over the block. `sums` has an entry for each thread.
__device__ int scan(int value, int* sums) {
    sums[threadIdx.x] = value;
    __syncthreads();
    for (int step = 1; step < kPlanThreads; step *= 2) {
        const int below = int(threadIdx.x) >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += below;
        __syncthreads();
    }
    return sums[threadIdx.x];
}

struct Runs {
    int32_t* from_end;  // by first key: the number of segments less the first segment with it
    int32_t* size;
    int32_t* longest;

    __device__ Runs(const BackwardPlan& plan, int k_rows)
        : from_end(plan.runs), size(plan.runs + k_rows), longest(plan.runs + 2 * k_rows) {}
};

// Where the segments' steps are, and which segments share their keys.
__device__ void place_steps(const Sizes& sizes, const Segments& segments, const BackwardPlan& plan, int* sums) {
    const Runs runs(plan, sizes.k_rows);
    int before = 0;
    for (int round = 0; round < segments.size; round += kPlanThreads) {
        const int i = round + int(threadIdx.x);
        Segment s = {};
        if (i < segments.size) s = clamped(segments[i], sizes);
        const int steps = num_steps(s), end = scan(steps, sums);
        if (i < segments.size) plan.segments[i] = {before + end - steps, -1};
        if (steps > 0) {
            atomicMax(&runs.from_end[s.k_begin], segments.size - i);
            atomicAdd(&runs.size[s.k_begin], 1);
            atomicMax(&runs.longest[s.k_begin], s.k_len);
        }
        before += sums[kPlanThreads - 1];
        __syncthreads();
    }
}

__device__ bool begins_run(const Segment& s, int i, int num_segments, const Runs& runs) {
    return num_steps(s) > 0 && num_segments - i == __ldcg(&runs.from_end[s.k_begin]);
}
__device__ int tiles_of_run(const Segment& s, const Runs& runs) {
    return (__ldcg(&runs.longest[s.k_begin]) + kBackwardKeys - 1) / kBackwardKeys;
}

// How many runs have a tile 0, 1, ...; and the chains through the runs of more than one segment.
__device__ void count_tiles(const Sizes& sizes, const Segments& segments, const BackwardPlan& plan) {
    const Runs runs(plan, sizes.k_rows);
    for (int i = threadIdx.x; i < segments.size; i += kPlanThreads) {
        const Segment s = clamped(segments[i], sizes);
        if (num_steps(s) == 0) continue;
        if (__ldcg(&runs.size[s.k_begin]) > 1)
            for (int j = i + 1; j < segments.size; ++j) {
                const Segment other = clamped(segments[j], sizes);
                if (other.k_begin != s.k_begin || num_steps(other) == 0) continue;
                plan.segments[i].next = j;
                break;
            }
        if (!begins_run(s, i, segments.size, runs)) continue;
        for (int tile = 0; tile < tiles_of_run(s, runs); ++tile) atomicAdd(&plan.places[tile], 1);
    }
}

__device__ void place_items(const Sizes& sizes, const Segments& segments, const BackwardPlan& plan, int* sums) {
    const Runs runs(plan, sizes.k_rows);
    const int most_tiles = (sizes.k_rows + kBackwardKeys - 1) / kBackwardKeys;
    int before = 0;
    for (int round = 0; round < most_tiles; round += kPlanThreads) {
        const int tile = round + int(threadIdx.x);
        const int count = tile < most_tiles ? __ldcg(&plan.places[tile]) : 0, end = scan(count, sums);
        if (tile < most_tiles) __stcg(&plan.places[tile], before + end - count);
        before += sums[kPlanThreads - 1];
        __syncthreads();
    }
    if (threadIdx.x == 0) plan.counters[kNumItems] = min(before, plan.max_items);
    __syncthreads();
    for (int i = threadIdx.x; i < segments.size; i += kPlanThreads) {
        const Segment s = clamped(segments[i], sizes);
        if (!begins_run(s, i, segments.size, runs)) continue;
        const int num_keys = __ldcg(&runs.longest[s.k_begin]);
        for (int tile = 0; tile < tiles_of_run(s, runs); ++tile) {
            const int at = atomicAdd(&plan.places[tile], 1);
            if (at < plan.max_items) plan.items[at] = {i, tile, num_keys, 0};
        }
    }
}

__global__ void __launch_bounds__(kPlanThreads) plan_work(Sizes sizes, Segments segments, BackwardPlan plan) {
    __shared__ int sums[kPlanThreads];
    place_steps(sizes, segments, plan, sums);
    __syncthreads();
    count_tiles(sizes, segments, plan);
    __syncthreads();
    place_items(sizes, segments, plan, sums);
}

// Joins to each step those before it, from `first` on by `direction`. One warp.
template <class Join>
__device__ void spread(Starts* starts, int steps, int lane, int first, int direction, Join join) {
    constexpr Starts kNone = {kNever, -1, -1};
    Starts before = kNone;
    for (int done = 0; done < steps; done += 32) {
        const bool there = done + lane < steps;
        Starts* const at = starts + first + direction * (done + lane);
        Starts own = there ? *at : kNone;
        for (int n = 1; n < 32; n *= 2) {
            const Starts other = {__shfl_up_sync(~0u, own.first_tile, n), 0, __shfl_up_sync(~0u, own.newest_older, n)};
            if (lane >= n) join(own, other);
        }
        join(own, before);
        before = {__shfl_sync(~0u, own.first_tile, 31), 0, __shfl_sync(~0u, own.newest_older, 31)};
        if (there) *at = own;
    }
}

// A block has a segment of one head. Rows of dq that no key tile will write are zeros, where the others are not added
// to.
__global__ void __launch_bounds__(kStartThreads)
    plan_starts(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardPlan plan) {
    const int head = blockIdx.x / p.segments.size, i = blockIdx.x % p.segments.size;
    const Segment s = clamped(p.segments[i], p.sizes);
    const int steps = num_steps(s), lane = threadIdx.x % 32;
    const int64_t index = int64_t(head) * p.sizes.q_rows + s.q_begin;
    const int32_t* const edges = p.restart.edge + index;
    const float* const masses = static_cast<const float*>(p.restart.mass) + index;
    Starts* const starts = plan.starts + int64_t(head) * plan.max_steps + plan.segments[i].first_step;
    for (int step = threadIdx.x / 32; step < steps; step += kStartThreads / 32) {
        int first = kNever, newest = -1;
        for (int r = lane; r < kStepRows; r += 32) {
            const int row = step * kStepRows + r;
            if (row >= s.q_len) continue;
            const int visible = visible_keys(s, p.options.attend_current, row);
            const int start = start_of(edges[row], masses[row], visible);
            newest = max(newest, start);
            if (visible > 0) first = min(first, start == kNever ? kNever : max(start, 0) / 2);
        }
        first = __reduce_min_sync(~0u, first);
        newest = __reduce_max_sync(~0u, newest);
        if (lane == 0) starts[step] = {first, newest, newest};
    }
    __syncthreads();
    if (threadIdx.x < 32)
        spread(starts, steps, lane, steps - 1, -1,
               [](Starts& own, const Starts& newer) { own.first_tile = min(own.first_tile, newer.first_tile); });
    __syncthreads();
    if (threadIdx.x < 32)
        spread(starts, steps, lane, 0, 1,
               [](Starts& own, const Starts& older) { own.newest_older = max(own.newest_older, older.newest_older); });
    if (p.grad_dtype == Dtype::kFloat32) return;
    __syncthreads();
    for (int step = threadIdx.x / 32; step < steps; step += kStartThreads / 32) {
        const int row = step * kStepRows, rows = min(kStepRows, s.q_len - row);
        const int visible = visible_keys(s, p.options.attend_current, row + rows - 1);
        if (visible > 0 && starts[step].first_tile <= (visible - 1) / kBackwardKeys) continue;
        write_zeros(p.dq, head / p.sizes.num_heads, head % p.sizes.num_heads, s.q_begin + row, rows, p.sizes.head_dim);
    }
}

// The parts of the workspace, one after the other.
struct Workspace {
    char* base;
    int64_t bytes = 0;

    template <class Item>
    Item* take(int64_t count) {
        constexpr int64_t kAlignment = 256;
        Item* const at = reinterpret_cast<Item*>(base == nullptr ? nullptr : base + bytes);
        bytes += (count * int64_t(sizeof(Item)) + kAlignment - 1) / kAlignment * kAlignment;
        return at;
    }
};

struct Layout {
    int64_t zeroed;  // bytes at the front that begin as zeros
    int64_t bytes;
};

Layout lay_out(const BackwardParams& p, BackwardPlan* plan) {
    const Sizes& z = p.sizes;
    const int64_t heads = int64_t(z.batch) * z.num_heads;
    plan->max_steps = z.q_rows / kStepRows + std::min(p.segments.size, z.q_rows);
    plan->max_items = z.k_rows / kBackwardKeys + std::min(p.segments.size, z.k_rows);
    Workspace w{static_cast<char*>(p.workspace)};
    plan->counters = w.take<int32_t>(2);
    plan->added = w.take<int32_t>(heads * plan->max_steps);
    plan->carries = w.take<CarrySlot>(heads * z.q_rows);
    plan->runs = w.take<int32_t>(3 * int64_t(z.k_rows));
    plan->places = w.take<int32_t>(z.k_rows / kBackwardKeys + 1);
    Layout layout{w.bytes, 0};
    plan->segments = w.take<SegmentPlan>(p.segments.size);
    plan->items = w.take<KeyItem>(plan->max_items);
    plan->starts = w.take<Starts>(heads * plan->max_steps);
    plan->dq = w.take<float>(heads * plan->max_steps * kStepRows * z.head_dim);
    layout.bytes = w.bytes;
    return layout;
}

}  // namespace

int64_t plan_backward(const BackwardParams& params, BackwardPlan* plan) {
    return lay_out(params, plan).bytes;
}

void launch_plan(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream) {
    BackwardPlan same;
    const Layout layout = lay_out(params, &same);
    cudaMemsetAsync(params.workspace, 0, size_t(layout.zeroed), stream);
    plan_work<<<1, kPlanThreads, 0, stream>>>(params.sizes, params.segments, plan);
    portable::check_launch("hopper backward");
    const int64_t heads = int64_t(params.sizes.batch) * params.sizes.num_heads;
    plan_starts<<<unsigned(heads * params.segments.size), kStartThreads, 0, stream>>>(params, plan);
    portable::check_launch("hopper backward");
}

}  // namespace megatron_sb::hopper
