// What the attention needs of a network: ranks exchange tensors, and three collectives. Nothing here knows
// attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace megatron_sb::distributed {

// A transfer under way. It holds its tensors until it ends.
class Pending {
  public:
    virtual ~Pending() = default;
    // Returns when the transfer is complete; on a device, when the current stream has been told to wait for it. Throws
    // RuntimeFailure after the transport's time-out, or when a peer is lost.
    virtual void wait() = 0;
};

struct Message {
    int peer;
    at::Tensor tensor;  // contiguous
};

// Every call is made by all ranks in the same order. Sends and receives between two ranks are matched in the order of
// the lists and, over several calls, first to first. No rank sends to itself.
class Transport {
  public:
    virtual ~Transport() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    // Where small tensors of the host's concern may travel.
    virtual c10::Device control_device() const = 0;

    virtual std::unique_ptr<Pending> exchange(const std::vector<Message>& sends,
                                              const std::vector<Message>& receives) = 0;
    // output (size, ...) in the order of the ranks, for input (...); both contiguous.
    virtual std::unique_ptr<Pending> all_gather(const at::Tensor& input, const at::Tensor& output) = 0;
    // output (size, ...): what each rank has at this rank's place of its input (size, ...); both contiguous.
    virtual std::unique_ptr<Pending> all_to_all(const at::Tensor& input, const at::Tensor& output) = 0;
    // output (...) = the sum over ranks of their input (size, ...) at this rank's place; both contiguous, in the
    // input's type, which is fp32 or fp64 wherever gradients are summed.
    virtual std::unique_ptr<Pending> reduce_scatter_sum(const at::Tensor& input, const at::Tensor& output) = 0;
};

}  // namespace megatron_sb::distributed
