#include "kernels/portable/fwd_kernel.cuh"

namespace megatron_sb::portable {
template void launch_forward<Half>(const ForwardParams&, cudaStream_t);
}
