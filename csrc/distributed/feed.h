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

// "p2p", "all_gather"; kHere: this rank has all keys that its queries see.
enum class Comm : int8_t { kRing, kGather, kHere };

struct KeyBlock {
    int buffer;       // which key buffer of the tables
    at::Tensor k, v;  // (b, rows, kv heads, d), (b, rows, kv heads, d_v)
};

struct KeyGradients {
    at::Tensor dk, dv;  // of the same shapes
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
    // Where this rank's part of the gradients of a block just taken goes, once: to be added to in the accumulation
    // type, or in k's own to be written (kHere alone).
    virtual KeyGradients gradients(size_t block) = 0;
    // The gradients of the blocks just taken are complete.
    virtual void give() = 0;
    // After the last step: the gradients of this rank's own keys and values, (b, s_local, kv heads, ..).
    virtual KeyGradients home() = 0;
};

// k (b, s_local, h_kv, d), v (b, s_local, h_kv, d_v). `transport` and `plan` outlive the feed.
std::unique_ptr<KeyFeed> make_ring_feed(Transport& transport, const RankPlan& plan, plan::Pass pass,
                                        const at::Tensor& k, const at::Tensor& v);
// Gathers the whole stream, a group of KV heads at a time, and reduce-scatters the gradients.
std::unique_ptr<KeyFeed> make_gather_feed(Transport& transport, const RankPlan& plan, const at::Tensor& k,
                                          const at::Tensor& v);
// k and v as they are. Gradients come in `type`.
std::unique_ptr<KeyFeed> make_here_feed(const at::Tensor& k, const at::Tensor& v, at::ScalarType type);
// Bytes of the gathered keys and values that are alive at a time.
int64_t gather_feed_bytes(int ranks, const at::Tensor& k, const at::Tensor& v);

// The parts of kv, or of its gradient.
inline at::Tensor keys_of(const at::Tensor& kv, int64_t d) {
    return kv.narrow(3, 0, d);
}
inline at::Tensor values_of(const at::Tensor& kv, int64_t d) {
    return kv.narrow(3, d, kv.size(3) - d);
}

}  // namespace megatron_sb::distributed
