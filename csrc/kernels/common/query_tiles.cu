#include <algorithm>

#include "core/segment.h"
#include "kernels/common/block_scan.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/launch.h"
#include "kernels/common/query_tiles.h"

namespace megatron_sb::common {
namespace {

constexpr int kThreads = 1024;  // one CTA writes the list
constexpr int kBuckets = 1024;  // tiles by their number of keys

struct Shared {
    Segment segments[kThreads];
    int ends[kThreads];  // number of tiles in the segments of this round, up to and including this one
    int buckets[kBuckets];
    int warp_sums[kMaxWarps];
};

__device__ int num_tiles(const Segment& s, int tile_rows) {
    return (s.q_len + tile_rows - 1) / tile_rows;
}
__device__ QueryTile tile_of(const Segment& s, bool attend_current, int tile_rows, int tile) {
    const int first = tile * tile_rows;
    return {s.q_begin + first, min(tile_rows, s.q_len - first), s.k_begin, s.k_len,
            first + s.q_pos_minus_k_pos + (attend_current ? 1 : 0)};
}

// Calls f(tile, bucket) for every tile of the call, in rounds of kThreads segments. Bucket 0 has the tiles with the
// most keys. All threads of the CTA must call this.
template <class F>
__device__ void for_each_tile(const Sizes& sizes, const Segments& segments, bool attend_current, int tile_rows,
                              Shared& shared, F f) {
    for (int round = 0; round < segments.size; round += kThreads) {
        const int i = round + threadIdx.x;
        Segment mine = {};
        if (i < segments.size) mine = clamped(segments[i], sizes);
        shared.segments[threadIdx.x] = mine;
        shared.ends[threadIdx.x] = scan_over_block(num_tiles(mine, tile_rows), 0, shared.warp_sums, Sum()).inclusive;
        __syncthreads();
        for (int i = threadIdx.x; i < shared.ends[kThreads - 1]; i += kThreads) {
            int at = 0;  // the first segment that ends after tile i
            for (int step = kThreads / 2; step > 0; step /= 2)
                if (shared.ends[at + step - 1] <= i) at += step;
            const int first = at > 0 ? shared.ends[at - 1] : 0;
            const QueryTile tile = tile_of(shared.segments[at], attend_current, tile_rows, i - first);
            const int keys = clamp_row(tile.visible + tile.num_rows - 1, 0, tile.k_len);
            f(tile, kBuckets - 1 - int(int64_t(keys) * (kBuckets - 1) / max(sizes.k_rows, 1)));
        }
        __syncthreads();
    }
}

// The tiles of one segment are sorted if they are written from the last one to the first one.
__device__ void write_query_tiles(const Sizes& sizes, const Segment& segment, bool attend_current, int tile_rows,
                                  int capacity, QueryTiles* out) {
    const Segment s = clamped(segment, sizes);
    const int tiles = min(num_tiles(s, tile_rows), capacity);
    for (int i = threadIdx.x; i < tiles; i += kThreads)
        out->entries()[i] = tile_of(s, attend_current, tile_rows, tiles - 1 - i);
    if (threadIdx.x > 0) return;
    out->count = tiles;
    out->ticket = 0;
}

// A counting sort: count the tiles of each bucket, compute where each bucket begins, write the tiles.
__device__ void write_query_tiles(const Sizes& sizes, const Segments& segments, bool attend_current, int tile_rows,
                                  int capacity, QueryTiles* out, Shared& shared) {
    if (segments.size == 1) return write_query_tiles(sizes, segments[0], attend_current, tile_rows, capacity, out);
    shared.buckets[threadIdx.x] = 0;
    __syncthreads();
    for_each_tile(sizes, segments, attend_current, tile_rows, shared,
                  [&](const QueryTile&, int bucket) { atomicAdd(&shared.buckets[bucket], 1); });
    const int size = shared.buckets[threadIdx.x];
    const int end = scan_over_block(size, 0, shared.warp_sums, Sum()).inclusive;
    shared.buckets[threadIdx.x] = end - size;
    if (threadIdx.x == kThreads - 1) {
        out->count = min(end, capacity);  // `end` is larger only if a row is in two segments
        out->ticket = 0;
    }
    __syncthreads();
    for_each_tile(sizes, segments, attend_current, tile_rows, shared, [&](const QueryTile& tile, int bucket) {
        const int at = atomicAdd(&shared.buckets[bucket], 1);
        if (at < capacity) out->entries()[at] = tile;
    });
}
static_assert(kThreads == kBuckets, "each thread has one bucket");

// Writes the results of a row that is in no tile, for all batch elements and heads. One warp calls this.
__device__ void fill_row(const ForwardParams& p, int row) {
    const Sizes& z = p.sizes;
    for (int head = threadIdx.x % 32; head < z.batch * z.num_heads; head += 32) {
        const int64_t index = int64_t(head) * z.q_rows + row;
        const float* mass_in = static_cast<const float*>(p.mass_in);
        static_cast<float*>(p.mass_out)[index] = mass_in == nullptr ? 1.f : mass_in[index];
        static_cast<float*>(p.restart.mass)[index] = 0.f;
        p.restart.edge[index] = 0;
    }
    if (!p.add_o) clear_row(p.o, z.batch, z.num_heads, z.head_dim_v, p.o_dtype == Dtype::kFloat32 ? 4 : 2, row);
}

__global__ void __launch_bounds__(kThreads)
    list_tiles(Sizes sizes, Segments segments, bool attend_current, int tile_rows, int capacity, QueryTiles* out) {
    __shared__ Shared shared;
    write_query_tiles(sizes, segments, attend_current, tile_rows, capacity, out, shared);
}

// The first CTA writes the list; the others fill the rows that are in no tile.
__global__ void __launch_bounds__(kThreads)
    prepare(const __grid_constant__ ForwardParams params, int tile_rows, int capacity, QueryTiles* out) {
    __shared__ Shared shared;
    allow_next_kernel();  // the forward, which waits for the list
    if (blockIdx.x == 0)
        write_query_tiles(params.sizes, params.segments, params.options.attend_current, tile_rows, capacity, out,
                          shared);
    else
        for_uncovered_row(
            params.sizes, params.segments, blockIdx.x - 1, params.sizes.q_rows, shared.ends, shared.warp_sums,
            [](const Segment& s) {
                return RowRange{s.q_begin, s.q_len};
            },
            [&](int row) { fill_row(params, row); });
}

}  // namespace

int64_t max_query_tiles(const Sizes& sizes, const Segments& segments, int tile_rows) {
    // Each segment has at most one partial tile.
    const int64_t partial = std::min<int64_t>(segments.size, sizes.q_rows);
    return sizes.q_rows / tile_rows + partial;
}

int choose_tile_rows(const ForwardParams& p, int most_rows, int multiprocessors) {
    // Measured (docs/design/kernels-hopper-forward.md). A tile takes as long as its keys and kKeysOfTile more. The
    // tiles still run at once if there is work for kMostWork of the multiprocessors.
    constexpr float kKeysOfTile = 384.f, kMostWork = 1.125f;
    const Sizes& z = p.sizes;
    float mean_time = 1.f;  // of a tile, as a share of the longest; the host cannot read a segment table
    if (p.segments.by_value()) {
        const Segment s = clamped(p.segments.whole, z);
        const auto keys = [&](int row) { return float(clamp_row(s.q_pos_minus_k_pos + row, 0, s.k_len)); };
        mean_time = ((keys(0) + keys(s.q_len)) / 2 + kKeysOfTile) / (keys(s.q_len) + kKeysOfTile);
    }
    // At most. max_query_tiles() counts one more for a sequence of whole tiles, which would hide that they just fit.
    const auto tiles = [&](int rows) {
        return float((z.q_rows - 1) / rows + p.segments.size) * float(z.batch) * float(z.num_heads);
    };
    int rows = kSmallestQueryTile;
    while (rows < most_rows && mean_time * tiles(rows) > kMostWork * float(multiprocessors)) rows += kSmallestQueryTile;
    return rows;
}

void make_query_tiles(const Sizes& sizes, const Segments& segments, bool attend_current, int tile_rows, QueryTiles* out,
                      void* stream) {
    const int capacity = int(max_query_tiles(sizes, segments, tile_rows));
    list_tiles<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(sizes, segments, attend_current, tile_rows,
                                                                      capacity, out);
    check_launch("make_query_tiles");
}

void prepare_forward(const ForwardParams& params, int tile_rows, void* stream) {
    const int rows = params.segments.by_value() ? 0 : params.sizes.q_rows;
    const int capacity = int(max_query_tiles(params.sizes, params.segments, tile_rows));
    prepare<<<1 + blocks_to_examine(rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        params, tile_rows, capacity, static_cast<QueryTiles*>(params.workspace));
    check_launch("prepare_forward");
}

}  // namespace megatron_sb::common
