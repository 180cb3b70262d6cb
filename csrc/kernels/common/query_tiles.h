// The work of a call: a list of query tiles in device memory, tiles with more keys first. A kernel writes the list, so
// the host never reads the segment table.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace megatron_sb::common {

// Rows [q_row, q_row + num_rows) of q, all in one segment. The keys of the segment are rows [k_row, k_row + k_len) of
// k. Row r of the tile sees the first clamp(visible + r, 0, k_len) of them.
struct alignas(32) QueryTile {
    int32_t q_row;
    int32_t num_rows;
    int32_t k_row;
    int32_t k_len;
    int32_t visible;
};

struct alignas(32) QueryTiles {
    int32_t count;   // entries that follow
    int32_t ticket;  // initially 0; a CTA of a persistent kernel takes entry atomicAdd(&ticket, 1)

    SB_HOST_DEVICE const QueryTile* entries() const { return reinterpret_cast<const QueryTile*>(this + 1); }
    SB_HOST_DEVICE QueryTile* entries() { return reinterpret_cast<QueryTile*>(this + 1); }
};

// Returns the maximum number of entries for any table of this size.
int64_t max_query_tiles(const Sizes& sizes, const Segments& segments, int tile_rows);

// Returns the number of rows of a query tile for a kernel with one CTA on a multiprocessor and a warpgroup for each
// kSmallestQueryTile of `most_rows`: all of them, or fewer if the tiles still run at once. The call then takes as long
// as the tile with the most keys, and that is faster with fewer rows. In a long causal call tiles have half as many
// keys on average, so two of them count as one.
constexpr int kSmallestQueryTile = 64;
int choose_tile_rows(const ForwardParams& params, int most_rows, int multiprocessors);

inline int64_t query_tiles_bytes(const Sizes& sizes, const Segments& segments, int tile_rows) {
    return int64_t(sizeof(QueryTiles)) + max_query_tiles(sizes, segments, tile_rows) * int64_t(sizeof(QueryTile));
}

// Writes the list on `stream` (a cudaStream_t). Segments are clamped to the rows of q and k. Throws RuntimeFailure if
// the launch fails.
void make_query_tiles(const Sizes& sizes, const Segments& segments, bool attend_current, int tile_rows, QueryTiles* out,
                      void* stream);

// Writes the list to params.workspace on `stream` (a cudaStream_t). For query rows in no segment it also writes o = 0
// (unless params.add_o), mass_out = mass_in and an empty restart record. Throws RuntimeFailure if the launch fails.
void prepare_forward(const ForwardParams& params, int tile_rows, void* stream);

}  // namespace megatron_sb::common
