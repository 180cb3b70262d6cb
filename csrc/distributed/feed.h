// How keys come to a rank, and how their gradients go home: the only part of context parallelism that differs by mode.
//
// Keys and values travel as one tensor kv (b, rows, kv heads, d + d_v) in their own dtype, gradients as one of the same
// shape in the accumulation type (fp32; fp64 for fp64).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "distributed/rank_plan.h"
#include "distributed/transport.h"

namespace megatron_sb::distributed {

enum class Comm : int8_t { kRing, kGather };  // "p2p", "all_gather"

struct KeyBlock {
    int buffer;  // which key buffer of the tables
    at::Tensor kv;
};

struct HeadRange {
    int64_t begin;
    int64_t count;
};

// One pass over the keys: for each group of KV heads, for each step, take() and, in the backward, give().
class KeyFeed {
  public:
    virtual ~KeyFeed() = default;
    virtual int num_groups() const = 0;
    virtual int num_steps() const = 0;
    virtual HeadRange heads(int group) const = 0;  // KV heads
    // This step's blocks. The next step's are under way when it returns, so that they travel under this step's compute.
    virtual std::vector<KeyBlock> take() = 0;
    // This rank's part of the gradients of the blocks just taken; undefined where it has none.
    virtual void give(std::vector<at::Tensor> gradients) = 0;
    // After the last step: the gradient (b, s_local, kv heads, d + d_v) of this rank's own keys and values.
    virtual at::Tensor home() = 0;
};

// k (b, s_local, h_kv, d), v (b, s_local, h_kv, d_v). `transport` and `plan` outlive the feed.
std::unique_ptr<KeyFeed> make_ring_feed(Transport& transport, const RankPlan& plan, plan::Pass pass,
                                        const at::Tensor& k, const at::Tensor& v);
// Gathers the whole stream, a group of KV heads at a time, and reduce-scatters the gradients.
std::unique_ptr<KeyFeed> make_gather_feed(Transport& transport, const RankPlan& plan, const at::Tensor& k,
                                          const at::Tensor& v);
// Bytes of the gathered keys and values that are alive at a time.
int64_t gather_feed_bytes(int ranks, const at::Tensor& k, const at::Tensor& v);

}  // namespace megatron_sb::distributed
