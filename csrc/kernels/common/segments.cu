#include "core/segment.h"
#include "kernels/common/block_scan.cuh"
#include "kernels/common/launch.h"
#include "kernels/common/segments.h"

namespace megatron_sb::common {
namespace {

constexpr int kThreads = 1024;  // one CTA writes the table

// Offsets in device memory, which the host has not checked: (documents + 1,) rows of a buffer with `rows` rows.
struct Offsets {
    const int32_t* data;
    int32_t rows;
    __device__ int32_t operator[](int i) const { return clamp_row(data[i], 0, rows); }
};

// Returns the running maximum of the offsets up to offset i of this thread. `before` is the maximum of all offsets of
// earlier rounds; the function adds this round. All threads of the CTA must call this.
__device__ int running_maximum(const Offsets& offsets, int i, int size, int& before, int* warp_values) {
    const auto scan = scan_over_block(i < size ? offsets[i] : 0, 0, warp_values, Maximum());
    const int maximum = max(before, scan.inclusive);
    before = max(before, scan.total);
    return maximum;
}

__global__ void __launch_bounds__(kThreads)
    write_segments(Offsets cu_seqlens, Offsets cu_seqlens_k, int32_t documents, Segment* out) {
    __shared__ int warp_values[kMaxWarps];
    int q_before = 0, k_before = 0;
    for (int round = 0; round < documents; round += kThreads) {
        const int i = round + int(threadIdx.x);
        const int q_begin = running_maximum(cu_seqlens, i, documents, q_before, warp_values);
        const int k_begin = running_maximum(cu_seqlens_k, i, documents, k_before, warp_values);
        if (i < documents)
            out[i] =
                document_segment(q_begin, max(q_begin, cu_seqlens[i + 1]), k_begin, max(k_begin, cu_seqlens_k[i + 1]));
    }
}

}  // namespace

void segments_from_cu_seqlens(const int32_t* cu_seqlens, const int32_t* cu_seqlens_k, int32_t documents, int32_t q_rows,
                              int32_t k_rows, Segment* out, void* stream) {
    if (documents == 0) return;
    const Offsets q = {cu_seqlens, q_rows}, k = {cu_seqlens_k, k_rows};
    write_segments<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(q, k, documents, out);
    check_launch("segments_from_cu_seqlens");
}

}  // namespace megatron_sb::common
