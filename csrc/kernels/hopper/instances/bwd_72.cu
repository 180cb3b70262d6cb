#include "kernels/hopper/bwd_kernel.cuh"

namespace megatron_sb::hopper {
template void launch_backward<__nv_bfloat16, 72, 64, false>(const BackwardParams&, cudaStream_t);
template void launch_backward<__half, 72, 64, false>(const BackwardParams&, cudaStream_t);
template void launch_backward<__nv_bfloat16, 72, 64, true>(const BackwardParams&, cudaStream_t);
template void launch_backward<__half, 72, 64, true>(const BackwardParams&, cudaStream_t);
}  // namespace megatron_sb::hopper
