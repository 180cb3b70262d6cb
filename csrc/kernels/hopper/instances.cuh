// The instances of the forward and the backward kernel: bf16 and fp16, with the columns of hopper.h, with and without
// forget gates. CMake writes a source for those of each direction, number of columns and type
// (cmake/SbHopperInstances.cmake).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/hopper/hopper.h"

namespace megatron_sb::hopper {

// Defined in fwd_kernel.cuh and bwd_kernel.cuh. kColumns: of q and k. kHeadDimV: columns of v.
template <class Element, int kColumns, int kHeadDimV, bool kGated>
void launch_forward(const ForwardParams& params, cudaStream_t stream);
template <class Element, int kColumns, int kHeadDimV, bool kGated>
void launch_backward(const BackwardParams& params, cudaStream_t stream);

template <int kColumns>
using Count = std::integral_constant<int, kColumns>;

// Calls f(Element, columns of q and k, columns of v, whether there are gates) for a call with these sizes. All but the
// first are constants (std::integral_constant).
template <class F>
void with_instance(const Sizes& sizes, bool gated, const F& f) {
    const auto with_type = [&](auto qk, auto v, auto has_gates) {
        sizes.dtype == Dtype::kBFloat16 ? f(__nv_bfloat16{}, qk, v, has_gates) : f(__half{}, qk, v, has_gates);
    };
    const auto with_columns = [&](auto qk, auto v) {
        gated ? with_type(qk, v, std::true_type{}) : with_type(qk, v, std::false_type{});
    };
    const int columns = computed_columns(sizes);
    if (columns == 64) return with_columns(Count<64>{}, Count<64>{});
    if (columns == 72) return with_columns(Count<72>{}, Count<64>{});
    if (columns == 96) return with_columns(Count<96>{}, Count<96>{});
    if (columns == 128) return with_columns(Count<128>{}, Count<128>{});
    if (columns == 136) return with_columns(Count<136>{}, Count<128>{});
    // Wide heads have no gates.
    if (columns == 192) return with_type(Count<192>{}, Count<128>{}, std::false_type{});
    return with_type(Count<256>{}, Count<256>{}, std::false_type{});
}

}  // namespace megatron_sb::hopper
