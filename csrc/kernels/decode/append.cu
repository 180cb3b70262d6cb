#include "kernels/common/launch.h"
#include "kernels/decode/append.h"

namespace megatron_sb::decode {
namespace {

constexpr int kThreads = 128;

// The whole CTA copies one row of one head.
template <class Element>
__device__ void copy_row(const Rows<const void*>& from, const Rows<void*>& to, int batch, int row, int to_batch,
                         int to_row, int head, int width) {
    const Element* const source = static_cast<const Element*>(from.data) + batch * from.batch_stride +
                                  row * from.row_stride + head * from.head_stride;
    Element* const target =
        static_cast<Element*>(to.data) + to_batch * to.batch_stride + to_row * to.row_stride + head * to.head_stride;
    for (int i = threadIdx.x; i < width; i += kThreads) target[i] = source[i];
}

template <class Element>
__global__ void __launch_bounds__(kThreads) append_rows(const __grid_constant__ AppendParams p) {
    const int head = blockIdx.x % p.num_heads, row = blockIdx.x / p.num_heads % p.num_rows;
    const int batch = blockIdx.x / p.num_heads / p.num_rows;
    const int64_t position = int64_t(p.lengths[batch]) + row;
    if (position < 0 || position >= p.capacity) return;
    int block = batch, row_of_block = int(position);
    if (p.table.data != nullptr) {
        block = p.table.data[batch * p.table.stride + position / p.table.block_size];
        row_of_block = int(position % p.table.block_size);
        if (block < 0 || block >= p.table.num_blocks) return;
    }
    copy_row<Element>(p.k, p.k_cache, batch, row, block, row_of_block, head, p.k_width);
    copy_row<Element>(p.v, p.v_cache, batch, row, block, row_of_block, head, p.v_width);
}

}  // namespace

void append(const AppendParams& p, void* stream) {
    const auto kernel = p.element_bytes == 2   ? append_rows<uint16_t>
                        : p.element_bytes == 4 ? append_rows<uint32_t>
                                               : append_rows<uint64_t>;
    common::launch("kvcache_append", kernel, int64_t(p.batch) * p.num_rows * p.num_heads, kThreads, 0,
                   static_cast<cudaStream_t>(stream), p);
}

}  // namespace megatron_sb::decode
