// Two streams for computations that do not depend on each other.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <vector>

namespace megatron_sb::ops {

// Calls first() and second(). On a GPU, second() has a stream of its own as the current stream, so that thread blocks
// of its kernels fill the GPU while the last ones of first() end. Events order the streams: second() begins after all
// work that the current stream has at the call, and what the current stream gets afterwards begins after the work of
// both.
//
// second() must return two kinds of tensors: those that it makes and that later work reads, and those that its own work
// reads and of which it drops the last reference. The allocator then reuses their memory only after this work is
// complete.
void side_by_side(c10::Device device, c10::function_ref<void()> first,
                  c10::function_ref<std::vector<at::Tensor>()> second);

}  // namespace megatron_sb::ops
