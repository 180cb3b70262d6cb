// all_gather: every rank gets the keys of the whole stream in order, one group of KV heads at a time. The gather of the
// next group overlaps the compute of this group. In the backward, the reduce-scatter of the gradients of this group
// overlaps the compute of the next group.
#include <ATen/ATen.h>

#include "distributed/key_source.h"
#include "ops/tensors.h"

namespace megatron_sb::distributed {
namespace {

class GatheredKeys final : public KeySource {
    // Rows first: (rows, b, heads, d + d_v).
    struct Transfer {
        at::Tensor output;
        std::unique_ptr<Pending> pending;  // null: complete

        // Returns the output. Releases what was sent.
        const at::Tensor& wait() {
            if (pending) pending->wait();
            pending.reset();
            return output;
        }
    };

  public:
    GatheredKeys(Transport& transport, const RankPlan& plan, const at::Tensor& k, const at::Tensor& v)
        : transport_(transport),
          plan_(plan),
          k_(k),
          v_(v),
          num_groups_(num_head_groups(k.size(2), plan.seq_len(), plan.rows_to_split_heads)),
          keys_(gather(0)) {}

    int num_groups() const override { return static_cast<int>(num_groups_); }
    int num_steps() const override { return 1; }
    HeadRange heads(int group) const override { return head_group(k_.size(2), num_groups_, group); }

    std::vector<KeyBlock> next_blocks() override {
        const at::Tensor stream = select_rows(keys_.wait(), 0, plan_.order.to_stream).transpose(0, 1);
        keys_ = {};  // its memory serves the next gather
        keys_ = ++group_ < num_groups_ ? gather(group_) : Transfer{};
        stream_gradients_ = at::Tensor();
        return {{0, keys_of(stream, k_.size(3)), values_of(stream, k_.size(3))}};
    }

    KeyGradients gradients(size_t) override {
        const int64_t d = k_.size(3);
        stream_gradients_ = at::empty({k_.size(0), plan_.seq_len(), heads(group_ - 1).count, d + v_.size(3)},
                                      k_.options().dtype(ops::accumulation_type(k_)));
        return {keys_of(stream_gradients_, d), values_of(stream_gradients_, d)};
    }

    void finish_step() override {
        if (!stream_gradients_.defined()) {
            gradients(0);
            stream_gradients_.zero_();
        }
        if (!gradients_.empty()) gradients_.back().wait();  // only one group's gradients of the stream stay in memory
        const at::Tensor rows = select_rows(stream_gradients_.transpose(0, 1), 0, plan_.order.from_stream);
        const at::Tensor input = rows.unflatten(0, {transport_.size(), -1});
        const at::Tensor output = at::empty(input.sizes().slice(1), input.options());
        gradients_.push_back({output, transport_.reduce_scatter_sum(input, output)});
    }

    void write_own_gradients(const KeyGradients& to) override {
        for (int group = 0; group < num_groups_; ++group) {
            const at::Tensor own =
                gradients_[group].wait().narrow(0, 0, k_.size(1)).transpose(0, 1);  // without padding
            const HeadRange range = heads(group);
            to.dk.narrow(2, range.begin, range.count).copy_(keys_of(own, k_.size(3)));
            to.dv.narrow(2, range.begin, range.count).copy_(values_of(own, k_.size(3)));
        }
    }

  private:
    Transfer gather(int group) {
        const HeadRange range = heads(group);
        const auto narrow = [&](const at::Tensor& x) { return x.narrow(2, range.begin, range.count).transpose(0, 1); };
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
    Transfer keys_;
    std::vector<Transfer> gradients_;  // by group
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
