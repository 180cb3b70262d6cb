// The entry of the backward.
#include "kernels/hopper/bwd_plan.h"
#include "kernels/hopper/instances.cuh"

namespace megatron_sb::hopper {
namespace {

bool has_work(const BackwardParams& p) {
    return p.segments.size > 0 && p.sizes.q_rows > 0 && p.sizes.k_rows > 0 && p.sizes.batch > 0 &&
           p.sizes.num_heads > 0;
}

}  // namespace

int64_t backward_workspace(const BackwardParams& params, int64_t) {
    if (!has_work(params)) return 0;
    BackwardParams without_workspace = params;
    without_workspace.workspace = nullptr;
    BackwardPlan plan;
    return plan_backward(without_workspace, &plan);
}

void block_backward(const BackwardParams& params, void* stream_handle) {
    if (!has_work(params)) return;
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    with_instance(params.sizes, params.options.forget_gate, [&](auto element, auto qk, auto v, auto gated) {
        launch_backward<decltype(element), qk(), v(), gated()>(params, stream);
    });
}

}  // namespace megatron_sb::hopper
