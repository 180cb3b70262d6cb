#include "core/segment.h"
#include "kernels/common/launch.h"
#include "kernels/common/segments.h"

namespace megatron_sb::common {
namespace {

__global__ void write_segments(const int32_t* cu_seqlens, const int32_t* cu_seqlens_k, int32_t documents,
                               int32_t q_rows, int32_t k_rows, Segment* out) {
    const int32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < documents) out[i] = document_segment(cu_seqlens, cu_seqlens_k, i, q_rows, k_rows);
}

}  // namespace

void segments_from_cu_seqlens(const int32_t* cu_seqlens, const int32_t* cu_seqlens_k, int32_t documents, int32_t q_rows,
                              int32_t k_rows, Segment* out, void* stream) {
    if (documents == 0) return;
    constexpr int kThreads = 256;
    const int blocks = (documents + kThreads - 1) / kThreads;
    write_segments<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(cu_seqlens, cu_seqlens_k, documents,
                                                                               q_rows, k_rows, out);
    check_launch("segments_from_cu_seqlens");
}

}  // namespace megatron_sb::common
