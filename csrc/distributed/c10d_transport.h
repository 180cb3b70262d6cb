// The transport over a process group of torch.distributed, with any backend: gloo for CPU tensors, NCCL for CUDA
// tensors.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <string>

#include "distributed/transport.h"

namespace megatron_sb::distributed {

// The group registered under `group_name` (`group.group_name` in Python). Waits obey the timeout of the group.
std::unique_ptr<Transport> c10d_transport(const std::string& group_name);

// Connects the ranks of a group on this device, once; every rank calls it. NCCL connects the ranks of a group at its
// first operation, in which all of them must take part, but a rank without messages takes no part in an exchange.
void connect(const std::string& group_name, c10::Device device);

// Runs `call`. An exception becomes a RuntimeFailure that names the operation `what`.
void guard(const std::string& what, c10::function_ref<void()> call);

}  // namespace megatron_sb::distributed
