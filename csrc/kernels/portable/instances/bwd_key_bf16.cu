#include "kernels/portable/bwd_key_kernel.cuh"

namespace megatron_sb::portable {
template void launch_key_pass<BFloat16>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
}
