#include "distributed/in_process_transport.h"

#include <ATen/ATen.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "core/error.h"

namespace megatron_sb::distributed {

// Messages that were sent and not yet received, by (from, to, index among the messages between these two ranks).
class Mailboxes {
  public:
    Mailboxes(int size, std::chrono::milliseconds timeout) : size_(size), timeout_(timeout) {}

    int size() const { return size_; }

    void put(int from, int to, int64_t number, const at::Tensor& tensor) {
        const std::lock_guard<std::mutex> lock(mutex_);
        boxes_[{from, to, number}] = tensor.clone();
        changed_.notify_all();
    }

    at::Tensor take(int from, int to, int64_t number) {
        std::unique_lock<std::mutex> lock(mutex_);
        const std::tuple<int, int, int64_t> box{from, to, number};
        if (!changed_.wait_for(lock, timeout_, [&] { return boxes_.count(box) > 0; })) {
            throw RuntimeFailure(
                concat("rank ", to, " of ", size_, " waited ", timeout_.count(), " ms for rank ", from));
        }
        return boxes_.extract(box).mapped();
    }

  private:
    const int size_;
    const std::chrono::milliseconds timeout_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::tuple<int, int, int64_t>, at::Tensor> boxes_;
};

namespace {

class InProcessPending final : public Pending {
  public:
    explicit InProcessPending(std::function<void()> receive) : receive_(std::move(receive)) {}
    void wait() override { receive_(); }

  private:
    std::function<void()> receive_;
};

class InProcessTransport final : public Transport {
  public:
    InProcessTransport(std::shared_ptr<Mailboxes> mailboxes, int rank)
        : mailboxes_(std::move(mailboxes)),
          rank_(rank),
          num_sent_(mailboxes_->size(), 0),
          num_expected_(mailboxes_->size(), 0) {}

    int rank() const override { return rank_; }
    int size() const override { return mailboxes_->size(); }
    c10::Device control_device() const override { return at::kCPU; }

    std::unique_ptr<Pending> exchange(const std::vector<Message>& sends,
                                      const std::vector<Message>& receives) override {
        for (const Message& send : sends) put(send.peer, send.tensor);
        std::vector<std::function<at::Tensor()>> boxes;
        for (const Message& receive : receives) boxes.push_back(expect(receive.peer, receive.tensor));
        return std::make_unique<InProcessPending>([receives, boxes] {
            for (size_t i = 0; i < receives.size(); ++i) receives[i].tensor.copy_(boxes[i]());
        });
    }

    std::unique_ptr<Pending> all_gather(const at::Tensor& input, const at::Tensor& output) override {
        for (int peer = 0; peer < size(); ++peer) put(peer, input);
        return receive_from_all(output.unbind());
    }

    std::unique_ptr<Pending> all_to_all(const at::Tensor& input, const std::vector<int64_t>& input_rows,
                                        const at::Tensor& output, const std::vector<int64_t>& output_rows) override {
        const std::vector<at::Tensor> from = input.split_with_sizes(input_rows);
        for (int peer = 0; peer < size(); ++peer) put(peer, from[peer]);
        return receive_from_all(output.split_with_sizes(output_rows));
    }

    std::unique_ptr<Pending> reduce_scatter_sum(const at::Tensor& input, const at::Tensor& output) override {
        std::vector<std::function<at::Tensor()>> boxes;
        for (int peer = 0; peer < size(); ++peer) put(peer, input[peer]);
        for (int peer = 0; peer < size(); ++peer) boxes.push_back(expect(peer, output));
        return std::make_unique<InProcessPending>([boxes, output] {
            output.zero_();
            for (const auto& box : boxes) output.add_(box());
        });
    }

  private:
    void put(int peer, const at::Tensor& tensor) { mailboxes_->put(rank_, peer, num_sent_[peer]++, tensor); }

    // Reserves the next message from a rank. The returned function waits for it.
    std::function<at::Tensor()> expect(int from, const at::Tensor& like) {
        return [this, from, like, number = num_expected_[from]++] {
            const at::Tensor tensor = mailboxes_->take(from, rank_, number);
            if (tensor.sizes() != like.sizes() || tensor.scalar_type() != like.scalar_type()) {
                throw RuntimeFailure(concat("rank ", rank_, " got ", tensor.toString(), " ", tensor.sizes(),
                                            " from rank ", from, " and expected ", like.toString(), " ", like.sizes()));
            }
            return tensor;
        };
    }

    std::unique_ptr<Pending> receive_from_all(const std::vector<at::Tensor>& outputs) {
        std::vector<std::function<at::Tensor()>> boxes;
        for (int peer = 0; peer < size(); ++peer) boxes.push_back(expect(peer, outputs[peer]));
        return std::make_unique<InProcessPending>([boxes, outputs] {
            for (size_t peer = 0; peer < boxes.size(); ++peer) outputs[peer].copy_(boxes[peer]());
        });
    }

    std::shared_ptr<Mailboxes> mailboxes_;
    int rank_;
    std::vector<int64_t> num_sent_, num_expected_;  // by peer
};

}  // namespace

InProcessGroup::InProcessGroup(int size, std::chrono::milliseconds timeout)
    : mailboxes_(std::make_shared<Mailboxes>(size, timeout)) {}

std::unique_ptr<Transport> InProcessGroup::transport(int rank) const {
    return std::make_unique<InProcessTransport>(mailboxes_, rank);
}

}  // namespace megatron_sb::distributed
