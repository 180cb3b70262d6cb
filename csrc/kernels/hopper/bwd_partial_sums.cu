// Adds the partial sums of dk and dv, if key tiles have several parts (bwd_parts.h). It runs after the main kernel. The
// order is that of the parts, so results are bitwise repeatable.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/common/launch.h"
#include "kernels/hopper/bwd_plan.h"
#include "kernels/hopper/gates.cuh"
#include "kernels/hopper/hopper.h"

namespace megatron_sb::hopper {
namespace {

constexpr int kSumThreads = 256;
static_assert(TileParts::kMostParts <= 32, "a warp tests has_sums of one part in each lane");
constexpr int kKeysOfBlock = 16;  // keys of a tile that a thread block handles: enough blocks for all multiprocessors

// Writes four columns of a gradient. The fp32 version adds to it.
template <class Element>
__device__ void write_columns(Element* to, const float4& x) {
    alignas(8) const Element rounded[4] = {Element(x.x), Element(x.y), Element(x.z), Element(x.w)};
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(rounded);
}
__device__ void write_columns(float* to, const float4& x) {
    float2* const pairs = reinterpret_cast<float2*>(to);
    const float2 low = pairs[0], high = pairs[1];
    pairs[0] = make_float2(low.x + x.x, low.y + x.y);
    pairs[1] = make_float2(high.x + x.z, high.y + x.w);
}

// The sum of four columns over the parts in the mask `present`, in the order of the parts.
__device__ float4 sum_of_parts(const float* partial, int64_t part_stride, uint32_t present) {
    constexpr int kLoads = 4;  // in flight together
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    while (present != 0) {
        float4 x[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i, present &= present - 1) {
            const float* const at = partial + (__ffs(present) - 1) * part_stride;
            x[i] = present != 0 ? __ldcs(reinterpret_cast<const float4*>(at)) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            sum = make_float4(sum.x + x[i].x, sum.y + x[i].y, sum.z + x[i].z, sum.w + x[i].w);
    }
    return sum;
}

// A thread block handles kKeysOfBlock keys of one key tile and KV head. A tile without any sums gets zeros.
template <class Out>
__global__ void __launch_bounds__(kSumThreads)
    add_parts(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardPlan plan) {
    const int tile_keys = backward_key_tile(p.sizes), blocks_of_tile = tile_keys / kKeysOfBlock;
    const int first_key = blockIdx.x % blocks_of_tile * kKeysOfBlock, tile_and_head = blockIdx.x / blocks_of_tile;
    const int key_tile = tile_and_head / plan.num_kv_heads, kv_head = tile_and_head % plan.num_kv_heads;
    if (key_tile >= plan.counters[kNumKeyTiles]) return;
    const KeyTile tile = plan.key_tiles[key_tile];
    if (tile.is_whole) return;
    const int keys = min(first_key + kKeysOfBlock, tile.num_keys - tile.tile * tile_keys);
    const int tile_row = clamped(p.segments[tile.segment], p.sizes).k_begin + tile.tile * tile_keys;
    const int columns = stored_columns(p.sizes), threads_of_row = columns / 4,
              column = threadIdx.x % threads_of_row * 4;
    const int rows_at_once = kSumThreads / threads_of_row;
    const int batch = kv_head / p.sizes.num_kv_heads, head = kv_head % p.sizes.num_kv_heads;
    const int lane = threadIdx.x % 32;
    const bool has_sums =
        lane < plan.parts.count() && plan.has_sums[plan.partial_row(p.sizes, lane, kv_head, tile_row)] != 0;
    const uint32_t present = __ballot_sync(~0u, has_sums);
    const int64_t part_stride = plan.partial_row(p.sizes, 1, 0, 0) * columns;
    const auto add = [&](const float* partial, const Rows<void*>& to, int width, int row) {
        if (column >= width) return;
        const int64_t at = plan.partial_row(p.sizes, 0, kv_head, row) * columns + column;
        const int64_t out = batch * to.batch_stride + head * to.head_stride + row * to.row_stride + column;
        write_columns(static_cast<Out*>(to.data) + out, sum_of_parts(partial + at, part_stride, present));
    };
    const auto add_gate = [&](int row) {
        const int64_t at = plan.partial_row(p.sizes, 0, kv_head, row), stride = part_stride / columns;
        float sum = 0.f;
        for (uint32_t left = present; left != 0; left &= left - 1)
            sum += plan.partial_gates[at + (__ffs(left) - 1) * stride];
        write_gate_columns(static_cast<Out*>(p.dk.data) + batch * p.dk.batch_stride + head * p.dk.head_stride +
                               row * p.dk.row_stride + p.sizes.head_dim,
                           sum);
    };
    if (threadIdx.x >= rows_at_once * threads_of_row) return;  // of 192 columns
    for (int key = first_key + threadIdx.x / threads_of_row; key < keys; key += rows_at_once) {
        if (p.options.forget_gate && column == 0) add_gate(tile_row + key);
        add(plan.partial_dk, p.dk, p.sizes.head_dim, tile_row + key);
        add(plan.partial_dv, p.dv, p.sizes.head_dim_v, tile_row + key);
    }
}

}  // namespace

void add_partial_sums(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream) {
    if (plan.parts.count() == 1) return;
    const int64_t blocks =
        int64_t(plan.max_key_tiles) * plan.num_kv_heads * (backward_key_tile(params.sizes) / kKeysOfBlock);
    const auto run = [&](auto kernel) {
        common::launch("hopper backward: add_partial_sums", kernel, blocks, kSumThreads, 0, stream, params, plan);
    };
    if (params.grad_dtype == Dtype::kFloat32)
        run(add_parts<float>);
    else if (params.grad_dtype == Dtype::kBFloat16)
        run(add_parts<__nv_bfloat16>);
    else
        run(add_parts<__half>);
}

}  // namespace megatron_sb::hopper
