// block_forward of core/params.h on sm_90a: TMA, wgmma. head_dim = head_dim_v: 64 or 128; bf16 and fp16.
#pragma once

#include "core/params.h"

namespace megatron_sb::hopper {

// Bytes of workspace that the forward needs.
int64_t forward_workspace(const ForwardParams& params);

// On `stream`, a cudaStream_t. Rows of q, k, v and o begin at multiples of 16 bytes. Throws RuntimeFailure if a tensor
// map cannot be made or a launch fails.
void block_forward(const ForwardParams& params, void* stream);

}  // namespace megatron_sb::hopper
