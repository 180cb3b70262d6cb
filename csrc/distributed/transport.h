// The interface to the network: an exchange of tensors between ranks and three collectives. Independent of attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace megatron_sb::distributed {

// A transfer in progress. It keeps its tensors alive until it completes.
class Pending {
  public:
    virtual ~Pending() = default;
    // On a CPU, returns after the transfer is complete. On a GPU, makes the current stream wait for the transfer.
    // Throws RuntimeFailure after the transport's timeout or if a peer is lost.
    virtual void wait() = 0;
};

struct Message {
    int peer;
    at::Tensor tensor;  // contiguous
};

// All ranks make the same calls in the same order. Messages between two ranks match in the order of the lists and of
// the calls. No rank sends to itself.
class Transport {
  public:
    virtual ~Transport() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    // The device for small tensors that the host reads.
    virtual c10::Device control_device() const = 0;

    // Sends the tensors of `sends` and fills the tensors of `receives`. Messages without elements are not sent; both
    // ranks know which these are.
    virtual std::unique_ptr<Pending> exchange(const std::vector<Message>& sends,
                                              const std::vector<Message>& receives) = 0;
    // output (size, ...): the input (...) of every rank, in the order of the ranks. Both contiguous.
    virtual std::unique_ptr<Pending> all_gather(const at::Tensor& input, const at::Tensor& output) = 0;
    // input (rows, ...): input_rows[i] rows for rank i, one rank after another. output (rows, ...): output_rows[i] rows
    // from rank i. Both contiguous.
    virtual std::unique_ptr<Pending> all_to_all(const at::Tensor& input, const std::vector<int64_t>& input_rows,
                                                const at::Tensor& output, const std::vector<int64_t>& output_rows) = 0;
    // output (...): the sum over ranks of entry rank() of their input (size, ...). Both contiguous and of one dtype,
    // in which the sum is computed: callers pass fp32 or fp64 gradients.
    virtual std::unique_ptr<Pending> reduce_scatter_sum(const at::Tensor& input, const at::Tensor& output) = 0;
};

}  // namespace megatron_sb::distributed
