// Programmatic dependent launch: a kernel that is launched with Start::kBeforeEnd (launch.h) starts before the kernel
// before it in the stream has ended. GPUs before Hopper do not have it; there these functions do nothing.
#pragma once

namespace megatron_sb::common {

// Lets the next kernel of the stream start, on multiprocessors with room for its CTAs, once all CTAs of this kernel
// have called this or have ended.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before this one in the stream has ended, and makes its writes visible.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace megatron_sb::common
