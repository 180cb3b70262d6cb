#include "distributed/c10d_transport.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/error.h"

namespace megatron_sb::distributed {
namespace {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// Returns " 1 2" for messages with ranks 1, 1 and 2.
std::string peers_of(const std::vector<Message>& messages) {
    std::set<int> peers;
    for (const Message& message : messages) peers.insert(message.peer);
    std::string text;
    for (const int peer : peers) text += concat(" ", peer);
    return text;
}

bool all_equal(const std::vector<int64_t>& values) {
    return std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) == values.end();
}

class C10dPending final : public Pending {
  public:
    C10dPending(std::string what, Works works, std::vector<at::Tensor> tensors)
        : what_(std::move(what)), works_(std::move(works)), tensors_(std::move(tensors)) {}

    void wait() override {
        guard(what_, [this] {
            for (const auto& work : works_) work->wait();
        });
        tensors_.clear();
    }

  private:
    std::string what_;
    Works works_;
    std::vector<at::Tensor> tensors_;
};

std::vector<Message> not_empty(std::vector<Message> messages) {
    std::erase_if(messages, [](const Message& message) { return message.tensor.numel() == 0; });
    return messages;
}

class C10dTransport final : public Transport {
  public:
    explicit C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

    int rank() const override { return group_->getRank(); }
    int size() const override { return group_->getSize(); }

    c10::Device control_device() const override {
        const std::vector<c10::Device> devices = group_->getDeviceTypes();
        for (const c10::Device& device : devices) {
            if (device.is_cpu()) return device;
        }
        return c10::impl::VirtualGuardImpl(devices.at(0).type()).getDevice();
    }

    std::unique_ptr<Pending> exchange(const std::vector<Message>& sends,
                                      const std::vector<Message>& receives) override {
        const std::vector<Message> sent = not_empty(sends), received = not_empty(receives);
        std::vector<at::Tensor> tensors;
        for (const Message& send : sent) tensors.push_back(send.tensor);
        for (const Message& receive : received) tensors.push_back(receive.tensor);
        return post(concat("exchange, sending to", peers_of(sent), ", receiving from", peers_of(received)),
                    std::move(tensors), [&](Works& works) { post_messages(sent, received, works); });
    }

    std::unique_ptr<Pending> all_gather(const at::Tensor& input, const at::Tensor& output) override {
        return post("all_gather", {input, output}, [&](Works& works) {
            at::Tensor from = input, to = output.flatten(0, 1);  // gloo needs this shape
            works.push_back(group_->_allgather_base(to, from));
        });
    }

    std::unique_ptr<Pending> all_to_all(const at::Tensor& input, const std::vector<int64_t>& input_rows,
                                        const at::Tensor& output, const std::vector<int64_t>& output_rows) override {
        return post("all_to_all", {input, output}, [&](Works& works) {
            at::Tensor from = input, to = output;
            const bool even = all_equal(input_rows) && all_equal(output_rows);  // on all ranks alike
            std::vector<int64_t> to_rows = output_rows, from_rows = input_rows, none;
            works.push_back(group_->alltoall_base(to, from, even ? none : to_rows, even ? none : from_rows));
        });
    }

    std::unique_ptr<Pending> reduce_scatter_sum(const at::Tensor& input, const at::Tensor& output) override {
        return post("reduce_scatter", {input, output}, [&](Works& works) {
            at::Tensor from = input.flatten(0, 1), to = output;
            works.push_back(group_->_reduce_scatter_base(to, from));
        });
    }

  private:
    // The tag of a message is its index among the messages of the list with the same peer. NCCL has no tags: it matches
    // the messages of a coalesced group in order.
    void post_messages(const std::vector<Message>& sends, const std::vector<Message>& receives, Works& works) {
        if (sends.empty() && receives.empty()) return;
        const c10::DeviceType device = (sends.empty() ? receives : sends).at(0).tensor.device().type();
        if (!group_->getBackend(device)->supportsCoalescing()) return post_each(sends, receives, works);
        group_->startCoalescing(device);
        try {
            post_each(sends, receives, works);
        } catch (...) {
            end_failed_coalescing(device);
            throw;
        }
        works = {group_->endCoalescing(device)};
    }

    void post_each(const std::vector<Message>& sends, const std::vector<Message>& receives, Works& works) {
        std::vector<int> num_sent(size(), 0), num_received(size(), 0);
        for (const Message& send : sends) {
            std::vector<at::Tensor> tensor{send.tensor};
            works.push_back(group_->send(tensor, send.peer, num_sent[send.peer]++));
        }
        for (const Message& receive : receives) {
            std::vector<at::Tensor> tensor{receive.tensor};
            works.push_back(group_->recv(tensor, receive.peer, num_received[receive.peer]++));
        }
    }

    // Otherwise NCCL would add every later operation of this thread to the group of messages.
    void end_failed_coalescing(c10::DeviceType device) {
        try {
            group_->endCoalescing(device);
        } catch (const std::exception&) {  // the first error is reported
        }
    }

    template <class Post>
    std::unique_ptr<Pending> post(std::string what, std::vector<at::Tensor> tensors, const Post& post) {
        what = concat("context parallelism, rank ", rank(), " of ", size(), ": ", what);
        Works works;
        guard(what, [&] { post(works); });
        return std::make_unique<C10dPending>(std::move(what), std::move(works), std::move(tensors));
    }

    c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace

void guard(const std::string& what, c10::function_ref<void()> call) {
    try {
        call();
    } catch (const c10::Error& error) {
        throw RuntimeFailure(concat(what, " failed: ", error.what_without_backtrace()));
    } catch (const std::exception& error) {
        throw RuntimeFailure(concat(what, " failed: ", error.what()));
    }
}

std::unique_ptr<Transport> c10d_transport(const std::string& group_name) {
    return std::make_unique<C10dTransport>(c10d::resolve_process_group(group_name));
}

void connect(const std::string& group_name, c10::Device device) {
    if (device.is_cpu()) return;
    static std::mutex mutex;
    static std::vector<std::pair<c10::weak_intrusive_ptr<c10d::ProcessGroup>, c10::Device>> connected;
    const auto group = c10d::resolve_process_group(group_name);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        std::erase_if(connected, [](const auto& entry) { return entry.first.expired(); });
        const auto is_same = [&](const auto& entry) { return entry.first.lock() == group && entry.second == device; };
        if (std::any_of(connected.begin(), connected.end(), is_same)) return;
    }
    guard("context parallelism: connecting the ranks of a group", [&] {
        std::vector<at::Tensor> sum{at::zeros({1}, device)};
        group->allreduce(sum)->wait();
    });
    const std::lock_guard<std::mutex> lock(mutex);
    connected.emplace_back(group, device);
}

}  // namespace megatron_sb::distributed
