// Which rows of Q and which keys a CTA processes, and where they are in memory.
#pragma once

#include "core/segment.h"
#include "kernels/common/tile.cuh"
#include "kernels/decode/decode.h"

namespace megatron_sb::decode {

inline constexpr int kKeys = 32;  // of a tile
inline constexpr int kRows = 16;  // rows of Q of a CTA
using KeyOrder = common::KeysToColumns<kKeys>;

// Rows [first, first + count) of Q of one KV head. `group` query heads read this KV head, so it has q_rows * group
// rows. Row r is query r / group of head r % group of the group.
struct QueryRows {
    int batch, kv_head, group, first, count;
    int num_queries, num_keys, first_key, current;  // the sequence has keys [first_key, first_key + num_keys)

    __device__ QueryRows(const Params& p, int unit, int row_tiles) {
        const Sizes& z = p.sizes;
        group = z.num_heads / z.num_kv_heads;
        first = unit % row_tiles * kRows;
        count = min(kRows, z.q_rows * group - first);
        kv_head = unit / row_tiles % z.num_kv_heads;
        batch = unit / row_tiles / z.num_kv_heads;
        const int end = clamp_row(p.ends[batch], 0, z.k_rows);
        first_key = p.firsts == nullptr ? 0 : clamp_row(p.firsts[batch], 0, end);
        num_keys = end - first_key;
        num_queries = z.q_rows;
        current = p.options.attend_current ? 1 : 0;
    }

    __device__ int query(int row) const { return (first + row) / group; }
    __device__ int head(int row) const { return kv_head * group + (first + row) % group; }
    // Returns how many keys, from first_key on, a row sees. It does not decrease with the row.
    __device__ int visible(int row) const {
        return clamp_row(num_keys - num_queries + query(row) + current, 0, num_keys);
    }
};

// The keys or values of one KV head in the cache. Strides are in bytes.
struct CachedRows {
    const char* data;
    int64_t block_stride, row_stride;
    int width;

    __device__ CachedRows(const Rows<const void*>& rows, int head, int head_dim, int element_bytes)
        : data(static_cast<const char*>(rows.data) + head * rows.head_stride * element_bytes),
          block_stride(rows.batch_stride * element_bytes),
          row_stride(rows.row_stride * element_bytes),
          width(head_dim * element_bytes) {}
};

// Where the key of this lane is in the cache.
struct KeyPlace {
    int block, row;
    bool exists;

    __device__ int64_t in(const CachedRows& rows) const {
        return exists ? block * rows.block_stride + row * rows.row_stride : 0;
    }
};

__device__ inline KeyPlace place_of(const Params& p, int batch, int key, bool exists) {
    if (p.table.data == nullptr) return {batch, key, exists};
    const int index = key / p.table.block_size, row = key - index * p.table.block_size;
    const int block = exists ? __ldg(p.table.data + batch * p.table.stride + index) : 0;
    return {clamp_row(block, 0, p.table.num_blocks - 1), row, exists};
}

// Starts to copy a tile of keys to shared memory and commits one group of copies. One warp calls it; lane i passes the
// place of key i. Keys that do not exist, and columns beyond the width, become zeros.
template <int kPitch>
__device__ inline void load_keys(uint32_t to, const CachedRows& from, const KeyPlace& place) {
    constexpr int kPieces = kPitch / 16, kPiecesAtOnce = kPieces < 32 ? kPieces : 32, kRowsAtOnce = 32 / kPiecesAtOnce;
    const int lane = threadIdx.x % 32, piece = lane % kPiecesAtOnce, first = lane / kPiecesAtOnce;
    const int64_t offset = place.in(from);
    const unsigned existing = __ballot_sync(common::kAllLanes, place.exists);
    const int first_at = KeyOrder{}(first);
    const uint32_t first_to = to + first_at * kPitch + ((piece ^ first_at % 8) << 4);
#pragma unroll
    for (int i = 0; i < kKeys / kRowsAtOnce; ++i) {
        const int key = i * kRowsAtOnce + first, row_step = KeyOrder{}(i * kRowsAtOnce);
        const int64_t at = __shfl_sync(common::kAllLanes, offset, key);
#pragma unroll
        for (int more = 0; more < kPitch; more += kPiecesAtOnce * 16)
            common::copy_async((first_to ^ row_step % 8 << 4) + row_step * kPitch + more,
                               from.data + at + piece * 16 + more,
                               piece * 16 + more < from.width && (existing >> key & 1));
    }
    common::commit_copies();
}

// Starts to copy the rows of Q to shared memory and commits one group of copies. The whole CTA calls it. Rows that do
// not exist become zeros.
template <class T, int kPitch>
__device__ inline void load_queries(uint32_t to, const Params& p, const QueryRows& rows) {
    constexpr int kPieces = kPitch / 16, kElements = 16 / int(sizeof(T));  // of a piece
    for (int i = threadIdx.x; i < kRows * kPieces; i += blockDim.x) {
        const int row = i / kPieces, piece = i % kPieces;
        const bool exists = row < rows.count && piece * kElements < p.sizes.head_dim;
        const T* from = static_cast<const T*>(p.q.data);
        if (exists)
            from += rows.batch * p.q.batch_stride + rows.query(row) * p.q.row_stride +
                    rows.head(row) * p.q.head_stride + piece * kElements;
        common::copy_async(to + row * kPitch + ((piece ^ row % 8) << 4), from, exists);
    }
    common::commit_copies();
}

}  // namespace megatron_sb::decode
