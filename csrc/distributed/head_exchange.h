// a2a: ranks exchange heads for rows, so that each has all of their rows for its share of the heads, and back.
//
// Of n heads over A ranks, rank a has n / A: heads a n / A and on. Where there are fewer KV heads than ranks, each goes
// to the A / n ranks whose query heads read it, and the gradients that come back are summed. All heads travel as one,
// and nothing is computed meanwhile: a kernel for a part of them costs more than its transfer does (docs).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "distributed/rank_plan.h"
#include "distributed/transport.h"

namespace megatron_sb::distributed {

class HeadExchange {
  public:
    // `transport` and `plan` (made for this many exchanging ranks) outlive it.
    HeadExchange(Transport& transport, const RankPlan& plan, int64_t num_heads, int64_t num_kv_heads);

    // Why these heads cannot be exchanged between so many ranks; "" if they can.
    static std::string refusal(int64_t num_heads, int64_t num_kv_heads, int num_ranks);

    // Whether a KV head goes to several ranks.
    bool repeats_keys() const { return num_kv_heads_ % transport_.size() != 0; }

    // x (b, s_local, heads or KV heads, width) of any dtypes, a row of a head taking a multiple of four bytes, as
    // (b, joint rows, this rank's heads, width).
    std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& xs) const;
    // y (b, joint rows, this rank's heads, width), likewise, into x (b, s_local, heads or KV heads, width); the sum of
    // what several ranks have of a head.
    void to_rows(const std::vector<at::Tensor>& ys, const std::vector<at::Tensor>& xs) const;

  private:
    // Whether rows travel from where they are to where they belong; else in the order of the ranks.
    bool in_place() const { return !plan_.to_joint.defined(); }
    // What goes to each rank, or comes from it: of (ranks, s_local, ..), or of (joint rows, ..); both contiguous.
    std::vector<Message> pieces_by_rank(const at::Tensor& x) const;
    std::vector<Message> pieces_of_joint(const at::Tensor& x) const;
    // This rank's own pieces are copied at once.
    std::unique_ptr<Pending> exchange(const std::vector<Message>& from, const std::vector<Message>& to) const;

    Transport& transport_;
    const RankPlan& plan_;
    const int64_t num_kv_heads_, num_joint_rows_;
};

}  // namespace megatron_sb::distributed
