#include "ops/autocast.h"

#include <ATen/autocast_mode.h>

namespace megatron_sb::ops {
namespace {

// Casts the floating-point tensors of a call to the dtype of autocast, as PyTorch's own attention does, and calls the
// operator again below autocast. Integer and float64 tensors keep their dtype. A float32 forget gate keeps it too: the
// kernels take such gates with 16-bit q and k.
void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DeviceType device) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const at::ScalarType type = at::autocast::get_autocast_dtype(device);
    const std::vector<c10::Argument>& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
        c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
        if (!value.isTensor()) continue;
        const at::Tensor tensor = value.toTensor();
        if (arguments[i].name() == "forget_gate" && tensor.scalar_type() == at::kFloat) continue;
        value = at::autocast::cached_cast(type, tensor, device);
    }
    op.callBoxed(stack);
}

}  // namespace

void autocast_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    cast_and_call(op, stack, c10::DeviceType::CPU);
}

void autocast_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    cast_and_call(op, stack, c10::DeviceType::CUDA);
}

}  // namespace megatron_sb::ops
