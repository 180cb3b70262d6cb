// Tensor maps describe a tensor (batch, row, head, head_dim) with any strides to TMA, and the box that one load copies.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/params.h"

namespace megatron_sb::hopper {

// Joins batch and head into one coordinate, the head index: batch * per_batch + head * per_head. Its stride is the
// greatest common divisor of the strides of batch and head. It is less than 2^31: make_query_map() and make_key_map()
// throw RuntimeFailure for other tensors, and if the driver refuses a map.
struct HeadIndex {
    int32_t per_batch, per_head;
    SB_HOST_DEVICE int32_t operator()(int batch, int head) const { return batch * per_batch + head * per_head; }
};

struct TensorMap {
    CUtensorMap map;
    HeadIndex heads;
};

// Columns of a box: a panel, with the 128-byte swizzle, or the bias columns (hopper.h), without a swizzle.
constexpr int kPanelColumns = 64;

// Returns the map of query tiles: of q or do, with `head_dim` columns. A load copies `box_rows` rows of `columns`
// columns. Coordinates: {column, row, head index}.
TensorMap make_query_map(const Rows<const void*>& tensor, const Sizes& sizes, int head_dim, int box_rows,
                         int columns = kPanelColumns);

// Returns the map of key tiles: of k or v, with `head_dim` columns. A load copies `columns` columns of `tile_keys` keys
// in permuted order: row 8n + 2t + c of the tile is key (tile_keys / 4) t + 2n + c. Coordinates: {column, first key, 0,
// 0, head index}. TMA compares only the first two keys with the end of the tensor, so request only tiles that lie
// inside the tensor.
TensorMap make_key_map(const Rows<const void*>& tensor, const Sizes& sizes, int head_dim, int tile_keys,
                       int columns = kPanelColumns);

}  // namespace megatron_sb::hopper
