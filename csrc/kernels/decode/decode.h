// Attention of a few queries to a long cache of keys and values, on any GPU from sm_80 on. Nothing for a backward.
#pragma once

#include "core/params.h"

namespace megatron_sb::decode {

// Query rows of a KV head, q_rows * num_heads / num_kv_heads: with more, block_forward is the better one.
inline constexpr int kMaxQueryRows = 64;

// The cache is a batch of runs of keys, or, where there is a block table, blocks of keys: k and v are then (blocks,
// block_size, num_kv_heads, head_dim), and key i of batch element b is row i % block_size of block
// table[b * stride + i / block_size]. Values are clamped to what is there: they are known to the device only.
struct BlockTable {
    const int32_t* data = nullptr;  // null: there is none
    int64_t stride = 0;
    int32_t block_size = 0;
    int32_t num_blocks = 0;
};

struct Params {
    Sizes sizes;  // k_rows: the most keys that a sequence can have; dtype: kBFloat16 or kFloat16
    Options options;
    Rows<const void*> q, k, v;  // rows begin at multiples of 16 bytes, as in o
    Rows<void*> o;              // of type sizes.dtype
    float* mass;                // (batch, num_heads, q_rows), contiguous
    // Keys [first, end) of each batch element are there, and its queries are the last of these positions.
    const int32_t* ends;              // (batch,)
    const int32_t* firsts = nullptr;  // (batch,); null: 0
    BlockTable table;
    void* workspace = nullptr;  // workspace_bytes(), aligned to 256
};

// How a call is spread over the device, from its sizes alone.
struct Plan {
    int warps;      // of a thread block, each with keys of its own
    int splits;     // thread blocks over the keys of a sequence
    int row_tiles;  // over the query rows of a KV head
};
Plan plan_for(const Params& params);

int64_t workspace_bytes(const Params& params, const Plan& plan);

// On `stream`, a cudaStream_t. Throws RuntimeFailure if a launch fails.
void forward(const Params& params, const Plan& plan, void* stream);

}  // namespace megatron_sb::decode
