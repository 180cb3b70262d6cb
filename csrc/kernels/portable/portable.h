// block_forward and block_backward of core/params.h on every GPU from sm_80 on.
#pragma once

#include "core/params.h"

namespace megatron_sb::portable {

// Return the size of params.workspace in bytes: what the forward needs, and what the backward can use. The backward
// uses at most `limit` bytes, unless it cannot run with so few.
int64_t forward_workspace(const ForwardParams& params);
int64_t backward_workspace(const BackwardParams& params, int64_t limit);

// Launch on `stream`, a cudaStream_t. Rows of q, k, v, do, o, dq, dk and dv must begin at multiples of 16 bytes. Throw
// RuntimeFailure if a launch fails.
void block_forward(const ForwardParams& params, void* stream);
void block_backward(const BackwardParams& params, void* stream);

}  // namespace megatron_sb::portable
