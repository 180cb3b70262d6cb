// The backward with forget gates.
#include "kernels/hopper/bwd_kernel.cuh"

namespace megatron_sb::hopper {

void launch_gated_backward(const BackwardParams& params, cudaStream_t stream) {
    launch_backward<true>(params, stream);
}

}  // namespace megatron_sb::hopper
