// a2a: ranks exchange heads for rows, so that each has all of their rows for its share of the heads, and back.
//
// Of n heads over A ranks, rank a has n / A: heads a n / A and on. Where there are fewer KV heads than ranks, each goes
// to the A / n ranks whose query heads read it, and the gradients that come back are summed. Heads are exchanged a
// group at a time (an equal part of each rank's share), so that one group travels under another's compute.
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

    int num_groups() const { return num_groups_; }
    // Whether a KV head goes to several ranks.
    bool repeats_keys() const { return num_kv_heads_ % transport_.size() != 0; }

    // Tensors under way, exchanged as one.
    class Delivery {
      public:
        std::vector<at::Tensor> arrive();

      private:
        friend class HeadExchange;
        struct Part {
            at::ScalarType type;
            int64_t heads, width;  // of a row
        };
        std::vector<Part> parts_;
        at::Tensor output_;  // (rows, b, words of a row), or those of each rank
        at::Tensor order_;   // which row goes where; undefined: all are in their places
        std::unique_ptr<Pending> pending_;
    };

    // x (b, s_local, heads or KV heads, width) of any dtypes, a row of a head taking a multiple of four bytes; arrive
    // as (b, joint rows, this rank's heads of the group, width).
    Delivery to_heads(const std::vector<at::Tensor>& xs, int group);
    // y (b, joint rows, this rank's heads of a group, width), likewise; arrive as (ranks, b, s_local, heads, width),
    // for put().
    Delivery to_rows(const std::vector<at::Tensor>& ys);
    // Writes what arrived of a group into x (b, s_local, heads or KV heads, width); the sum of what several ranks have
    // of a head.
    void put(const at::Tensor& x, const at::Tensor& arrived, int group) const;

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
    int num_groups_ = 1;
};

}  // namespace megatron_sb::distributed
