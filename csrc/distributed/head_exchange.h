// a2a: ranks exchange heads for rows, so that each rank has all of their rows for its share of the heads; and back.
//
// With n heads and A ranks, rank a gets the n / A heads from a * n / A on. If there are fewer KV heads than ranks, each
// KV head goes to the A / n ranks whose query heads read it, and its returned gradients are summed. All heads travel in
// one exchange, without overlapping compute: a kernel on part of the heads costs more than the transfer.
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
    // `transport` and `plan` must outlive the object; `plan` is for transport.size() exchanging ranks.
    HeadExchange(Transport& transport, const RankPlan& plan, int64_t num_heads, int64_t num_kv_heads);

    // The reason why num_ranks ranks cannot exchange these heads; "" if they can.
    static std::string problem(int64_t num_heads, int64_t num_kv_heads, int num_ranks);

    // Whether a KV head goes to several ranks.
    bool repeats_keys() const { return num_kv_heads_ % transport_.size() != 0; }

    // Each x (b, s_local, heads or KV heads, width) becomes (b, joint rows, this rank's heads, width). Dtypes may
    // differ; one row of a head takes a multiple of four bytes.
    std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& xs) const;
    // Writes each y (b, joint rows, this rank's heads, width) into its x (b, s_local, heads or KV heads, width). Sums a
    // head that several ranks have.
    void to_rows(const std::vector<at::Tensor>& ys, const std::vector<at::Tensor>& xs) const;

  private:
    // Whether each row range is sent to its place in the joint buffer. If not, rows are sorted after the transfer.
    bool sends_row_ranges() const { return !plan_.to_joint.defined(); }
    // The messages to or from each rank: views of x (ranks, s_local, ..) or of x (joint rows, ..), both contiguous.
    std::vector<Message> pieces_by_rank(const at::Tensor& x) const;
    std::vector<Message> pieces_of_joint(const at::Tensor& x) const;
    // Copies this rank's own pieces before it returns.
    std::unique_ptr<Pending> exchange(const std::vector<Message>& from, const std::vector<Message>& to) const;

    Transport& transport_;
    const RankPlan& plan_;
    const int64_t num_kv_heads_, num_joint_rows_;
};

}  // namespace megatron_sb::distributed
