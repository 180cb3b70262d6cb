// The segment table of a packed batch, computed on the device. The host does not wait for the values of cu_seqlens.
#pragma once

#include "core/params.h"

namespace megatron_sb::common {

// Writes segment i of document i to out (documents,), on `stream` (a cudaStream_t). cu_seqlens and cu_seqlens_k
// (documents + 1,) and `out` are in device memory. Throws RuntimeFailure if the launch fails.
//
// The host has not checked the offsets. So each is clamped to the rows, and an offset below an earlier one is replaced
// by the largest earlier one. Whatever the offsets are, the segments stay inside the rows, are in order, and share no
// row. The kernels rely on that: workspaces have room for so many tiles, and waits between CTAs end.
void segments_from_cu_seqlens(const int32_t* cu_seqlens, const int32_t* cu_seqlens_k, int32_t documents, int32_t q_rows,
                              int32_t k_rows, Segment* out, void* stream);

}  // namespace megatron_sb::common
