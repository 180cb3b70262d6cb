// Properties of a process group. Its source is the only file of the operators that depends on the version of torch.
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace megatron_sb::distributed {

c10::intrusive_ptr<c10d::Store> store_of(const c10d::ProcessGroup& group);

// The shortest timeout of the group's backends. Custom backends may have no options; c10d's default holds for them.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group);

}  // namespace megatron_sb::distributed
