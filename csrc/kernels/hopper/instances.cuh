// The instances of the forward and the backward kernel: bf16 and fp16, with 64, 96 and 128 columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/hopper/hopper.h"

namespace megatron_sb::hopper {

// Calls f(Element, computed_columns) for a call with these sizes; the number of columns is a constant.
template <class F>
void with_instance(const Sizes& sizes, const F& f) {
    const auto with_columns = [&](auto columns) {
        sizes.dtype == Dtype::kBFloat16 ? f(__nv_bfloat16{}, columns) : f(__half{}, columns);
    };
    switch (computed_columns(sizes)) {
        case 64:
            return with_columns(std::integral_constant<int, 64>{});
        case 96:
            return with_columns(std::integral_constant<int, 96>{});
        default:
            return with_columns(std::integral_constant<int, kMostColumns>{});
    }
}

}  // namespace megatron_sb::hopper
