// Attention of a few queries to a long cache of keys and values, on every GPU from sm_80 on. Inference only: it saves
// nothing for a backward.
#pragma once

#include "core/params.h"

namespace megatron_sb::decode {

// The most rows of Q of one KV head, q_rows * num_heads / num_kv_heads, for which this kernel is used. With more rows,
// block_forward is faster.
inline constexpr int kMaxQueryRows = 64;

// Without a block table, the cache of keys is (batch, row, num_kv_heads, head_dim). With a block table it is
// (num_blocks, block_size, num_kv_heads, head_dim). Key i of batch element b is then row i % block_size of block
//     table[b * stride + i / block_size].
// The host does not read the values of the table. The kernel clamps them to [0, num_blocks).
struct BlockTable {
    const int32_t* data = nullptr;  // null: no block table
    int64_t stride = 0;
    int32_t block_size = 0;
    int32_t num_blocks = 0;
};

struct Params {
    Sizes sizes;  // k_rows: capacity of the cache for each sequence; dtype: kBFloat16, kFloat16 or kFloat32
    Options options;
    Rows<const void*> q, k, v;  // rows begin at multiples of 16 bytes, as do those of o; k with its gates, if any
    Rows<void*> o;              // of type sizes.dtype
    float* mass;                // (batch, num_heads, q_rows), contiguous
    // A batch element has the keys [first, end) of its cache. Its queries are the last of these positions.
    const int32_t* ends;              // (batch,)
    const int32_t* firsts = nullptr;  // (batch,); null: 0
    BlockTable table;
    void* workspace = nullptr;  // workspace_bytes(), aligned to kWorkspaceAlignment
};

// Returns the least shared memory of a CTA, in bytes, for a dtype and head dims. fp32 rows of more than 128 columns
// need 113 KB; sm_86, sm_89 and sm_120 have 99 KB.
int least_shared_bytes(const Sizes& sizes);

// Returns whether a CTA of the current device has that much.
bool fits_device(const Sizes& sizes);

// How a call is distributed over the device. The plan depends on sizes only, so it is valid for every replay of a CUDA
// graph.
struct Plan {
    int warps;      // of a CTA; each has its own keys
    int splits;     // CTAs that share the keys of a sequence
    int row_tiles;  // tiles of kRows rows of Q for each KV head
};
Plan plan_for(const Params& params);

int64_t workspace_bytes(const Params& params, const Plan& plan);

// Launches on `stream`, a cudaStream_t. Throws RuntimeFailure if a launch fails.
void forward(const Params& params, const Plan& plan, void* stream);

}  // namespace megatron_sb::decode
