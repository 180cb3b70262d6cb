// block_forward and block_backward of core/params.h on any GPU from sm_80 on.
#pragma once

#include "core/params.h"

namespace megatron_sb::portable {

// Bytes of workspace: what the forward needs; what the backward can use, `limit` at most unless the least it can work
// with is more.
int64_t forward_workspace(const ForwardParams& params);
int64_t backward_workspace(const BackwardParams& params, int64_t limit);

// On `stream`, a cudaStream_t. Rows of q, k, v and do begin at multiples of 16 bytes, those of o, dq, dk and dv too.
// Throws RuntimeFailure if a launch fails.
void block_forward(const ForwardParams& params, void* stream);
void block_backward(const BackwardParams& params, void* stream);

}  // namespace megatron_sb::portable
