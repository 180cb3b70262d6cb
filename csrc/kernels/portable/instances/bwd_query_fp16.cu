#include "kernels/portable/bwd_query_kernel.cuh"

namespace megatron_sb::portable {
template void launch_query_pass<Half>(const BackwardParams&, const BackwardPlan&, cudaStream_t);
}
