#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <numeric>

#include "core/error.h"
#include "kernels/common/launch.h"
#include "kernels/hopper/tensor_maps.h"

namespace megatron_sb::hopper {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

constexpr int kElementBytes = 2;  // bf16 and fp16
static_assert(kPanelColumns * kElementBytes == 128, "a panel must have the width of the swizzle");

// Returns cuTensorMapEncodeTiled. It is looked up at the first use, so that the library also loads on machines without
// a CUDA driver.
Encode encode_function() {
    static const Encode function = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        constexpr int kCudaVersion = 12000;
        common::check("cuTensorMapEncodeTiled", "cudaGetDriverEntryPointByVersion",
                      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kCudaVersion,
                                                       cudaEnableDefault, &found));
        if (found != cudaDriverEntryPointSuccess)
            throw RuntimeFailure(
                "The CUDA driver has no cuTensorMapEncodeTiled. Install a driver for CUDA 12 or later.");
        return reinterpret_cast<Encode>(entry);
    }();
    return function;
}

// Strides are in elements.
struct Layout {
    cuuint64_t head_stride, num_heads;  // of the joined dimension of batch and head
    cuuint64_t row_stride;
    HeadIndex index;
};

// Ignores the stride of a dimension of size 1: it can be any number.
Layout layout_of(const Rows<const void*>& tensor, int batch, int rows, int heads, int head_dim) {
    const int64_t batch_stride = batch > 1 ? tensor.batch_stride : 0;
    const int64_t head_stride = heads > 1 ? tensor.head_stride : 0;
    const int64_t divisor = std::gcd(batch_stride, head_stride);
    const int64_t unit = divisor > 0 ? divisor : head_dim;
    const int64_t per_batch = batch_stride / unit, per_head = head_stride / unit;
    return {cuuint64_t(unit),
            cuuint64_t(per_batch * (batch - 1) + per_head * (heads - 1) + 1),
            cuuint64_t(rows > 1 ? tensor.row_stride : head_dim),
            {int32_t(per_batch), int32_t(per_head)}};
}

template <int kRank>
CUtensorMap encode(const Rows<const void*>& tensor, Dtype dtype, const cuuint64_t (&sizes)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
    cuuint64_t bytes[kRank - 1];
    for (int i = 0; i < kRank - 1; ++i) bytes[i] = strides[i] * kElementBytes;
    constexpr cuuint32_t kSteps[] = {1, 1, 1, 1, 1};  // of the box; a tensor map has at most five dimensions
    const CUtensorMapDataType type =
        dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUtensorMapSwizzle swizzle =
        box[0] == kPanelColumns ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
    CUtensorMap map;
    const CUresult result = encode_function()(&map, type, kRank, const_cast<void*>(tensor.data), sizes, bytes, box,
                                              kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    // The last dimension is that of HeadIndex, whose numbers are int32.
    if (result != CUDA_SUCCESS || sizes[kRank - 1] > cuuint64_t(INT32_MAX))
        throw RuntimeFailure(concat("cuTensorMapEncodeTiled gave no usable map (CUresult ", int(result),
                                    ") for a tensor with strides (batch, row, head) = (", tensor.batch_stride, ", ",
                                    tensor.row_stride, ", ", tensor.head_stride,
                                    ") elements. Data and strides must be multiples of 16 bytes, strides below 2^39, "
                                    "and heads within 2^31 times the common divisor of batch and head strides."));
    return map;
}

}  // namespace

TensorMap make_query_map(const Rows<const void*>& tensor, const Sizes& sizes, int head_dim, int box_rows, int columns) {
    const Layout layout = layout_of(tensor, sizes.batch, sizes.q_rows, sizes.num_heads, head_dim);
    const cuuint64_t extents[] = {cuuint64_t(head_dim), cuuint64_t(sizes.q_rows), layout.num_heads};
    const cuuint64_t strides[] = {layout.row_stride, layout.head_stride};
    const cuuint32_t box[] = {cuuint32_t(columns), cuuint32_t(box_rows), 1};
    return {encode(tensor, sizes.dtype, extents, strides, box), layout.index};
}

TensorMap make_key_map(const Rows<const void*>& tensor, const Sizes& sizes, int head_dim, int tile_keys, int columns) {
    const Layout layout = layout_of(tensor, sizes.batch, sizes.k_rows, sizes.num_kv_heads, head_dim);
    const cuuint64_t row = layout.row_stride, keys_per_thread = cuuint64_t(tile_keys / 4);
    const cuuint64_t extents[] = {cuuint64_t(head_dim), cuuint64_t(sizes.k_rows), 4, keys_per_thread / 2,
                                  layout.num_heads};
    const cuuint64_t strides[] = {row, keys_per_thread * row, 2 * row, layout.head_stride};
    const cuuint32_t box[] = {cuuint32_t(columns), 2, 4, cuuint32_t(keys_per_thread / 2), 1};
    return {encode(tensor, sizes.dtype, extents, strides, box), layout.index};
}

}  // namespace megatron_sb::hopper
