#include "ops/autocast.h"

#include <ATen/autocast_mode.h>

#include "ops/extend.h"

namespace megatron_sb::ops {
namespace {

bool is_written(const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Whether this is a call of attention_kvcache that appends k to the caches: it must write to them, not to a cast copy.
bool writes_caches(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    const size_t count = schema.arguments().size();
    const std::optional<int> k = schema.argumentIndexWithName("k");
    if (!k.has_value() || !torch::jit::peek(stack, size_t(*k), count).isTensor()) return false;
    return std::any_of(schema.arguments().begin(), schema.arguments().end(), is_written);
}

// Whether a tensor may have more bits than q and k: a forget gate, or a bias of the logits.
bool may_be_wider(const std::string& name) {
    return name == "forget_gate" || name == "query_bias" || name == "key_bias";
}

// Whether this is a call of attention_kvcache whose keys have a number in their extra columns. Its unit depends on the
// dtype, so these keys cannot be cast.
bool stores_numbers(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    if (!schema.argumentIndexWithName("k_cache").has_value()) return false;
    const auto flag = [&](const char* name) {
        return torch::jit::peek(stack, size_t(*schema.argumentIndexWithName(name)), schema.arguments().size()).toBool();
    };
    return flag("euclidean") || flag("key_bias");
}

// Casts the floating-point tensors of a call to the dtype of autocast, as PyTorch's own attention does, and calls the
// operator again below autocast. Integer and float64 tensors keep their dtype. Float32 forget gates and biases keep it
// too: the operators take them with 16-bit q and k.
void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DeviceType device) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const at::ScalarType type = at::autocast::get_autocast_dtype(device);
    const std::vector<c10::Argument>& arguments = op.schema().arguments();
    const bool appends = writes_caches(op.schema(), *stack), numbers = stores_numbers(op.schema(), *stack);
    for (size_t i = 0; i < arguments.size(); ++i) {
        c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
        if (!value.isTensor()) continue;
        const at::Tensor tensor = value.toTensor();
        if (may_be_wider(arguments[i].name()) && tensor.scalar_type() == at::kFloat) continue;
        const at::Tensor cast = at::autocast::cached_cast(type, tensor, device);
        TORCH_CHECK_TYPE(!(appends && is_written(arguments[i])) || cast.is_same(tensor), arguments[i].name(),
                         ": dtype must be that of autocast, ", type, ", to append keys under autocast, got ",
                         tensor.scalar_type());
        const bool are_keys = arguments[i].name() == "k_cache" || arguments[i].name() == "k";
        TORCH_CHECK_TYPE(!(numbers && are_keys) || number_unit(cast.scalar_type()) == number_unit(tensor.scalar_type()),
                         arguments[i].name(), ": dtype must be that of autocast, ", type,
                         ", for stored keys with Euclidean logits or biases, got ", tensor.scalar_type());
        value = cast;
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
