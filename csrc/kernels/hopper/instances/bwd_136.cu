#include "kernels/hopper/bwd_kernel.cuh"

namespace megatron_sb::hopper {
template void launch_backward<__nv_bfloat16, 136, 128, false>(const BackwardParams&, cudaStream_t);
template void launch_backward<__half, 136, 128, false>(const BackwardParams&, cudaStream_t);
template void launch_backward<__nv_bfloat16, 136, 128, true>(const BackwardParams&, cudaStream_t);
template void launch_backward<__half, 136, 128, true>(const BackwardParams&, cudaStream_t);
}  // namespace megatron_sb::hopper
