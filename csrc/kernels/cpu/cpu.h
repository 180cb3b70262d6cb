// The CPU kernels: block_forward and block_backward of core/params.h on raw pointers.
#pragma once

#include <vector>

#include "core/params.h"

namespace megatron_sb::cpu {

// An instruction set for which the kernels are compiled (levels.h).
struct Level;

// Returns the levels that this machine supports, the fastest first.
std::vector<const Level*> supported_levels();
const char* name_of(const Level& level);

// Returns the level that calls use: the fastest one, or the one that MEGATRON_SB_CPU_LEVEL names.
const Level& level_in_use();

// Sizes of the workspace in bytes. The backward uses fewer threads if `limit` leaves no room for more. It exceeds
// `limit` only if one thread needs more.
int64_t forward_workspace(const ForwardParams& params, const Level& level = level_in_use());
int64_t backward_workspace(const BackwardParams& params, int64_t limit, const Level& level = level_in_use());

// Both run on OpenMP threads and return when the results are written. block_forward writes only the rows of `segments`;
// for rows in no segment the caller writes o, mass_out and restart. block_backward adds to gradients, which the caller
// has cleared. Segments must stay within the rows of q and k.
void block_forward(const ForwardParams& params, const Level& level = level_in_use());
void block_backward(const BackwardParams& params, const Level& level = level_in_use());

}  // namespace megatron_sb::cpu
