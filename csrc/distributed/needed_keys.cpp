// all_gather and p2p, if ranks need few key rows (KeyRowPlan): every rank gets the rows that it needs, and sends their
// gradients back. The backward reads the rows that the forward has kept, or receives them again. Ranges of rows are
// sent directly from the tensor of one rank to the tensor of the other, without copies. Tensors have rows first: (rows,
// b, heads, ..).
#include <ATen/ATen.h>

#include "distributed/key_source.h"
#include "distributed/row_messages.h"
#include "ops/tensors.h"

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

class NeededKeys final : public KeySource {
    // Keys and values, or their gradients, that this rank receives.
    struct Transfer {
        Tensor k, v;
        std::unique_ptr<Pending> pending;  // null: they are here
    };

  public:
    NeededKeys(Transport& transport, const RankPlan& plan, const Tensor& k, const Tensor& v, std::vector<KeyBlock> kept)
        : transport_(transport),
          plan_(plan),
          rows_(*plan.key_rows),
          k_(k),
          v_(v),
          kept_(std::move(kept)),
          num_groups_(num_head_groups(k.size(2), rows_.most_rows, plan.rows_to_split_heads)),
          keys_(get_keys(0)) {}

    int num_groups() const override { return static_cast<int>(num_groups_); }
    int num_steps() const override { return 1; }
    HeadRange heads(int group) const override { return head_group(k_.size(2), num_groups_, group); }

    std::vector<KeyBlock> next_blocks() override {
        if (keys_.pending) keys_.pending->wait();
        std::vector<KeyBlock> blocks{{0, keys_.k.transpose(0, 1), keys_.v.transpose(0, 1)}};
        keys_ = ++group_ < num_groups_ ? get_keys(group_) : Transfer{};
        computed_.push_back({});
        return blocks;
    }

    KeyGradients gradients(size_t) override {
        const auto empty = [&](const Tensor& like) {
            return at::empty({rows_.num_rows, like.size(0), heads(group_ - 1).count, like.size(3)},
                             like.options().dtype(ops::accumulation_type(like)));
        };
        computed_.back() = {empty(k_), empty(v_)};
        return {computed_.back().dk.transpose(0, 1), computed_.back().dv.transpose(0, 1)};
    }

    void finish_step() override {
        if (!computed_.back().dk.defined()) {
            gradients(0);
            computed_.back().dk.zero_();
            computed_.back().dv.zero_();
        }
        returned_.push_back(return_gradients(computed_.back()));
    }

    void write_own_gradients(const KeyGradients& to) override {
        for (int group = 0; group < num_groups_; ++group) {
            const HeadRange range = heads(group);
            add_returned(computed_[group], returned_[group]);
            for (const plan::RowRange& rows : rows_.kept) {
                const auto write = [&](const Tensor& x, const Tensor& from) {
                    x.narrow(1, rows.local, rows.count)
                        .narrow(2, range.begin, range.count)
                        .copy_(from.narrow(0, rows.place, rows.count).transpose(0, 1));
                };
                write(to.dk, computed_[group].dk);
                write(to.dv, computed_[group].dv);
            }
        }
    }

  private:
    Transfer get_keys(int group) {
        if (!kept_.empty()) return {kept_[group].k.transpose(0, 1), kept_[group].v.transpose(0, 1), nullptr};
        const HeadRange range = heads(group);
        const auto own = [&](const Tensor& x) { return x.narrow(2, range.begin, range.count).transpose(0, 1); };
        const auto buffer = [&](const Tensor& x) {
            return at::empty({rows_.num_rows, x.size(0), range.count, x.size(3)}, x.options());
        };
        Transfer keys{buffer(k_), buffer(v_), nullptr};
        std::vector<Message> sends, receives;
        for (int rank = 0; rank < transport_.size(); ++rank) {
            for (const auto& [from, to] : {std::pair{own(k_), keys.k}, {own(v_), keys.v}}) {
                add_row_messages(sends, rank, rows_.sent[rank], &plan::RowRange::local, from);
                add_row_messages(receives, rank, rows_.received[rank], &plan::RowRange::place, to);
            }
        }
        keys.pending = transport_.exchange(sends, receives);
        for (const plan::RowRange& rows : rows_.kept) {
            keys.k.narrow(0, rows.place, rows.count).copy_(own(k_).narrow(0, rows.local, rows.count));
            keys.v.narrow(0, rows.place, rows.count).copy_(own(v_).narrow(0, rows.local, rows.count));
        }
        return keys;
    }

    // Sends the gradients of received rows to their ranks, and receives those of this rank's rows in the order of the
    // sent ranges.
    Transfer return_gradients(const KeyGradients& computed) {
        int64_t num_sent = 0;
        for (const auto& ranges : rows_.sent)
            for (const plan::RowRange& rows : ranges) num_sent += rows.count;
        const auto buffer = [&](const Tensor& x) {
            return at::empty({num_sent, x.size(1), x.size(2), x.size(3)}, x.options());
        };
        Transfer returned{buffer(computed.dk), buffer(computed.dv), nullptr};
        std::vector<Message> sends, receives;
        for (const auto& [from, to] : {std::pair{computed.dk, returned.k}, {computed.dv, returned.v}}) {
            int64_t begin = 0;
            for (int rank = 0; rank < transport_.size(); ++rank) {
                add_row_messages(sends, rank, rows_.received[rank], &plan::RowRange::place, from);
                for (const plan::RowRange& rows : rows_.sent[rank]) {
                    receives.push_back({rank, to.narrow(0, begin, rows.count)});
                    begin += rows.count;
                }
            }
        }
        returned.pending = transport_.exchange(sends, receives);
        return returned;
    }
    // Adds them to this rank's own part, in the order of the ranks.
    void add_returned(const KeyGradients& computed, const Transfer& returned) const {
        returned.pending->wait();
        int64_t begin = 0;
        for (const auto& ranges : rows_.sent) {
            for (const plan::RowRange& rows : ranges) {
                computed.dk.narrow(0, rows.place, rows.count).add_(returned.k.narrow(0, begin, rows.count));
                computed.dv.narrow(0, rows.place, rows.count).add_(returned.v.narrow(0, begin, rows.count));
                begin += rows.count;
            }
        }
    }

    Transport& transport_;
    const RankPlan& plan_;
    const KeyRowPlan& rows_;
    const Tensor k_, v_;
    const std::vector<KeyBlock> kept_;
    const int64_t num_groups_;
    int group_ = 0;
    Transfer keys_;
    std::vector<KeyGradients> computed_;  // by group: of the key buffer, this rank's part
    std::vector<Transfer> returned_;      // by group: of this rank's rows, the other ranks' parts
};

}  // namespace

std::unique_ptr<KeySource> make_needed_keys(Transport& transport, const RankPlan& plan, const Tensor& k,
                                            const Tensor& v, std::vector<KeyBlock> kept) {
    return std::make_unique<NeededKeys>(transport, plan, k, v, std::move(kept));
}

}  // namespace megatron_sb::distributed
