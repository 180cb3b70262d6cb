// all_gather: every rank sees the whole stream in order, a group of KV heads at a time; the next group travels under
// this group's compute, and in the backward this group's gradients under the next one's.
#include <ATen/ATen.h>

#include "distributed/feed.h"
#include "ops/block.h"

namespace megatron_sb::distributed {
namespace {

int64_t num_head_groups(int64_t num_kv_heads, int64_t rows, int64_t rows_to_split) {
    return rows < rows_to_split ? 1 : std::min(kMaxHeadGroups, num_kv_heads);
}

// A collective with rows first, (ranks * rows, b, heads, d + d_v), that becomes (b, ...) again when it is over.
struct Collective {
    at::Tensor output;
    std::unique_ptr<Pending> pending;
};

class GatherFeed final : public KeyFeed {
  public:
    GatherFeed(Transport& transport, const RankPlan& plan, const at::Tensor& k, const at::Tensor& v)
        : transport_(transport),
          plan_(plan),
          k_(k),
          v_(v),
          num_groups_(num_head_groups(k.size(2), plan.to_stream.numel(), plan.rows_to_split_heads)),
          keys_(post(0)) {}

    int num_groups() const override { return static_cast<int>(num_groups_); }
    int num_steps() const override { return 1; }

    HeadRange heads(int group) const override {
        const int64_t begin = k_.size(2) * group / num_groups_;
        return {begin, k_.size(2) * (group + 1) / num_groups_ - begin};
    }

    std::vector<KeyBlock> take() override {
        keys_.pending->wait();
        const at::Tensor stream = select_rows(keys_.output, 0, plan_.to_stream).transpose(0, 1);
        keys_ = ++group_ < num_groups_ ? post(group_) : Collective{};
        own_ = at::Tensor();
        return {{0, keys_of(stream, k_.size(3)), values_of(stream, k_.size(3))}};
    }

    KeyGradients gradients(size_t) override {
        const int64_t rows = plan_.to_stream.numel(), d = k_.size(3);
        own_ = at::zeros({k_.size(0), rows, heads(group_ - 1).count, d + v_.size(3)},
                         k_.options().dtype(ops::accumulation_type(k_)));
        return {keys_of(own_, d), values_of(own_, d)};
    }

    void give() override {
        if (!own_.defined()) gradients(0);
        const at::Tensor input =
            select_rows(own_.transpose(0, 1), 0, plan_.from_stream).unflatten(0, {transport_.size(), -1});
        const at::Tensor output = at::empty(input.sizes().slice(1), input.options());
        gradients_.push_back({output, transport_.reduce_scatter_sum(input, output)});
    }

    KeyGradients home() override {
        std::vector<at::Tensor> groups;
        for (const Collective& gradient : gradients_) {
            gradient.pending->wait();
            groups.push_back(gradient.output.transpose(0, 1));
        }
        const at::Tensor own = at::cat(groups, 2);
        return {keys_of(own, k_.size(3)), values_of(own, k_.size(3))};
    }

  private:
    Collective post(int group) {
        const HeadRange range = heads(group);
        const auto narrow = [&](const at::Tensor& x) { return x.narrow(2, range.begin, range.count).transpose(0, 1); };
        const at::Tensor input = at::cat({narrow(k_), narrow(v_)}, -1).contiguous();
        const at::Tensor output =
            at::empty({transport_.size(), input.size(0), input.size(1), input.size(2), input.size(3)}, input.options());
        return {output.flatten(0, 1), transport_.all_gather(input, output)};
    }

    Transport& transport_;
    const RankPlan& plan_;
    const at::Tensor k_, v_;
    const int64_t num_groups_;
    int group_ = 0;
    at::Tensor own_;  // this rank's part of the gradients of the stream
    Collective keys_;
    std::vector<Collective> gradients_;
};

}  // namespace

std::unique_ptr<KeyFeed> make_gather_feed(Transport& transport, const RankPlan& plan, const at::Tensor& k,
                                          const at::Tensor& v) {
    return std::make_unique<GatherFeed>(transport, plan, k, v);
}

int64_t gather_feed_bytes(int ranks, const at::Tensor& k, const at::Tensor& v) {
    const int64_t rows = k.dim() == 4 ? k.size(1) : k.size(0);
    const int64_t groups = num_head_groups(k.size(-2), ranks * rows, kRowsToSplitHeads);
    return ranks * (k.nbytes() + v.nbytes()) * std::min<int64_t>(2, groups) / groups;
}

}  // namespace megatron_sb::distributed
