// Shared by all warps of the backward: the arguments of the kernel, the ring of Q and dO, and the ring of step
// descriptions.
#pragma once

#include "kernels/hopper/bwd_plan.h"
#include "kernels/hopper/tensor_maps.h"
#include "kernels/hopper/wait.cuh"

namespace megatron_sb::hopper {

struct BackwardArguments {
    BackwardParams params;
    BackwardPlan plan;
    TensorMap q, d_o, k, v;
    int32_t heads_in_flight;  // KV heads that are processed together
    float scale, scale_log2;
    ExpiredWait* expired_wait;
};

// A stage of the ring of Q and dO, and the parity of its qdo_full barrier in this use. The parity of carry_in_full is
// the same; that of qdo_empty before this use is the other one.
struct StageCursor {
    int stage = 0, parity = 0;
    __device__ __forceinline__ StageCursor next() const {
        return stage + 1 == kQdoStages ? StageCursor{0, parity ^ 1} : StageCursor{stage + 1, parity};
    }
};

// The step loader arrives on step_info_full; the other warps of its warpgroup wait here.
__device__ __forceinline__ void wait_for_step_info(BackwardControl& c, int number) {
    mbarrier_wait(&c.step_info_full[number % kStepRing], number / kStepRing & 1);
}

}  // namespace megatron_sb::hopper
