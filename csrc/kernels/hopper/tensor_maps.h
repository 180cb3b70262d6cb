// Tensor maps: how the copy engine finds the tiles of a (batch, row, head, head_dim) tensor of any strides.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/params.h"

namespace megatron_sb::hopper {

// Batch and head as one coordinate: batch * per_batch + head * per_head, in units of their strides' common divisor.
struct HeadIndex {
    int32_t per_batch, per_head;
    SB_HOST_DEVICE int32_t operator()(int batch, int head) const { return batch * per_batch + head * per_head; }
};

struct TensorMap {
    CUtensorMap map;
    HeadIndex heads;
};

// The sizes of one of q, k, v.
struct TensorSizes {
    Dtype dtype;
    int32_t batch, rows, heads, head_dim;
};

// Coordinates {column, row, head index}; a box is `box_rows` rows of 64 columns.
TensorMap make_query_map(const Rows<const void*>& tensor, const TensorSizes& sizes, int box_rows);

// Coordinates {column, first key, 0, 0, head index}; a box is 64 columns of tile_keys keys in permuted order: row
// 8n + 2t + c of the tile is key tile_keys / 4 * t + 2n + c. The bounds of the tensor are not checked beyond the first
// two keys: ask only for tiles that lie within it.
TensorMap make_key_map(const Rows<const void*>& tensor, const TensorSizes& sizes, int tile_keys);

}  // namespace megatron_sb::hopper
