#include "ops/device.h"

#include <ATen/ATen.h>

#if defined(SB_WITH_CUDA)
#include <ATen/cuda/CUDAContext.h>
#endif

namespace megatron_sb::ops {

int device_architecture(const c10::Device& device) {
#if defined(SB_WITH_CUDA)
    const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
    return properties->major * 10 + properties->minor;
#else
    (void)device;
    return 0;
#endif
}

DeviceScope::DeviceScope(const c10::Device& device) {
#if defined(SB_WITH_CUDA)
    if (!device.is_cuda()) return;
    guard_.set_device(device);
    stream_ = c10::cuda::getCurrentCUDAStream(device.index()).stream();
#else
    (void)device;
#endif
}

}  // namespace megatron_sb::ops
