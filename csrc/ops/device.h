// The little that differs between a CPU and a CUDA build on the operators' floor.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(SB_WITH_CUDA)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace megatron_sb::ops {

// Compute capability times ten.
int device_architecture(const c10::Device& device);

// While it lives, `device` is the current one; launches go to that device's current stream.
class DeviceScope {
  public:
    explicit DeviceScope(const c10::Device& device);
    void* stream() const { return stream_; }

  private:
#if defined(SB_WITH_CUDA)
    c10::cuda::OptionalCUDAGuard guard_;
#endif
    void* stream_ = nullptr;
};

}  // namespace megatron_sb::ops
