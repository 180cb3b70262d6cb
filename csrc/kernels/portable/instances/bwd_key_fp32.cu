#include "kernels/portable/bwd_key_kernel.cuh"

namespace megatron_sb::portable {
template void launch_key_pass<float>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
}
