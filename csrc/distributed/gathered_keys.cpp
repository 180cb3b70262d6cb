// all_gather: every rank gets the keys of the whole stream in order, one group of KV heads at a time. The gather of the
// next group overlaps the compute of this group. In the backward, the reduce-scatter of the gradients of this group
// overlaps the compute of the next group. If the rows that ranks need are less than half of this, each gets only these,
// and sends their gradients back (key_row_exchange.h). Queries and local keys are then the shared rows.
#include <ATen/ATen.h>

#include "distributed/key_row_exchange.h"
#include "distributed/key_source.h"
#include "ops/tensors.h"

namespace megatron_sb::distributed {
namespace {

int64_t num_head_groups(int64_t num_kv_heads, int64_t rows, int64_t rows_to_split) {
    return rows < rows_to_split ? 1 : std::min(kMaxHeadGroups, num_kv_heads);
}

class GatheredKeys final : public KeySource {
  public:
    GatheredKeys(Transport& transport, const RankPlan& plan, const at::Tensor& k, const at::Tensor& v)
        : transport_(transport),
          plan_(plan),
          k_(k),
          v_(v),
          num_groups_(num_head_groups(k.size(2), plan.key_rows ? plan.key_rows->most_rows : plan.seq_len(),
                                      plan.rows_to_split_heads)),
          keys_(gather(0)) {}

    int num_groups() const override { return static_cast<int>(num_groups_); }
    int num_steps() const override { return 1; }

    HeadRange heads(int group) const override {
        const int64_t begin = k_.size(2) * group / num_groups_;
        return {begin, k_.size(2) * (group + 1) / num_groups_ - begin};
    }

    std::vector<KeyBlock> next_blocks() override {
        keys_.wait();
        const at::Tensor& order = plan_.key_rows ? plan_.key_rows->to_keys : plan_.order.to_stream;
        const at::Tensor stream = select_rows(keys_.output, 0, order).transpose(0, 1);
        keys_ = ++group_ < num_groups_ ? gather(group_) : RowTransfer{};
        stream_gradients_ = at::Tensor();
        return {{0, keys_of(stream, k_.size(3)), values_of(stream, k_.size(3))}};
    }

    KeyGradients gradients(size_t) override {
        const int64_t rows = plan_.key_rows ? plan_.key_rows->to_keys.numel() : plan_.seq_len(), d = k_.size(3);
        stream_gradients_ = at::zeros({k_.size(0), rows, heads(group_ - 1).count, d + v_.size(3)},
                                      k_.options().dtype(ops::accumulation_type(k_)));
        return {keys_of(stream_gradients_, d), values_of(stream_gradients_, d)};
    }

    void finish_step() override {
        if (!stream_gradients_.defined()) gradients(0);
        const at::Tensor& order = plan_.key_rows ? plan_.key_rows->from_keys : plan_.order.from_stream;
        const at::Tensor rows = select_rows(stream_gradients_.transpose(0, 1), 0, order);
        if (plan_.key_rows) {
            gradients_.push_back(return_gradients(transport_, *plan_.key_rows, rows));
            computed_.push_back(rows);
            return;
        }
        const at::Tensor input = rows.unflatten(0, {transport_.size(), -1});
        const at::Tensor output = at::empty(input.sizes().slice(1), input.options());
        gradients_.push_back({output, transport_.reduce_scatter_sum(input, output)});
    }

    KeyGradients own_gradients() override {
        std::vector<at::Tensor> groups;
        for (size_t group = 0; group < gradients_.size(); ++group) {
            const RowTransfer& gradient = gradients_[group];
            gradient.wait();
            const at::Tensor own = plan_.key_rows ? sum_gradients(*plan_.key_rows, computed_[group], gradient.output)
                                                  : gradient.output.narrow(0, 0, k_.size(1));  // without padding
            groups.push_back(own.transpose(0, 1));
        }
        const at::Tensor own = groups.size() == 1 ? groups[0] : at::cat(groups, 2);
        return {keys_of(own, k_.size(3)), values_of(own, k_.size(3))};
    }

  private:
    RowTransfer gather(int group) {
        const HeadRange range = heads(group);
        const auto narrow = [&](const at::Tensor& x) { return x.narrow(2, range.begin, range.count).transpose(0, 1); };
        if (plan_.key_rows) return send_key_rows(transport_, *plan_.key_rows, narrow(k_), narrow(v_));
        const at::Tensor input = plan_.order.padded(at::cat({narrow(k_), narrow(v_)}, -1));
        const at::Tensor output =
            at::empty({transport_.size(), input.size(0), input.size(1), input.size(2), input.size(3)}, input.options());
        return {output.flatten(0, 1), transport_.all_gather(input, output)};
    }

    Transport& transport_;
    const RankPlan& plan_;
    const at::Tensor k_, v_;
    const int64_t num_groups_;
    int group_ = 0;
    at::Tensor stream_gradients_;  // this rank's part
    RowTransfer keys_;
    std::vector<RowTransfer> gradients_;
    std::vector<at::Tensor> computed_;  // with key_rows, by group: this rank's part of the gradients
};

}  // namespace

std::unique_ptr<KeySource> make_gathered_keys(Transport& transport, const RankPlan& plan, const at::Tensor& k,
                                              const at::Tensor& v) {
    return std::make_unique<GatheredKeys>(transport, plan, k, v);
}

int64_t gathered_bytes(int64_t seq_len, const at::Tensor& k, const at::Tensor& v) {
    const int64_t batch = k.dim() == 4 ? k.size(0) : 1, heads = k.size(-2);
    const int64_t row_bytes = batch * heads * (k.size(-1) + v.size(-1)) * k.element_size();
    const int64_t groups = num_head_groups(heads, seq_len, kRowsToSplitHeads);
    return seq_len * row_bytes * std::min<int64_t>(2, groups) / groups;
}

}  // namespace megatron_sb::distributed
