// The block contract of core/params.h on sm_90a: TMA, wgmma. head_dim = head_dim_v: 64 or 128; bf16 and fp16.
#pragma once

#include "core/params.h"

namespace megatron_sb::hopper {

// Bytes of workspace that they need. O(L) for the backward, whatever the limit.
int64_t forward_workspace(const ForwardParams& params);
int64_t backward_workspace(const BackwardParams& params, int64_t limit);

// On `stream`, a cudaStream_t. Rows of q, k, v, o and do begin at multiples of 16 bytes. Throws RuntimeFailure if a
// tensor map cannot be made or a launch fails.
void block_forward(const ForwardParams& params, void* stream);
void block_backward(const BackwardParams& params, void* stream);

}  // namespace megatron_sb::hopper
