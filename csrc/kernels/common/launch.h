// Error check after a kernel launch.
#pragma once

#include <cuda_runtime.h>

#include "core/error.h"

namespace megatron_sb::common {

// Throws RuntimeFailure if the last launch of this thread failed. The message begins with `what`.
inline void check_launch(const char* what) {
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) throw RuntimeFailure(concat(what, ": launch failed: ", cudaGetErrorString(error)));
}

}  // namespace megatron_sb::common
