// block_forward for sm_80 and later: the workspace, and the launch for the element type of the call.
#include "kernels/common/query_tiles.h"
#include "kernels/portable/passes.h"
#include "kernels/portable/portable.h"

namespace megatron_sb::portable {

int64_t forward_workspace(const ForwardParams& params) {
    return query_tiles_bytes(params.sizes, params.segments, query_tile_rows(params.sizes));
}

void block_forward(const ForwardParams& params, void* stream) {
    if (params.sizes.q_rows == 0) return;
    with_element(params.sizes.dtype,
                 [&](auto element) { launch_forward<decltype(element)>(params, static_cast<cudaStream_t>(stream)); });
}

}  // namespace megatron_sb::portable
