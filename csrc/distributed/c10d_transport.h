// The transport over a process group of torch.distributed, with any backend: gloo for CPU tensors, NCCL for CUDA
// tensors.
#pragma once

#include <memory>
#include <string>

#include "distributed/transport.h"

namespace megatron_sb::distributed {

// The group registered under `group_name` (`group.group_name` in Python). Waits obey the timeout of the group.
std::unique_ptr<Transport> c10d_transport(const std::string& group_name);

}  // namespace megatron_sb::distributed
