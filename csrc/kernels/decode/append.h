// Writes new keys and values into a cache, on every GPU from sm_80 on.
#pragma once

#include "kernels/decode/decode.h"

namespace megatron_sb::decode {

struct AppendParams {
    Rows<const void*> k, v;        // (batch, num_rows, num_heads, width)
    Rows<void*> k_cache, v_cache;  // (batch, capacity, ...); with a table (num_blocks, block_size, ...)
    int32_t batch, num_rows, num_heads;
    int32_t k_width, v_width;  // in elements
    int32_t element_bytes;     // 2, 4 or 8
    int32_t capacity;          // of the cache for each sequence
    const int32_t* lengths;    // (batch,): row j of batch element b is written to position lengths[b] + j
    BlockTable table;
};

// Launches on `stream`, a cudaStream_t. Rows whose position is not in [0, capacity), or whose block is not in
// [0, num_blocks), are not written. Throws RuntimeFailure if the launch fails.
void append(const AppendParams& params, void* stream);

}  // namespace megatron_sb::decode
