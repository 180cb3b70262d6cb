// Gradients that cannot be differentiated again. The error is raised only if someone differentiates them.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace megatron_sb::ops {

struct RefuseSecondDerivative : torch::autograd::Function<RefuseSecondDerivative> {
    // `sources` is a TensorList because Function::apply does not find the tensors of a variable_list.
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& gradient, at::TensorList) {
        return gradient.clone();  // a view of the input could not be changed in place
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list&) {
        TORCH_CHECK_NOT_IMPLEMENTED(false,
                                    "this operation of megatron_sb has no second derivative: its gradients cannot be "
                                    "differentiated again (double backward)");
    }
};

// Returns an empty tensor for each input of the running autograd node that needs a gradient, with the history of that
// input. A node that does not save its inputs passes them to once_differentiable(). Returns an empty list if no graph
// is recorded.
inline torch::autograd::variable_list inputs_of_running_node() {
    torch::autograd::variable_list inputs;
    if (!at::GradMode::is_enabled()) return inputs;
    for (const torch::autograd::Edge& edge : torch::autograd::get_current_node()->next_edges()) {
        if (!edge.is_valid()) continue;
        inputs.push_back(at::empty({0}));
        torch::autograd::impl::set_gradient_edge(inputs.back(), edge);
    }
    return inputs;
}

// Runs `compute` without recording. If the caller records a graph of the gradients (create_graph=True), the gradients
// depend on `sources` through a node that raises in its backward.
template <class Compute>
torch::autograd::variable_list once_differentiable(const torch::autograd::variable_list& sources, Compute&& compute) {
    const bool records_graph = at::GradMode::is_enabled();
    torch::autograd::variable_list gradients;
    {
        const at::NoGradGuard no_grad;
        gradients = compute();
    }
    if (!records_graph) return gradients;
    torch::autograd::variable_list defined;  // the gradient of an output that the loss does not use is undefined
    for (const at::Tensor& source : sources)
        if (source.defined()) defined.push_back(source);
    for (at::Tensor& gradient : gradients)
        if (gradient.defined()) gradient = RefuseSecondDerivative::apply(gradient, at::TensorList(defined));
    return gradients;
}

}  // namespace megatron_sb::ops
