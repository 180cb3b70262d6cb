#include "kernels/hopper/fwd_kernel.cuh"

namespace megatron_sb::hopper {
template void launch_forward<__nv_bfloat16, 128, 128, false>(const ForwardParams&, cudaStream_t);
template void launch_forward<__half, 128, 128, false>(const ForwardParams&, cudaStream_t);
template void launch_forward<__nv_bfloat16, 128, 128, true>(const ForwardParams&, cudaStream_t);
template void launch_forward<__half, 128, 128, true>(const ForwardParams&, cudaStream_t);
}  // namespace megatron_sb::hopper
