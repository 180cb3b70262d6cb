// The work of a call as a list on the device: tiles of query rows, those with the most keys first. Made by a kernel,
// from a segment table that the host never reads.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace megatron_sb::portable {

// Rows [q_row, q_row + num_rows) of the local buffers; row r of them sees the first clamp(visible + r, 0, k_len) of the
// segment's keys, which begin at k_row.
struct alignas(32) QueryTile {
    int32_t q_row;
    int32_t num_rows;
    int32_t k_row;
    int32_t k_len;
    int32_t visible;
};

struct alignas(32) QueryTiles {
    int32_t count;   // entries that follow
    int32_t ticket;  // 0: for persistent kernels that hand out the list with atomic additions

    SB_HOST_DEVICE const QueryTile* entries() const { return reinterpret_cast<const QueryTile*>(this + 1); }
    SB_HOST_DEVICE QueryTile* entries() { return reinterpret_cast<QueryTile*>(this + 1); }
};

// The most entries that a list can have, whatever the table holds.
int64_t max_query_tiles(const Sizes& sizes, const Segments& segments, int tile_rows);

inline int64_t query_tiles_bytes(const Sizes& sizes, const Segments& segments, int tile_rows) {
    return int64_t(sizeof(QueryTiles)) + max_query_tiles(sizes, segments, tile_rows) * int64_t(sizeof(QueryTile));
}

// Writes the list on `stream` (a cudaStream_t). Segments are clamped to the rows there are. Throws RuntimeFailure if
// the launch fails, as do the functions below.
void make_query_tiles(const Sizes& sizes, const Segments& segments, bool attend_current, int tile_rows, QueryTiles* out,
                      void* stream);

// The same to params.workspace; and o = 0, mass_out = mass_in and restart edge 0 to the query rows of no segment.
void prepare_forward(const ForwardParams& params, int tile_rows, void* stream);

}  // namespace megatron_sb::portable
