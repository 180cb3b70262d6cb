// The segment table of a packed batch, computed on the device from cu_seqlens without a synchronisation.
#pragma once

#include "core/params.h"

namespace megatron_sb::common {

// Writes `documents` segments on `stream` (a cudaStream_t). Throws RuntimeFailure if the launch fails.
void segments_from_cu_seqlens(const int32_t* cu_seqlens, const int32_t* cu_seqlens_k, int32_t documents, int32_t q_rows,
                              int32_t k_rows, Segment* out, void* stream);

}  // namespace megatron_sb::common
