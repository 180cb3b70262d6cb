// The launches of the portable kernels. Each is a template over the element type T of q, k and v. instances/ has one
// file for the explicit instantiation of each kernel and element type, so that they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "core/params.h"
#include "kernels/common/scalars.h"

namespace megatron_sb::portable {

using namespace common;  // the portable kernels are built from the parts in kernels/common

struct BackwardPlan;

template <class T>
void launch_forward(const ForwardParams& params, cudaStream_t stream);
template <class T>
void launch_query_pass(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);
template <class T>
void launch_key_pass(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream);

// Calls f(T{}) with the element type T of `dtype`. GPU kernels have no fp64 (dispatch/table.cpp).
template <class F>
void with_element(Dtype dtype, const F& f) {
    switch (dtype) {
        case Dtype::kBFloat16:
            return f(BFloat16{});
        case Dtype::kFloat16:
            return f(Half{});
        default:
            return f(float{});
    }
}

// Rows of Q in a tile of the forward and of the query pass: 32 for each of the four warps if the registers suffice,
// else 16.
constexpr int query_tile_rows(int element_bytes, int head_dim) {
    return element_bytes == 2 && head_dim <= 128 ? 128 : 64;
}
inline int query_tile_rows(const Sizes& sizes) {
    return query_tile_rows(sizes.dtype == Dtype::kFloat32 ? 4 : 2, std::max(sizes.head_dim, sizes.head_dim_v));
}
template <class T, int kDim>
inline constexpr int kQueryTile = query_tile_rows(int(sizeof(T)), kDim);

}  // namespace megatron_sb::portable
