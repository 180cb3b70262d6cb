// The two products of a tile of keys: S = Q K^T and O += A V, with accumulators as in common/tile.cuh.
//
// 16-bit types use the tensor cores. fp32 uses the FP32 units. A call has few rows of Q, so this takes less time than
// products of 16 rows on the tensor cores, which split each number into two of tf32.
#pragma once

#include "kernels/common/tile.cuh"
#include "kernels/decode/rows.cuh"

namespace megatron_sb::decode {

using Scores = float[1][kKeys / 8][4];

// s += q k^T in fp32. Only the first kCount of a thread's two rows of Q exist.
template <int kCount, int kPitch>
__device__ inline void multiply_float_keys(Scores& s, uint32_t queries, uint32_t keys, int width) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 2
    for (int piece = 0; piece * 16 < width; ++piece) {
        float4 q[kCount];
#pragma unroll
        for (int r = 0; r < kCount; ++r)
            q[r] = common::load_shared_four(queries + (g + 8 * r) * kPitch + ((piece ^ g) << 4));
#pragma unroll
        for (int column = 0; column < kKeys / 4; ++column) {
            const int n = column / 2, c = column % 2, row = 2 * t + c;
            const float4 k = common::load_shared_four(keys + row * kPitch + ((piece ^ row) << 4) + n * 8 * kPitch);
#pragma unroll
            for (int r = 0; r < kCount; ++r) {
                float& sum = s[0][n][2 * r + c];
                sum = fmaf(q[r].w, k.w, fmaf(q[r].z, k.z, fmaf(q[r].y, k.y, fmaf(q[r].x, k.x, sum))));
            }
        }
    }
}

// o += a v in fp32. The four threads of a quad hold the weights of a row, so shuffles hand them around.
template <int kCount, int kPitch, int kBlocks>
__device__ inline void multiply_float_values(float (&o)[1][kBlocks][4], const Scores& a, uint32_t values) {
    const int t = threadIdx.x % 4, quad = threadIdx.x % 32 - t;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll 1
        for (int holder = 0; holder < 4; ++holder) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int row = 2 * holder + c;
                const uint32_t from = values + (8 * n + row) * kPitch + ((t / 2 ^ row) << 4) + t % 2 * 8;
                float weight[kCount];
#pragma unroll
                for (int r = 0; r < kCount; ++r)
                    weight[r] = __shfl_sync(common::kAllLanes, a[0][n][2 * r + c], quad + holder);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    const float2 v = common::load_shared_two(common::advance(from, 32 * block));
#pragma unroll
                    for (int r = 0; r < kCount; ++r) {
                        o[0][block][2 * r] = fmaf(weight[r], v.x, o[0][block][2 * r]);
                        o[0][block][2 * r + 1] = fmaf(weight[r], v.y, o[0][block][2 * r + 1]);
                    }
                }
            }
        }
    }
}

// s += q k^T over the first `width` bytes of the rows. `rows` rows of Q exist.
template <class T, int kPitch>
__device__ inline void multiply_keys(Scores& s, uint32_t queries, uint32_t keys, int width, int rows) {
    if constexpr (sizeof(T) == 2)
        common::multiply_rows<T, kPitch>(s, queries, keys, width);
    else if (rows <= kRows / 2)
        multiply_float_keys<1, kPitch>(s, queries, keys, width);
    else
        multiply_float_keys<2, kPitch>(s, queries, keys, width);
}

// o += a v. `rows` rows of A exist.
template <class T, int kPitch, int kBlocks>
__device__ inline void multiply_values(float (&o)[1][kBlocks][4], Scores& a, uint32_t values, int rows) {
    if constexpr (sizeof(T) == 2)
        common::multiply_accumulators<T, kPitch>(o, a, values);
    else if (rows <= kRows / 2)
        multiply_float_values<1, kPitch>(o, a, values);
    else
        multiply_float_values<2, kPitch>(o, a, values);
}

}  // namespace megatron_sb::decode
