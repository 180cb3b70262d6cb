// How keys reach a rank and how their gradients return: the only part of context parallelism that differs by mode.
//
// Keys and values are sent in their own dtype, and their gradients in the accumulation type (fp32; fp64 for fp64). They
// form one tensor kv (b, rows, kv heads, d + d_v). If ranges of rows are sent without copies (needed_keys.cpp), keys
// and values are separate tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "distributed/rank_plan.h"
#include "distributed/transport.h"

namespace megatron_sb::distributed {

struct KeyBlock {
    int buffer;       // index of the key buffer in SegmentTables
    at::Tensor k, v;  // (b, rows, kv heads, d), (b, rows, kv heads, d_v)
};

struct KeyGradients {
    at::Tensor dk, dv;  // shapes of k and v
};

struct HeadRange {
    int64_t begin;
    int64_t count;
};

// One pass over the keys. For each group of KV heads and each step, the driver calls next_blocks(). In the backward it
// then calls gradients() for each block that it computes, and finish_step().
class KeySource {
  public:
    virtual ~KeySource() = default;
    virtual int num_groups() const = 0;
    virtual int num_steps() const = 0;
    virtual HeadRange heads(int group) const = 0;  // the KV heads of a group
    // Returns the blocks of this step. Starts the transfer of the next step's blocks, which overlaps the compute of
    // this step.
    virtual std::vector<KeyBlock> next_blocks() = 0;
    // Returns uninitialised tensors, to which a kernel writes this rank's gradients of block `block` of this step.
    // Called at most once for each block.
    virtual KeyGradients gradients(size_t block) = 0;
    // Sends the gradients of this step's blocks, which are 0 for a block without a call of gradients().
    virtual void finish_step() = 0;
    // Writes, after the last step, the gradients of this rank's own keys and values to `to`, (b, s_local, kv heads,
    // ..), of any dtype. Rows that no rank needs may be left as they are.
    virtual void write_own_gradients(const KeyGradients& to) = 0;
};

// All take k (b, s_local, h_kv, d) and v (b, s_local, h_kv, d_v). `transport` and `plan` must outlive the source.

// Moves chunks of keys around the ring.
std::unique_ptr<KeySource> make_ring_keys(Transport& transport, const RankPlan& plan, plan::Pass pass,
                                          const at::Tensor& k, const at::Tensor& v);
// Gathers the whole stream, a group of KV heads at a time, and reduce-scatters the gradients.
std::unique_ptr<KeySource> make_gathered_keys(Transport& transport, const RankPlan& plan, const at::Tensor& k,
                                              const at::Tensor& v);
// Gets the rows of KeyRowPlan, a group of KV heads at a time, and sends their gradients back. `kept`: by group, the
// blocks that the forward has kept; if it is empty, they are received.
std::unique_ptr<KeySource> make_needed_keys(Transport& transport, const RankPlan& plan, const at::Tensor& k,
                                            const at::Tensor& v, std::vector<KeyBlock> kept);
// Returns k and v as one block, without a transfer. Kernels compute the gradients in `type`: in the backward directly
// in `to`, which then is also the `to` of write_own_gradients(), if it has this type.
std::unique_ptr<KeySource> make_local_keys(const at::Tensor& k, const at::Tensor& v, at::ScalarType type,
                                           const KeyGradients& to);

// How many groups of KV heads travel one after another, and one of them.
inline int64_t num_head_groups(int64_t num_kv_heads, int64_t rows, int64_t rows_to_split) {
    return rows < rows_to_split ? 1 : std::min(kMaxHeadGroups, num_kv_heads);
}
inline HeadRange head_group(int64_t num_kv_heads, int64_t num_groups, int group) {
    const int64_t begin = num_kv_heads * group / num_groups;
    return {begin, num_kv_heads * (group + 1) / num_groups - begin};
}

// Returns how many bytes of gathered keys and values are allocated at a time, at most. The result depends on seq_len
// and on the other sizes of k and v, but not on their rows, so it is the same on all ranks.
int64_t gathered_bytes(int64_t seq_len, const at::Tensor& k, const at::Tensor& v);

// Return k and v as views of kv, or dk and dv as views of its gradient.
inline at::Tensor keys_of(const at::Tensor& kv, int64_t d) {
    return kv.narrow(3, 0, d);
}
inline at::Tensor values_of(const at::Tensor& kv, int64_t d) {
    return kv.narrow(3, d, kv.size(3) - d);
}

}  // namespace megatron_sb::distributed
