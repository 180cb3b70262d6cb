// a2a: ranks exchange rows for heads. Afterwards each rank has the rows of all these ranks, for its share of the heads.
// The output is exchanged back.
//
// With n heads and A ranks, rank a gets the n / A heads from a * n / A on. If there are fewer KV heads than ranks, each
// KV head goes to the A / n ranks with the query heads that read it. The gradients that these ranks return for it are
// summed. All heads are sent in one exchange, which overlaps no compute. Sending them in groups would overlap, but a
// kernel on one group loses more time than the transfer takes.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "distributed/rank_plan.h"
#include "distributed/transport.h"

namespace megatron_sb::distributed {

// Writes the heads of each rank, (b, s_local, ranks, heads, width), into x (b, s_local, all heads, width). Sums a head
// that several ranks have.
void write_heads(const at::Tensor& x, const at::Tensor& by_rank);

class HeadExchange {
  public:
    // `transport` and `plan` must outlive the object; `plan` is for transport.size() exchanging ranks.
    HeadExchange(Transport& transport, const RankPlan& plan, int64_t num_heads, int64_t num_kv_heads);

    // Returns why num_ranks ranks cannot exchange these heads; "" if they can.
    static std::string problem(int64_t num_heads, int64_t num_kv_heads, int num_ranks);

    // Returns whether a KV head goes to several ranks.
    bool repeats_keys() const { return num_kv_heads_ % transport_.size() != 0; }

    // Converts each x (b, s_local, heads or KV heads, width) to (b, joint rows, this rank's heads, width). The tensors
    // may have different dtypes. One row of a head must take a multiple of four bytes.
    std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& xs) const;
    // Converts each y (b, joint rows, this rank's heads, width) to the heads of each rank for this rank's rows,
    // (b, s_local, ranks, heads, width), for write_heads(). Move the tensors in: they are released once they are
    // packed, because memory is needed most here.
    std::vector<at::Tensor> to_rows(std::vector<at::Tensor> ys) const;

  private:
    // Returns whether each row range is sent to its place in the joint buffer. If not, rows are sorted after the
    // transfer.
    bool sends_row_ranges() const { return !plan_.to_joint.defined(); }
    std::vector<int64_t> local_rows_for_each() const {
        return std::vector<int64_t>(plan_.exchanged_rows.size(), num_local_rows_);
    }
    // Return the messages to or from each rank, as views of x (ranks, s_local, ..) or of x (joint rows, ..). Both x
    // must be contiguous.
    std::vector<Message> pieces_by_rank(const at::Tensor& x) const;
    std::vector<Message> pieces_of_joint(const at::Tensor& x) const;
    // Copies the pieces that stay on this rank before it returns.
    std::unique_ptr<Pending> exchange(const std::vector<Message>& from, const std::vector<Message>& to) const;

    Transport& transport_;
    const RankPlan& plan_;
    const int64_t num_kv_heads_, num_local_rows_, num_joint_rows_;
};

}  // namespace megatron_sb::distributed
