// What follows the main kernel of the backward. write_dq turns the sums of dq, which the main kernel keeps in fp32 and
// in the order of the accumulator registers, into rows of dq. add_parts adds the partial sums of dk and dv, if key
// tiles have several parts (bwd_parts.h), in the order of the parts. So results are bitwise repeatable.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/common/launch.h"
#include "kernels/hopper/bwd_plan.h"
#include "kernels/hopper/gates.cuh"
#include "kernels/hopper/hopper.h"
#include "kernels/hopper/ptx.cuh"

namespace megatron_sb::hopper {
namespace {

constexpr int kSumThreads = 256;
static_assert(TileParts::kMostParts <= 32, "a warp tests has_sums of one part in each lane");
constexpr int kKeysOfBlock = 16;  // keys of a tile that a thread block handles: enough blocks for all multiprocessors

__device__ float4 operator+(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Address of (batch element, head, row) of a gradient.
template <class Out>
__device__ Out* address_of(const Rows<void*>& to, int batch, int head, int row) {
    return static_cast<Out*>(to.data) + batch * to.batch_stride + head * to.head_stride + row * to.row_stride;
}

// Writes four columns of dq, or adds them to what is there. Only an fp32 gradient can be added to.
template <class T>
__device__ void write_columns(T* to, const float4& x, bool add) {
    if constexpr (std::is_same_v<T, float>) {
        if (add) return store_four(to, x + *reinterpret_cast<const float4*>(to));
    }
    store_four(to, x);
}

// The sum of four columns over the parts in the mask `present`, in the order of the parts.
__device__ float4 sum_of_parts(const float* partial, int64_t part_stride, uint32_t present) {
    constexpr int kLoads = 4;  // in flight together
    float4 sum = {};
    while (present != 0) {
        float4 x[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i, present &= present - 1) {
            const float* const at = partial + (__ffs(present) - 1) * part_stride;
            x[i] = present != 0 ? __ldcs(reinterpret_cast<const float4*>(at)) : float4{};
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) sum = sum + x[i];
    }
    return sum;
}

// A thread block handles one step of one head, 64 columns at a time. Each thread reads what one thread of a consumer
// warpgroup has added (dq_target() in bwd_output.cuh). The columns of a row are joined in shared memory.
//
// Thread blocks start while the last CTAs of the main kernel run, on the other multiprocessors, in about the order in
// which steps are finished. If its step is not finished, a block waits for the end of the main kernel, which the
// watchdog bounds. The last block always does, so what follows in the stream also begins after the main kernel.
template <class Out>
__global__ void __launch_bounds__(kDqThreads)
    write_dq(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardPlan plan, int heads_together,
             float scale) {
    constexpr int kPitch = 64 + 4;  // floats between rows: few bank conflicts
    __shared__ __align__(16) float rows[kStepRows * kPitch];
    const Sizes& z = p.sizes;
    if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
    const int blocks_of_group = heads_together * plan.max_steps, in_group = blockIdx.x % blocks_of_group;
    const int head = blockIdx.x / blocks_of_group * heads_together + in_group % heads_together;
    const int number = in_group / heads_together;
    if (head >= z.batch * z.num_heads || number >= plan.counters[kNumSteps]) return;
    const int64_t index = int64_t(head) * plan.max_steps + number;
    const StepStarts starts = plan.starts[index];
    const Segment s = clamped(p.segments[starts.segment], z);
    const int first_row = (number - plan.segments[starts.segment].first_step) * kStepRows;
    const int num_rows = min(kStepRows, s.q_len - first_row);
    const int visible = visible_keys(s, p.options.attend_current, first_row + num_rows - 1);
    // Otherwise no key tile has stored a sum.
    const int newest_tile = (visible - 1) / backward_key_tile(z);
    const bool has_sum = visible > 0 && starts.oldest_tile <= newest_tile;
    if (!has_sum && p.add_dq) return;
    if (has_sum && load_acquire(plan.dq_next_tile + index) != newest_tile + 1) wait_for_previous_kernel();
    const int columns = stored_columns(z), panels = columns / 64;
    const int thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
    Out* const to = address_of<Out>(p.dq, head / z.num_heads, head % z.num_heads, s.q_begin + first_row);
    const float* const sums = plan.dq + index * dq_floats_of_step(z) + thread * 4;
    for (int panel = 0; panel < panels; ++panel) {
        float4 x[kDqVectors];
#pragma unroll
        for (int v = 0; v < kDqVectors; ++v) {
            const float* const at = sums + panel * (kStepRows * 64) + v * 4 * kDqThreads;
            const bool exists = has_sum && 64 * panel + 8 * v < z.head_dim;
            x[v] = exists ? __ldcg(reinterpret_cast<const float4*>(at)) : float4{};
        }
#pragma unroll
        for (int v = 0; v < kDqVectors; ++v) {
            float* const at = rows + row * kPitch + 8 * v + column;
            *reinterpret_cast<float2*>(at) = make_float2(x[v].x * scale, x[v].y * scale);
            *reinterpret_cast<float2*>(at + 8 * kPitch) = make_float2(x[v].z * scale, x[v].w * scale);
        }
        __syncthreads();
        constexpr int kPieces = 64 / 4;  // of a row
        for (int i = thread; i < num_rows * kPieces; i += kDqThreads) {
            const int r = i / kPieces, c = i % kPieces * 4;
            if (64 * panel + c < z.head_dim)
                write_columns(to + r * p.dq.row_stride + 64 * panel + c,
                              *reinterpret_cast<const float4*>(rows + r * kPitch + c), p.add_dq);
        }
        __syncthreads();
    }
    if (columns % 64 == 0 || thread >= num_rows) return;
    const float dz_sum = has_sum ? __ldcg(sums + panels * (kStepRows * 64) - 3 * thread) : 0.f;
    Out* const biases = to + thread * p.dq.row_stride + 64 * panels;
    write_columns(biases, make_float4(dz_sum * scale * bias_unit(z.dtype), 0.f, 0.f, 0.f), p.add_dq);
    write_columns(biases + 4, float4{}, p.add_dq);
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
        store_four(address_of<Out>(to, batch, head, row) + column, sum_of_parts(partial + at, part_stride, present));
    };
    const auto add_gate = [&](int row) {
        const int64_t at = plan.partial_row(p.sizes, 0, kv_head, row), stride = part_stride / columns;
        float sum = 0.f;
        for (uint32_t left = present; left != 0; left &= left - 1)
            sum += plan.partial_gates[at + (__ffs(left) - 1) * stride];
        write_gate_columns(address_of<Out>(p.dk, batch, head, row) + p.sizes.head_dim, sum);
    };
    if (threadIdx.x >= rows_at_once * threads_of_row) return;  // with 72, 136 or 192 columns
    for (int key = first_key + threadIdx.x / threads_of_row; key < keys; key += rows_at_once) {
        if (p.options.forget_gate && column == 0) add_gate(tile_row + key);
        add(plan.partial_dk, p.dk, p.sizes.head_dim, tile_row + key);
        add(plan.partial_dv, p.dv, p.sizes.head_dim_v, tile_row + key);
    }
}

}  // namespace

void finish_gradients(const BackwardParams& params, const BackwardPlan& plan, float scale, cudaStream_t stream) {
    const Sizes& z = params.sizes;
    const int heads_together = plan.head_order.heads_together * (z.num_heads / z.num_kv_heads);
    const int groups = (z.batch * z.num_heads + heads_together - 1) / heads_together;
    const int64_t steps = int64_t(groups) * heads_together * plan.max_steps;
    const int64_t key_blocks = int64_t(plan.max_key_tiles) * plan.num_kv_heads * (backward_key_tile(z) / kKeysOfBlock);
    const auto run = [&](auto out) {
        using Out = decltype(out);
        common::launch<common::Start::kBeforeEnd>("hopper backward: write_dq", write_dq<Out>, steps, kDqThreads, 0,
                                                  stream, params, plan, heads_together, scale);
        if (plan.parts.count() > 1)
            common::launch("hopper backward: add_parts", add_parts<Out>, key_blocks, kSumThreads, 0, stream, params,
                           plan);
    };
    if (params.grad_dtype == Dtype::kFloat32)
        run(float());
    else if (params.grad_dtype == Dtype::kBFloat16)
        run(__nv_bfloat16());
    else
        run(__half());
}

}  // namespace megatron_sb::hopper
