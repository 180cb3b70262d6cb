// The instances of the forward and the backward kernel: bf16 and fp16, with the columns of hopper.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/hopper/hopper.h"

namespace megatron_sb::hopper {

template <int kColumns>
using Count = std::integral_constant<int, kColumns>;

// Calls f(Element, columns of q and k, columns of v) for a call with these sizes; the numbers are constants (Count).
template <bool kGated, class F>
void with_instance(const Sizes& sizes, const F& f) {
    const auto with_columns = [&](auto qk, auto v) {
        sizes.dtype == Dtype::kBFloat16 ? f(__nv_bfloat16{}, qk, v) : f(__half{}, qk, v);
    };
    const Columns columns = computed_columns(sizes.head_dim, sizes.head_dim_v);
    if (columns.qk == 64) return with_columns(Count<64>{}, Count<64>{});
    if (columns.qk == 72) return with_columns(Count<72>{}, Count<64>{});
    if (columns.qk == 96) return with_columns(Count<96>{}, Count<96>{});
    if (columns.qk == 128) return with_columns(Count<128>{}, Count<128>{});
    if (kGated || columns.qk == 136) return with_columns(Count<136>{}, Count<128>{});
    if constexpr (!kGated) {
        if (columns.qk == 192) return with_columns(Count<192>{}, Count<128>{});
        return with_columns(Count<256>{}, Count<256>{});
    }
}

}  // namespace megatron_sb::hopper
