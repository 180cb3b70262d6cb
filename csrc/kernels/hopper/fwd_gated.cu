// The forward with forget gates.
#include "kernels/hopper/fwd_kernel.cuh"

namespace megatron_sb::hopper {

void launch_gated_forward(const ForwardParams& params, cudaStream_t stream) {
    launch_forward<true>(params, stream);
}

}  // namespace megatron_sb::hopper
