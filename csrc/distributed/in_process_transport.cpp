#include "distributed/in_process_transport.h"

#include <ATen/ATen.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

#include "core/error.h"

namespace megatron_sb::distributed {

// What was sent and not yet received, by (from, to).
class Mailboxes {
  public:
    Mailboxes(int size, std::chrono::milliseconds timeout) : size_(size), timeout_(timeout) {}

    int size() const { return size_; }

    void put(int from, int to, const at::Tensor& tensor) {
        const std::lock_guard<std::mutex> lock(mutex_);
        boxes_[{from, to}].push_back(tensor.clone());
        changed_.notify_all();
    }

    at::Tensor take(int from, int to) {
        std::unique_lock<std::mutex> lock(mutex_);
        std::deque<at::Tensor>& box = boxes_[{from, to}];
        if (!changed_.wait_for(lock, timeout_, [&] { return !box.empty(); })) {
            throw RuntimeFailure(
                concat("rank ", to, " of ", size_, " waited ", timeout_.count(), " ms for rank ", from));
        }
        at::Tensor tensor = box.front();
        box.pop_front();
        return tensor;
    }

  private:
    const int size_;
    const std::chrono::milliseconds timeout_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::pair<int, int>, std::deque<at::Tensor>> boxes_;
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
        : mailboxes_(std::move(mailboxes)), rank_(rank) {}

    int rank() const override { return rank_; }
    int size() const override { return mailboxes_->size(); }
    c10::Device control_device() const override { return at::kCPU; }

    std::unique_ptr<Pending> exchange(const std::vector<Message>& sends,
                                      const std::vector<Message>& receives) override {
        for (const Message& send : sends) mailboxes_->put(rank_, send.peer, send.tensor);
        return std::make_unique<InProcessPending>([this, receives] {
            for (const Message& receive : receives) receive.tensor.copy_(checked(receive.peer, receive.tensor));
        });
    }

    std::unique_ptr<Pending> all_gather(const at::Tensor& input, const at::Tensor& output) override {
        for (int peer = 0; peer < size(); ++peer) mailboxes_->put(rank_, peer, input);
        return std::make_unique<InProcessPending>([this, output] {
            for (int peer = 0; peer < size(); ++peer) output[peer].copy_(checked(peer, output[peer]));
        });
    }

    std::unique_ptr<Pending> reduce_scatter_sum(const at::Tensor& input, const at::Tensor& output) override {
        for (int peer = 0; peer < size(); ++peer) mailboxes_->put(rank_, peer, input[peer]);
        return std::make_unique<InProcessPending>([this, output] {
            output.zero_();
            for (int peer = 0; peer < size(); ++peer) output.add_(checked(peer, output));
        });
    }

  private:
    at::Tensor checked(int from, const at::Tensor& expected) {
        at::Tensor tensor = mailboxes_->take(from, rank_);
        if (tensor.sizes() != expected.sizes() || tensor.scalar_type() != expected.scalar_type()) {
            throw RuntimeFailure(concat("rank ", rank_, " got ", tensor.toString(), " ", tensor.sizes(), " from rank ",
                                        from, " and expected ", expected.toString(), " ", expected.sizes()));
        }
        return tensor;
    }

    std::shared_ptr<Mailboxes> mailboxes_;
    int rank_;
};

}  // namespace

InProcessGroup::InProcessGroup(int size, std::chrono::milliseconds timeout)
    : mailboxes_(std::make_shared<Mailboxes>(size, timeout)) {}

std::unique_ptr<Transport> InProcessGroup::transport(int rank) const {
    return std::make_unique<InProcessTransport>(mailboxes_, rank);
}

}  // namespace megatron_sb::distributed
