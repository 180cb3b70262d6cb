// Tensor maps tell TMA how to find the tiles of a tensor (batch, row, head, head_dim) with any strides.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/params.h"

namespace megatron_sb::hopper {

// Joins batch and head into one coordinate: batch * per_batch + head * per_head. The unit is the greatest common
// divisor of their strides.
struct HeadIndex {
    int32_t per_batch, per_head;
    SB_HOST_DEVICE int32_t operator()(int batch, int head) const { return batch * per_batch + head * per_head; }
};

struct TensorMap {
    CUtensorMap map;
    HeadIndex heads;
};

// Sizes of q, k or v.
struct TensorSizes {
    Dtype dtype;
    int32_t batch, rows, heads, head_dim;
};

// The map of a query tile: `box_rows` rows of 64 columns. Coordinates: {column, row, head index}.
TensorMap make_query_map(const Rows<const void*>& tensor, const TensorSizes& sizes, int box_rows);

// The map of a key tile: 64 columns of `tile_keys` keys in permuted order. Row 8n + 2t + c of the tile is key tile_keys
// / 4 * t + 2n + c. Coordinates: {column, first key, 0, 0, head index}. TMA does not check the end of the tensor beyond
// the first two keys, so request only tiles that lie inside the tensor.
TensorMap make_key_map(const Rows<const void*>& tensor, const TensorSizes& sizes, int tile_keys);

}  // namespace megatron_sb::hopper
