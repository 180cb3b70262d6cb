// The CPU kernels: block_forward and block_backward of core/params.h on raw pointers.
#pragma once

#include "core/params.h"

namespace megatron_sb::cpu {

// Both run on OpenMP threads and return when the results are written. They need no workspace. block_forward writes only
// the rows of `segments`; for rows in no segment the caller writes o, mass_out and restart. Segments must stay within
// the rows of q and k.
void block_forward(const ForwardParams& params);
void block_backward(const BackwardParams& params);

// Returns the instruction set in use: "avx512", "avx2" or "baseline".
const char* instruction_set();

// fwd.cpp and bwd.cpp are compiled once for each instruction set. The functions above choose one at run time.
#define SB_DECLARE_LEVEL(level)                        \
    namespace level {                                  \
    void block_forward(const ForwardParams& params);   \
    void block_backward(const BackwardParams& params); \
    }
SB_DECLARE_LEVEL(baseline)
SB_DECLARE_LEVEL(avx2)
SB_DECLARE_LEVEL(avx512)
#undef SB_DECLARE_LEVEL

}  // namespace megatron_sb::cpu
