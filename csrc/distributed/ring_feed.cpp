// p2p: a chunk of each lane moves from neighbour to neighbour (plan/schedule.h), and in the backward its gradients
// follow one step behind, so that they too travel under a step's compute.
#include <ATen/ATen.h>

#include "distributed/feed.h"
#include "ops/block.h"

namespace megatron_sb::distributed {
namespace {

// Tensors on their way to this rank, one for each lane.
struct Shipment {
    std::vector<at::Tensor> tensors;
    std::unique_ptr<Pending> pending;  // none: they are here

    std::vector<at::Tensor> arrive() {
        if (pending) pending->wait();
        return std::move(tensors);
    }
};

class RingFeed final : public KeyFeed {
  public:
    RingFeed(Transport& transport, const RankPlan& plan, plan::Pass pass, const at::Tensor& k, const at::Tensor& v)
        : transport_(transport),
          plan_(plan),
          pass_(pass),
          num_heads_(k.size(2)),
          d_(k.size(3)),
          wide_(ops::accumulation_type(k)) {
        std::vector<at::Tensor> own;
        for (const RowSet& rows : plan.lanes) own.push_back(at::cat({rows.of(k), rows.of(v)}, -1).contiguous());
        keys_ = pass == plan::Pass::kForward ? Shipment{std::move(own), nullptr} : ship(own);
    }

    int num_groups() const override { return 1; }
    int num_steps() const override { return plan_.schedule.num_steps(); }
    HeadRange heads(int) const override { return {0, num_heads_}; }

    std::vector<KeyBlock> take() override {
        current_ = keys_.arrive();
        std::vector<KeyBlock> blocks;
        for (int lane = 0; lane < plan_.schedule.num_lanes(); ++lane) {
            blocks.push_back({plan_.schedule.chunk(lane, pass_, plan_.rank, step_), keys_of(current_[lane], d_),
                              values_of(current_[lane], d_)});
        }
        own_ = std::vector<at::Tensor>(blocks.size());
        if (++step_ < num_steps()) keys_ = ship(current_);
        return blocks;
    }

    KeyGradients gradients(size_t lane) override {
        own_[lane] = at::zeros(current_[lane].sizes(), current_[lane].options().dtype(wide_));
        return {keys_of(own_[lane], d_), values_of(own_[lane], d_)};
    }

    void give() override {
        const std::vector<at::Tensor> others = gradients_.arrive();
        for (size_t lane = 0; lane < own_.size(); ++lane) {
            at::Tensor& own = own_[lane];
            if (others.empty()) {
                if (!own.defined()) gradients(lane);
            } else {
                own = own.defined() ? own.add_(others[lane]) : others[lane];
            }
        }
        gradients_ = step_ < num_steps() ? ship(own_) : Shipment{own_, nullptr};
    }

    KeyGradients home() override {
        const std::vector<at::Tensor> own = gradients_.arrive();
        const int64_t rows = own[0].size(1) * static_cast<int64_t>(own.size());
        const at::Tensor local = at::empty({own[0].size(0), rows, own[0].size(2), own[0].size(3)}, own[0].options());
        for (size_t lane = 0; lane < own.size(); ++lane) plan_.lanes[lane].put(local, own[lane]);
        return {keys_of(local, d_), values_of(local, d_)};
    }

  private:
    // Sends each lane's tensor on and receives the next one. A ring of one rank has nothing to move.
    Shipment ship(const std::vector<at::Tensor>& tensors) {
        if (transport_.size() == 1) return {tensors, nullptr};
        Shipment shipment;
        std::vector<Message> sends, receives;
        for (int lane = 0; lane < plan_.schedule.num_lanes(); ++lane) {
            shipment.tensors.push_back(at::empty_like(tensors[lane]));
            sends.push_back({plan_.schedule.next_rank(lane, pass_, plan_.rank), tensors[lane]});
            receives.push_back({plan_.schedule.previous_rank(lane, pass_, plan_.rank), shipment.tensors[lane]});
        }
        shipment.pending = transport_.exchange(sends, receives);
        return shipment;
    }

    Transport& transport_;
    const RankPlan& plan_;
    const plan::Pass pass_;
    const int64_t num_heads_, d_;
    const at::ScalarType wide_;
    int step_ = 0;
    std::vector<at::Tensor> current_, own_;  // by lane: keys and values, and this rank's part of their gradients
    Shipment keys_, gradients_;
};

}  // namespace

std::unique_ptr<KeyFeed> make_ring_feed(Transport& transport, const RankPlan& plan, plan::Pass pass,
                                        const at::Tensor& k, const at::Tensor& v) {
    return std::make_unique<RingFeed>(transport, plan, pass, k, v);
}

}  // namespace megatron_sb::distributed
