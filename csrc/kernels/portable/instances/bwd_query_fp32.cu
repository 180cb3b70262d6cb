#include "kernels/portable/bwd_query_kernel.cuh"

namespace megatron_sb::portable {
template void launch_query_pass<float>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
}
