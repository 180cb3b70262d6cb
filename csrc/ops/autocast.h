// Autocast of the attention operators.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace megatron_sb::ops {

// Boxed kernels for AutocastCPU and AutocastCUDA, the same for every attention operator.
void autocast_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void autocast_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace megatron_sb::ops
