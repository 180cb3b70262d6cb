// Operator arguments by name, so that neither kernels nor callers depend on the order in which a schema lists them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/check.h"

namespace megatron_sb::ops {

using OptionalTensor = std::optional<at::Tensor>;
using NamedArguments = std::vector<std::pair<std::string_view, c10::IValue>>;

// The arguments of a running operator. Use it only while the operator's kernel runs.
class Arguments {
  public:
    Arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack)
        : schema_(schema), values_(torch::jit::last(stack, schema.arguments().size())) {}

    // The schema must list `name`.
    template <class T>
    T get(std::string_view name) const {
        const c10::IValue* value = find(name);
        TORCH_INTERNAL_ASSERT(value != nullptr, schema_.name(), " has no argument ", name);
        return value->to<T>();
    }
    // Returns `otherwise` if the schema does not list `name`.
    template <class T>
    T get_or(std::string_view name, T otherwise) const {
        const c10::IValue* value = find(name);
        return value == nullptr ? otherwise : value->to<T>();
    }
    at::Tensor tensor(std::string_view name) const { return get<at::Tensor>(name); }
    OptionalTensor optional_tensor(std::string_view name) const { return get<OptionalTensor>(name); }

  private:
    const c10::IValue* find(std::string_view name) const;

    const c10::FunctionSchema& schema_;
    at::ArrayRef<c10::IValue> values_;
};

// Calls a registered operator through the dispatcher, so that autocast, tracing and torch.compile see the call.
class Operator {
  public:
    explicit Operator(const char* name) : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")) {}

    // Returns the results. An argument that is in neither list takes the schema's default.
    torch::jit::Stack call(const NamedArguments& inputs, const NamedArguments& options = {}) const;

  private:
    c10::OperatorHandle handle_;
};

// The results of an operator that returns o and mass.
inline std::tuple<at::Tensor, at::Tensor> output_and_mass(const torch::jit::Stack& results) {
    return {results.at(0).toTensor(), results.at(1).toTensor()};
}

// A boxed kernel from a function that takes Arguments and returns a tuple of results. Autocast casts arguments before
// the kernel (autocast.h), and nothing that the kernel computes.
template <auto function>
void boxed_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    auto results = with_value_errors([&] { return function(Arguments(op.schema(), *stack)); });
    torch::jit::drop(*stack, op.schema().arguments().size());
    std::apply([&](auto&... result) { torch::jit::push(*stack, std::move(result)...); }, results);
}

}  // namespace megatron_sb::ops
