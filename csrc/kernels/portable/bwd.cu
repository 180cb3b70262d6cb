// block_backward for sm_80 and later: the plan of its two passes (bwd.cuh) and the launches. Kernels compute the plan,
// so the host never reads the segment table.
#include "core/limits.h"
#include "kernels/common/key_ranges.cuh"
#include "kernels/portable/bwd.cuh"
#include "kernels/portable/passes.h"
#include "kernels/portable/portable.h"

#undef NDEBUG  // the assertion below checks an argument of the user, in release builds too
#include <cassert>

namespace megatron_sb::portable {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kSegmentThreads = 128;

// Returns the number of key tiles that the query tile at `row` of a segment sees.
SB_HOST_DEVICE int key_tiles_at(const Segment& s, bool attend_current, int tile_rows, int row) {
    const int rows = s.q_len - row < tile_rows ? s.q_len - row : tile_rows;
    return key_tiles_of(row + s.q_pos_minus_k_pos + (attend_current ? 1 : 0), rows, s.k_len);
}

SB_HOST_DEVICE int64_t carry_blocks(const Segment& s, bool attend_current, int tile_rows) {
    int64_t blocks = 0;
    for (int row = 0; row < s.q_len; row += tile_rows) blocks += key_tiles_at(s, attend_current, tile_rows, row);
    return blocks;
}

// Writes plan.first_block, and collects the key ranges. In each round, every thread has one segment. It computes the
// number of blocks of all earlier segments, then visits the query tiles of its segment.
//
// The host sized the workspace for segments of at most segments.max_keys keys, and could not read the table. If a
// segment has more keys, the assertion ends the launch with an error.
__global__ void __launch_bounds__(kPlanThreads)
    plan_carries(Sizes sizes, Segments segments, bool attend_current, int tile_rows, BackwardPlan plan) {
    const KeyRanges key_ranges(plan.key_ranges, sizes.k_rows, segments.size);
    __shared__ int64_t ends[kPlanThreads];
    int64_t before = 0;
    for (int round = 0; round < segments.size; round += kPlanThreads) {
        const int i = round + int(threadIdx.x);
        Segment mine = {};
        if (i < segments.size) mine = clamped(segments[i], sizes);
        assert(mine.k_len <= segments.max_keys && "max_seqlen_k must be at least the keys of the longest document");
        if (mine.q_len > 0 && mine.k_len > 0) key_ranges.add(mine, i);
        const int64_t blocks = carry_blocks(mine, attend_current, tile_rows);
        ends[threadIdx.x] = blocks;
        __syncthreads();
        for (int step = 1; step < kPlanThreads; step *= 2) {
            const int64_t below = int(threadIdx.x) >= step ? ends[threadIdx.x - step] : 0;
            __syncthreads();
            ends[threadIdx.x] += below;
            __syncthreads();
        }
        int64_t block = before + ends[threadIdx.x] - blocks;
        for (int row = 0; row < mine.q_len; row += tile_rows) {
            plan.first_block[mine.q_begin + row] = block;
            block += key_tiles_at(mine, attend_current, tile_rows, row);
        }
        before += ends[kPlanThreads - 1];
        __syncthreads();
    }
    if (threadIdx.x == 0) *plan.totals = {before, 0};
}

// Lists the key tiles, and links the segments that share a key range. The thread of the first segment of a key range
// writes the key tiles of the range.
__global__ void __launch_bounds__(kSegmentThreads) plan_keys(Sizes sizes, Segments segments, BackwardPlan plan) {
    const int i = blockIdx.x * kSegmentThreads + threadIdx.x;
    if (i >= segments.size) return;
    const Segment mine = clamped(segments[i], sizes);
    if (mine.q_len == 0 || mine.k_len == 0) return;
    const KeyRanges key_ranges(plan.key_ranges, sizes.k_rows, segments.size);
    plan.next_segment[i] = next_in_range(key_ranges, segments, sizes, i);
    if (!key_ranges.is_first(mine, i)) return;
    const int longest = key_ranges.num_keys(mine);
    const int tiles = (longest + kKeyTile - 1) / kKeyTile;
    const int at = atomicAdd(&plan.totals->num_key_tiles, tiles);
    for (int tile = 0; tile < tiles && at + tile < plan.max_key_tiles; ++tile)
        plan.key_tiles[at + tile] = {mine.k_begin, longest, tile * kKeyTile, i};
}

int64_t key_ranges_bytes(const Sizes& sizes) {
    return KeyRanges::entries(sizes.k_rows) * int64_t(sizeof(int32_t));
}

// Upper bounds that the host can compute without the values of the segment table.
struct Bounds {
    int tile_rows;
    int64_t query_tiles, key_tiles;
    int64_t blocks;        // of all query tiles and heads
    int64_t largest_tile;  // blocks of one query tile
    int64_t block_bytes;

    explicit Bounds(const BackwardParams& p) : tile_rows(query_tile_rows(p.sizes)) {
        const Sizes& z = p.sizes;
        query_tiles = max_query_tiles(z, p.segments, tile_rows);
        key_tiles = z.k_rows / kKeyTile + std::min(p.segments.size, z.k_rows);
        block_bytes = int64_t(2 * tile_rows * sizeof(float) + sizeof(Starts));
        largest_tile = (std::min(z.k_rows, p.segments.max_keys) + kKeyTile - 1) / kKeyTile;
        int64_t of_a_head = query_tiles * largest_tile;
        if (p.segments.by_value())
            of_a_head = carry_blocks(clamped(p.segments.whole, z), p.options.attend_current, tile_rows);
        blocks = of_a_head * z.batch * z.num_heads;
    }
};

// The arrays in the workspace, one after the other. Only the carries depend on the limit of the workspace.
struct Workspace {
    BackwardPlan plan = {};
    int64_t used_bytes = 0;  // by the arrays that have been placed

    Workspace(const BackwardParams& p, const Bounds& bounds) : next_(static_cast<char*>(p.workspace)) {
        plan.query_tiles = take<QueryTiles>(query_tiles_bytes(p.sizes, p.segments, bounds.tile_rows));
        plan.totals = take<PlanTotals>(sizeof(PlanTotals));
        plan.first_block = take<int64_t>(int64_t(p.sizes.q_rows) * 8);
        plan.next_segment = take<int32_t>(int64_t(p.segments.size) * 4);
        plan.key_tiles = take<KeyTile>(bounds.key_tiles * int64_t(sizeof(KeyTile)));
        plan.key_ranges = take<int32_t>(key_ranges_bytes(p.sizes));
        plan.max_query_tiles = int32_t(bounds.query_tiles);
        plan.max_key_tiles = int32_t(bounds.key_tiles);
    }

    // Returns the number of blocks in a workspace of `bytes` bytes: as many as fit, but at most all blocks. It is at
    // least the blocks of two query tiles, so that each chunk has a query tile.
    int64_t room(const Bounds& bounds, int64_t bytes) const {
        const int64_t whole = (bytes - used_bytes) / kWorkspaceAlignment * kWorkspaceAlignment;
        return std::min(std::max(whole / bounds.block_bytes, 2 * bounds.largest_tile), bounds.blocks);
    }

    void take_carries(const Bounds& bounds, int64_t room) {
        plan.carries = take<float>(room * bounds.block_bytes);
        plan.starts = reinterpret_cast<Starts*>(plan.carries + room * 2 * bounds.tile_rows);
    }

  private:
    template <class Item>
    Item* take(int64_t bytes) {
        const int64_t aligned = align_workspace(bytes);
        used_bytes += aligned;
        char* const at = next_;
        if (next_ != nullptr) next_ += aligned;
        return reinterpret_cast<Item*>(at);
    }

    char* next_;
};

bool has_work(const BackwardParams& p) {
    return p.segments.size > 0 && p.sizes.q_rows > 0 && p.sizes.k_rows > 0;
}

}  // namespace

int64_t backward_workspace(const BackwardParams& params, int64_t limit) {
    if (!has_work(params)) return 0;
    BackwardParams nowhere = params;
    nowhere.workspace = nullptr;
    const Bounds bounds(nowhere);
    Workspace workspace(nowhere, bounds);
    workspace.take_carries(bounds, workspace.room(bounds, limit));
    return workspace.used_bytes;
}

void block_backward(const BackwardParams& params, void* stream_handle) {
    if (!has_work(params)) return;
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    const Bounds bounds(params);
    if (bounds.blocks == 0) return;
    Workspace workspace(params, bounds);
    const int64_t room = workspace.room(bounds, params.workspace_bytes);
    workspace.take_carries(bounds, room);

    BackwardPlan& plan = workspace.plan;
    const bool current = params.options.attend_current;
    check("block_backward", "cudaMemsetAsync",
          cudaMemsetAsync(plan.key_ranges, 0, size_t(key_ranges_bytes(params.sizes)), stream));
    make_query_tiles(params.sizes, params.segments, current, bounds.tile_rows, plan.query_tiles, stream);
    plan_carries<<<1, kPlanThreads, 0, stream>>>(params.sizes, params.segments, current, bounds.tile_rows, plan);
    check_launch("block_backward");
    const int blocks = (params.segments.size + kSegmentThreads - 1) / kSegmentThreads;
    plan_keys<<<blocks, kSegmentThreads, 0, stream>>>(params.sizes, params.segments, plan);
    check_launch("block_backward");

    // A query tile can begin in one window and end beyond it, so a window leaves room for the largest tile.
    const int64_t largest_window = room == bounds.blocks ? room : room - bounds.largest_tile;
    const int64_t chunks = (bounds.blocks + largest_window - 1) / largest_window;
    plan.window = (bounds.blocks + chunks - 1) / chunks;
    for (plan.chunk = 0; plan.chunk < chunks; ++plan.chunk) {
        with_element(params.sizes.dtype, [&](auto element) {
            launch_query_pass<decltype(element)>(params, plan, stream);
            launch_key_pass<decltype(element)>(params, plan, stream);
        });
    }
}

}  // namespace megatron_sb::portable
