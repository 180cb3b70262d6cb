#include "ops/arguments.h"

#include <algorithm>

namespace megatron_sb::ops {
namespace {

// Null if there is no argument `name`.
const c10::IValue* find(const NamedArguments& arguments, std::string_view name) {
    const auto found = std::find_if(arguments.begin(), arguments.end(),
                                    [name](const auto& argument) { return argument.first == name; });
    return found == arguments.end() ? nullptr : &found->second;
}

}  // namespace

const c10::IValue* Arguments::find(std::string_view name) const {
    const std::vector<c10::Argument>& listed = schema_.arguments();
    for (size_t i = 0; i < listed.size(); ++i)
        if (listed[i].name() == name) return &values_[i];
    return nullptr;
}

torch::jit::Stack Operator::call(const NamedArguments& inputs, const NamedArguments& options) const {
    torch::jit::Stack stack;
    size_t num_used = 0;
    for (const c10::Argument& listed : handle_.schema().arguments()) {
        const c10::IValue* given = find(inputs, listed.name());
        if (given == nullptr) given = find(options, listed.name());
        TORCH_INTERNAL_ASSERT(given != nullptr || listed.default_value().has_value(), handle_.schema().name(),
                              " needs the argument ", listed.name());
        num_used += given != nullptr;
        stack.push_back(given != nullptr ? *given : *listed.default_value());
    }
    TORCH_INTERNAL_ASSERT(num_used == inputs.size() + options.size(), handle_.schema().name(),
                          " does not list every argument of the call");
    handle_.callBoxed(stack);
    return stack;
}

}  // namespace megatron_sb::ops
