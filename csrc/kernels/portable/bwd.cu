// block_backward for sm_80 and later: the plan of its two passes (bwd.cuh) and the launches. Kernels compute the plan,
// so the host never reads the segment table.
#include "core/limits.h"
#include "kernels/common/key_tiles.cuh"
#include "kernels/portable/bwd.cuh"
#include "kernels/portable/passes.h"
#include "kernels/portable/portable.h"

#undef NDEBUG  // the assertion below checks an argument of the user, in release builds too
#include <cassert>

namespace megatron_sb::portable {
namespace {

using Planner = KeyTilePlanner;

// Makes the plan, with one CTA: the number of the first block of each query tile, the key tiles, and the links between
// the segments that share a key range.
//
// The host sized the workspace for segments of at most segments.max_keys keys, and could not read the table. If a
// segment has more keys, the assertion ends the launch with an error.
__global__ void __launch_bounds__(kPlanThreads)
    plan_work(Sizes sizes, Segments segments, bool attend_current, int tile_rows, BackwardPlan plan) {
    __shared__ int64_t warp_sums[kMaxWarps];
    Planner planner(sizes, segments, kKeyTile, plan.key_tile_tables);
    const auto blocks_of = [&](const Segment& s) { return CarryBlocks(s, attend_current, tile_rows); };
    const int64_t blocks = number_units(
        sizes, segments, warp_sums, [&](const Segment& s) { return blocks_of(s).all(); },
        [&](int i, const Segment& s, int64_t first) {
            assert(s.k_len <= segments.max_keys && "max_seqlen_k must be at least the keys of the longest document");
            if (!has_pairs(s)) return;
            planner.add(s, i);
            plan.first_block[s.q_begin] = first;  // of the segment, until the first block of each tile is known
        });
    planner.link([&](int i, int next) { plan.next_segment[i] = next; });
    const auto write_first_block = [&](const Segment& s, int tile) {
        const CarryBlocks of = blocks_of(s);
        const int64_t first = plan.first_block[s.q_begin] + of.before(tile);
        plan.first_block[s.q_begin + tile * tile_rows] = min(first, plan.max_blocks - of.of_tile(tile));
    };
    for_each_part(
        sizes, segments, [&](int, const Segment& s) { return blocks_of(s).query_tiles() - 1; },
        [&](int, const Segment& s, int n) { write_first_block(s, n + 1); });
    __syncthreads();
    for_each_part(
        sizes, segments, [](int, const Segment&) { return 1; },
        [&](int, const Segment& s, int) { write_first_block(s, 0); });
    const int key_tiles = planner.list(
        warp_sums, [](int) { return 0; },
        [&](int at, int segment, int tile, int num_keys) {
            const int k_row = clamped(segments[segment], sizes).k_begin;
            if (at < plan.max_key_tiles) plan.key_tiles[at] = {k_row, num_keys, tile * kKeyTile, segment};
        });
    if (threadIdx.x == 0) *plan.totals = {blocks, key_tiles};
}

int64_t key_tile_bytes(const Sizes& sizes) {
    return Planner::entries(sizes.k_rows, kKeyTile) * int64_t(sizeof(int32_t));
}

// Upper bounds that the host can compute without the values of the segment table.
struct Bounds {
    int tile_rows;
    int64_t query_tiles, key_tiles;
    int64_t blocks_of_head;  // all blocks of a head
    int64_t blocks;          // of all heads
    int64_t largest_tile;    // blocks of one query tile
    int64_t block_bytes;

    explicit Bounds(const BackwardParams& p) : tile_rows(query_tile_rows(p.sizes)) {
        const Sizes& z = p.sizes;
        query_tiles = max_query_tiles(z, p.segments, tile_rows);
        key_tiles = z.k_rows / kKeyTile + std::min(p.segments.size, z.k_rows);
        block_bytes = int64_t(2 * tile_rows * sizeof(float) + sizeof(Starts));
        largest_tile = (std::min(z.k_rows, p.segments.max_keys) + kKeyTile - 1) / kKeyTile;
        blocks_of_head = query_tiles * largest_tile;
        if (p.segments.by_value())
            blocks_of_head = CarryBlocks(clamped(p.segments.whole, z), p.options.attend_current, tile_rows).all();
        blocks = blocks_of_head * z.batch * z.num_heads;
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
        plan.key_tile_tables = take<int32_t>(key_tile_bytes(p.sizes));
        plan.max_query_tiles = int32_t(bounds.query_tiles);
        plan.max_key_tiles = int32_t(bounds.key_tiles);
        plan.max_blocks = bounds.blocks_of_head;
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
          cudaMemsetAsync(plan.key_tile_tables, 0, size_t(key_tile_bytes(params.sizes)), stream));
    make_query_tiles(params.sizes, params.segments, current, bounds.tile_rows, plan.query_tiles, stream);
    plan_work<<<1, kPlanThreads, 0, stream>>>(params.sizes, params.segments, current, bounds.tile_rows, plan);
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
