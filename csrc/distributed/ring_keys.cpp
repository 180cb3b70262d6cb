// p2p: in each step, each lane moves its chunk of keys to the neighbouring rank (plan/schedule.h). In the backward, the
// gradients of a chunk follow one step later, so their transfer overlaps the compute of a step too. The last step of
// the backward has this rank's own keys, which need no transfer.
#include <ATen/ATen.h>

#include "distributed/key_source.h"
#include "ops/tensors.h"

namespace megatron_sb::distributed {
namespace {

class RingKeys final : public KeySource {
    // Tensors that this rank receives, one for each lane.
    struct Transfer {
        std::vector<at::Tensor> tensors;
        std::unique_ptr<Pending> pending;  // null: complete

        // Returns the tensors once, and later nothing.
        std::vector<at::Tensor> wait() {
            if (pending) pending->wait();
            pending.reset();
            return std::move(tensors);
        }
    };

  public:
    RingKeys(Transport& transport, const RankPlan& plan, plan::Pass pass, const at::Tensor& k, const at::Tensor& v)
        : transport_(transport), plan_(plan), pass_(pass), k_(k), v_(v), wide_(ops::accumulation_type(k)) {
        if (at_home()) return;
        std::vector<at::Tensor> own;
        for (const RowSet& rows : plan.lanes) own.push_back(at::cat({rows.read(k), rows.read(v)}, -1).contiguous());
        // The backward starts one exchange away from the home rank, so that the gradients end there.
        keys_ = pass == plan::Pass::kForward ? Transfer{std::move(own), nullptr} : rotate(own, 0);
    }

    int num_groups() const override { return 1; }
    int num_steps() const override { return plan_.schedule.num_steps(); }
    HeadRange heads(int) const override { return {0, k_.size(2)}; }

    std::vector<KeyBlock> next_blocks() override {
        const std::vector<at::Tensor> arrived = keys_.wait();  // empty at home
        std::vector<KeyBlock> blocks;
        for (int lane = 0; lane < plan_.schedule.num_lanes(); ++lane) {
            const int chunk = plan_.schedule.chunk(lane, pass_, plan_.rank, step_);
            const RowSet& own = plan_.lanes[lane];
            blocks.push_back(at_home() ? KeyBlock{chunk, own.read(k_), own.read(v_)}
                                       : KeyBlock{chunk, keys_of(arrived[lane], d()), values_of(arrived[lane], d())});
        }
        own_gradients_ = std::vector<at::Tensor>(blocks.size());
        if (++step_ < num_steps() && !at_home()) keys_ = rotate(arrived, step_);
        return blocks;
    }

    // Called after next_blocks(), so step_ is one step ahead.
    KeyGradients gradients(size_t lane) override {
        const int64_t rows = rows_of(static_cast<int>(lane), step_ - 1);
        own_gradients_[lane] = at::empty({k_.size(0), rows, k_.size(2), d() + v_.size(3)}, k_.options().dtype(wide_));
        return {keys_of(own_gradients_[lane], d()), values_of(own_gradients_[lane], d())};
    }

    void finish_step() override {
        const std::vector<at::Tensor> received = gradients_.wait();  // empty at the first step
        for (size_t lane = 0; lane < own_gradients_.size(); ++lane) {
            at::Tensor& own = own_gradients_[lane];
            if (!received.empty()) {
                own = own.defined() ? own.add_(received[lane]) : received[lane];
            } else if (!own.defined()) {
                gradients(lane);
                own.zero_();
            }
        }
        gradients_ = step_ < num_steps() ? rotate(own_gradients_, step_) : Transfer{own_gradients_, nullptr};
    }

    void write_own_gradients(const KeyGradients& to) override {
        const std::vector<at::Tensor> own = gradients_.wait();
        for (size_t lane = 0; lane < own.size(); ++lane) {
            plan_.lanes[lane].write(to.dk, keys_of(own[lane], d()));
            plan_.lanes[lane].write(to.dv, values_of(own[lane], d()));
        }
    }

  private:
    int64_t d() const { return k_.size(3); }
    bool at_home() const { return pass_ == plan::Pass::kBackward && step_ + 1 == num_steps(); }

    // The rows of the chunk of a lane that this rank holds during a step.
    int64_t rows_of(int lane, int step) const {
        return plan_.chunk_rows[plan_.schedule.chunk(lane, pass_, plan_.rank, step)];
    }

    // Sends the tensor of each lane to the next rank and receives that of the previous rank, which is for the chunk of
    // `step`. With one rank, returns `tensors`.
    Transfer rotate(const std::vector<at::Tensor>& tensors, int step) {
        if (transport_.size() == 1) return {tensors, nullptr};
        Transfer transfer;
        std::vector<Message> sends, receives;
        for (int lane = 0; lane < plan_.schedule.num_lanes(); ++lane) {
            std::vector<int64_t> sizes = tensors[lane].sizes().vec();
            sizes[1] = rows_of(lane, step);
            transfer.tensors.push_back(at::empty(sizes, tensors[lane].options()));
            sends.push_back({plan_.schedule.next_rank(lane, pass_, plan_.rank), tensors[lane]});
            receives.push_back({plan_.schedule.previous_rank(lane, pass_, plan_.rank), transfer.tensors[lane]});
        }
        transfer.pending = transport_.exchange(sends, receives);
        return transfer;
    }

    Transport& transport_;
    const RankPlan& plan_;
    const plan::Pass pass_;
    const at::Tensor k_, v_;
    const at::ScalarType wide_;  // the accumulation type
    int step_ = 0;
    std::vector<at::Tensor> own_gradients_;  // this rank's part of their gradients, by lane
    Transfer keys_, gradients_;
};

}  // namespace

std::unique_ptr<KeySource> make_ring_keys(Transport& transport, const RankPlan& plan, plan::Pass pass,
                                          const at::Tensor& k, const at::Tensor& v) {
    return std::make_unique<RingKeys>(transport, plan, pass, k, v);
}

}  // namespace megatron_sb::distributed
