// The entry of the forward.
#include "kernels/common/query_tiles.h"
#include "kernels/hopper/instances.cuh"

namespace megatron_sb::hopper {

int64_t forward_workspace(const ForwardParams& params) {
    return common::query_tiles_bytes(params.sizes, params.segments, common::kSmallestQueryTile);
}

void block_forward(const ForwardParams& given, void* stream_handle) {
    ForwardParams params = given;
    const Sizes& z = params.sizes;
    if (z.k_rows == 0)
        params.segments = {nullptr, 0};  // no query row sees a key, and a tensor map of 0 rows cannot be encoded
    if (z.q_rows == 0 || z.batch == 0 || z.num_heads == 0) return;
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    with_instance(params.sizes, params.options.forget_gate, [&](auto element, auto qk, auto v, auto gated) {
        launch_forward<decltype(element), qk(), v(), gated()>(params, stream);
    });
}

}  // namespace megatron_sb::hopper
