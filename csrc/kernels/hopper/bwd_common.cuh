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
    float scale, scale_log2;
    common::Reach reach;
    WaitRecord* wait_record;
    TensorMap q_biases, k_biases;  // with bias columns
};

// Where a step is in a ring. Most rings have a place for each step; only that of Q and dO is counted by next().
template <class T>
using Stage = Place<T::kQdoStages>;
template <class T>
using TurnPlace = Place<T::kDqTurns>;
using StepPlace = Place<kStepRing>;
template <class T>
using CarryPlace = Place<T::kCarryOutSlots>;

}  // namespace megatron_sb::hopper
