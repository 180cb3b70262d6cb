// The current device and stream, in CPU and CUDA builds.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(SB_WITH_CUDA)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace megatron_sb::ops {

// Compute capability times ten: 90 for sm_90.
int device_architecture(const c10::Device& device);

// Makes `device` the current device while the object lives. Launches use that device's current stream.
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
