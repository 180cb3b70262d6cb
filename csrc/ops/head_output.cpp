// The remainder bias (paper eq. 14) and the head-wise norm: kernels/head_output on a GPU, tensor operations on a CPU.
#include "kernels/head_output/head_output.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "ops/check.h"
#include "ops/device.h"
#include "ops/once.h"
#include "ops/registration.h"
#include "ops/tensors.h"

namespace megatron_sb::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct HeadOutputCall {
    at::Tensor o;                                           // (b, s, h, d)
    OptionalTensor mass;                                    // (b, h, s), accumulation type
    OptionalTensor remainder_bias, norm_weight, norm_bias;  // (h * d,)
    double eps;

    NamedArguments named() const {
        return {{"o", o},
                {"mass", mass},
                {"remainder_bias", remainder_bias},
                {"norm_weight", norm_weight},
                {"norm_bias", norm_bias},
                {"eps", eps}};
    }
    // The tensors in the order of the members. An absent one is undefined.
    variable_list tensors() const {
        const auto given = [](const OptionalTensor& x) { return x.value_or(at::Tensor()); };
        return {o, given(mass), given(remainder_bias), given(norm_weight), given(norm_bias)};
    }
    void save(AutogradContext* ctx) const {
        ctx->save_for_backward(tensors());
        ctx->saved_data["eps"] = eps;
    }
    static HeadOutputCall load(AutogradContext* ctx) {
        const variable_list tensors = ctx->get_saved_variables();
        return {tensors[0],
                if_defined(tensors[1]),
                if_defined(tensors[2]),
                if_defined(tensors[3]),
                if_defined(tensors[4]),
                ctx->saved_data["eps"].toDouble()};
    }
};

HeadOutputCall read_call(const Arguments& arguments) {
    return {arguments.tensor("o"),
            arguments.optional_tensor("mass"),
            arguments.optional_tensor("remainder_bias"),
            arguments.optional_tensor("norm_weight"),
            arguments.optional_tensor("norm_bias"),
            arguments.get<double>("eps")};
}

// ---- checks, which also accept symbolic sizes
void check_head_vectors(const char* name, const OptionalTensor& x, const at::Tensor& o) {
    if (!x.has_value()) return;
    check_dtype(name, *x);
    check_device(name, *x, o, "o");
    TORCH_CHECK_VALUE(x->dim() == 1 && x->sym_size(0) == o.sym_size(2) * o.sym_size(3), name,
                      ": shape must be (heads * head_dim,) = (", o.sym_size(2) * o.sym_size(3), ",), got ",
                      x->sym_sizes());
}

void check_call(const HeadOutputCall& in) {
    constexpr double kMinEps = 1e-30;  // a normal number in fp32
    check_rank("o", in.o, 4, "(b, s, h, d)");
    check_dtype("o", in.o);
    TORCH_CHECK_TYPE(!in.o.is_cuda() || in.o.scalar_type() != at::kDouble,
                     "o: dtype must be float32, bfloat16 or float16 on a GPU, got Double");
    check_head_dim("o", in.o.sym_size(3));
    check_counts("o", in.o);
    TORCH_CHECK_VALUE(in.remainder_bias.has_value() || in.norm_weight.has_value(),
                      "remainder_bias and norm_weight are both missing. Pass at least one of them.");
    TORCH_CHECK_VALUE(in.norm_weight.has_value() || !in.norm_bias.has_value(),
                      "norm_weight must be given if norm_bias is given, got None");
    TORCH_CHECK_VALUE(in.mass.has_value() || !in.remainder_bias.has_value(),
                      "mass must be given if remainder_bias is given, got None");
    TORCH_CHECK_VALUE(std::isfinite(in.eps) && in.eps >= kMinEps, "eps must be finite and at least ", kMinEps, ", got ",
                      in.eps);
    if (in.mass.has_value()) check_row_values("mass", *in.mass, in.o, "o", accumulation_type(in.o));
    check_head_vectors("remainder_bias", in.remainder_bias, in.o);
    check_head_vectors("norm_weight", in.norm_weight, in.o);
    check_head_vectors("norm_bias", in.norm_bias, in.o);
}

void check_output_gradient(const at::Tensor& d_out, const at::Tensor& o) {
    TORCH_CHECK_TYPE(d_out.scalar_type() == o.scalar_type(), "d_out: dtype must be ", o.scalar_type(), " as in o, got ",
                     d_out.scalar_type());
    check_device("d_out", d_out, o, "o");
    TORCH_CHECK_VALUE(d_out.sym_sizes() == o.sym_sizes(), "d_out: shape must be ", o.sym_sizes(), " as in o, got ",
                      d_out.sym_sizes());
}

// ---- on a CPU, in the accumulation type
at::Tensor per_head(const at::Tensor& vectors, const at::Tensor& o) {
    return vectors.to(accumulation_type(o)).reshape({o.size(2), o.size(3)});
}

struct Normalised {
    at::Tensor x, rstd;
};
Normalised normalise(const at::Tensor& x, double eps) {
    const at::Tensor centred = x - x.mean(-1, true);
    const at::Tensor rstd = (centred.square().mean(-1, true) + eps).rsqrt();
    return {centred * rstd, rstd};
}

at::Tensor biased(const HeadOutputCall& in) {
    const at::Tensor x = in.o.to(accumulation_type(in.o));
    return in.remainder_bias.has_value() ? x + per_row(*in.mass) * per_head(*in.remainder_bias, in.o) : x;
}

at::Tensor forward_on_cpu(const HeadOutputCall& in) {
    at::Tensor x = biased(in);
    if (in.norm_weight.has_value()) x = normalise(x, in.eps).x * per_head(*in.norm_weight, in.o);
    if (in.norm_bias.has_value()) x = x + per_head(*in.norm_bias, in.o);
    return x.to(in.o.scalar_type()).contiguous();
}

HeadOutputGradients backward_on_cpu(const at::Tensor& d_out, const HeadOutputCall& in, HeadOutputGradients gradients) {
    auto& [d_o, d_mass, d_remainder_bias, d_norm_weight, d_norm_bias] = gradients;
    const auto over_rows = [](const at::Tensor& terms, at::Tensor& sum) {
        sum.copy_(terms.flatten(0, 1).sum(0).flatten());
    };
    at::Tensor d = d_out.to(accumulation_type(in.o));
    if (in.norm_weight.has_value()) {
        const auto [x, rstd] = normalise(biased(in), in.eps);
        over_rows(d * x, d_norm_weight);
        if (in.norm_bias.has_value()) over_rows(d, d_norm_bias);
        d = d * per_head(*in.norm_weight, in.o);
        d = (d - d.mean(-1, true) - x * (d * x).mean(-1, true)) * rstd;
    }
    if (in.remainder_bias.has_value()) {
        over_rows(per_row(*in.mass) * d, d_remainder_bias);
        d_mass.copy_((d * per_head(*in.remainder_bias, in.o)).sum(-1).transpose(1, 2));
    }
    d_o.copy_(d);
    return gradients;
}

// ---- on a GPU
#if defined(SB_WITH_CUDA)
template <class Pointer>
head_output::HeadVectors<Pointer> vectors_of(const at::Tensor& x) {
    return {x.data_ptr(), dtype_of(x.scalar_type())};
}

// The Inputs of the kernels, and the tensors that they point into.
class KernelInputs {
  public:
    explicit KernelInputs(const HeadOutputCall& in)
        : tensors_{aligned(unit_last_stride(in.o)), contiguous(in.mass),      contiguous(in.remainder_bias),
                   contiguous(in.norm_weight),      contiguous(in.norm_bias), in.eps} {
        const at::Tensor& o = tensors_.o;
        inputs_.dtype = dtype_of(o.scalar_type());
        inputs_.batch = int32_t(o.size(0));
        inputs_.rows = int32_t(o.size(1));
        inputs_.num_heads = int32_t(o.size(2));
        inputs_.head_dim = int32_t(o.size(3));
        inputs_.eps = float(in.eps);
        inputs_.o = strided_rows<const void*>(o);
        if (in.remainder_bias.has_value()) {
            inputs_.mass = tensors_.mass->const_data_ptr<float>();
            inputs_.remainder_bias = vectors_of<const void*>(*tensors_.remainder_bias);
        }
        if (in.norm_weight.has_value()) inputs_.norm_weight = vectors_of<const void*>(*tensors_.norm_weight);
        if (in.norm_bias.has_value()) inputs_.norm_bias = vectors_of<const void*>(*tensors_.norm_bias);
    }
    const head_output::Inputs& operator*() const { return inputs_; }

  private:
    HeadOutputCall tensors_;
    head_output::Inputs inputs_;
};

at::Tensor forward_on_gpu(const HeadOutputCall& in) {
    const DeviceScope scope(in.o.device());
    const at::Tensor out = at::empty(in.o.sizes(), in.o.options());
    if (out.numel() > 0) head_output::forward(*KernelInputs(in), strided_rows<void*>(out), scope.stream());
    return out;
}

HeadOutputGradients backward_on_gpu(const at::Tensor& d_out, const HeadOutputCall& in, HeadOutputGradients gradients) {
    const auto& [d_o, d_mass, d_remainder_bias, d_norm_weight, d_norm_bias] = gradients;
    if (in.o.numel() == 0) {
        for (const at::Tensor& sum : {d_remainder_bias, d_norm_weight, d_norm_bias}) sum.zero_();
        return gradients;
    }
    const DeviceScope scope(in.o.device());
    const KernelInputs inputs(in);
    const at::Tensor aligned_d_out = aligned(unit_last_stride(d_out));
    const at::Tensor workspace = empty_workspace(head_output::backward_workspace(*inputs), d_o);
    head_output::Gradients out;
    out.d_out = strided_rows<const void*>(aligned_d_out);
    out.d_o = strided_rows<void*>(d_o);
    if (in.remainder_bias.has_value()) {
        out.d_mass = d_mass.data_ptr<float>();
        out.d_remainder_bias = vectors_of<void*>(d_remainder_bias);
    }
    if (in.norm_weight.has_value()) out.d_norm_weight = vectors_of<void*>(d_norm_weight);
    if (in.norm_bias.has_value()) out.d_norm_bias = vectors_of<void*>(d_norm_bias);
    out.workspace = workspace.data_ptr();
    head_output::backward(*inputs, out, scope.stream());
    return gradients;
}
#else
at::Tensor forward_on_gpu(const HeadOutputCall& in) {
    TORCH_CHECK_VALUE(false, "o: device must be cpu in this CPU build of megatron_sb, got ", in.o.device());
}
HeadOutputGradients backward_on_gpu(const at::Tensor&, const HeadOutputCall& in, HeadOutputGradients) {
    TORCH_CHECK_VALUE(false, "o: device must be cpu in this CPU build of megatron_sb, got ", in.o.device());
}
#endif

// Returns contiguous gradient tensors. The gradient of an absent argument has no elements.
HeadOutputGradients empty_gradients(const HeadOutputCall& in) {
    const auto empty = [&](const OptionalTensor& x) {
        return x.has_value() ? at::empty_symint(x->sym_sizes(), x->options()) : at::empty({0}, in.o.options());
    };
    const OptionalTensor mass = in.remainder_bias.has_value() ? in.mass : std::nullopt;
    return {empty(in.o), empty(mass), empty(in.remainder_bias), empty(in.norm_weight), empty(in.norm_bias)};
}

class HeadOutput : public torch::autograd::Function<HeadOutput> {
  public:
    static constexpr int kNumInputs = 6;

    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& o, const OptionalTensor& mass,
                              const OptionalTensor& remainder_bias, const OptionalTensor& norm_weight,
                              const OptionalTensor& norm_bias, double eps) {
        const HeadOutputCall call{o, mass, remainder_bias, norm_weight, norm_bias, eps};
        call.save(ctx);
        ctx->set_materialize_grads(false);
        static const Operator head_output_forward("megatron_sb::head_output_forward");
        return head_output_forward.call(call.named())[0].toTensor();
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        if (!grads[0].defined()) return variable_list(kNumInputs);
        const HeadOutputCall call = HeadOutputCall::load(ctx);
        const variable_list inputs = call.tensors();
        variable_list sources = inputs;
        sources.push_back(grads[0]);
        return once_differentiable(sources, [&]() -> variable_list {
            static const Operator head_output_backward("megatron_sb::head_output_backward");
            const torch::jit::Stack results = head_output_backward.call({{"d_out", grads[0]}}, call.named());
            variable_list gradients(kNumInputs);
            for (size_t i = 0; i < inputs.size(); ++i)
                if (inputs[i].defined()) gradients[i] = results[i].toTensor();
            return gradients;
        });
    }
};

}  // namespace

OneTensor head_output(const Arguments& arguments) {
    HeadOutputCall in = read_call(arguments);
    check_defined("o", in.o);
    if (in.mass.has_value()) check_defined("mass", *in.mass);
    TORCH_CHECK_VALUE(in.o.dim() == 3 || in.o.dim() == 4,
                      "o must have 4 dimensions, (b, s, h, d), or 3 if packed, (t, h, d), got ", in.o.dim());
    TORCH_CHECK_VALUE(!in.mass.has_value() || in.mass->dim() == in.o.dim() - 1, "mass must have ", in.o.dim() - 1,
                      " dimensions, ", in.o.dim() == 4 ? "(b, h, s)" : "(h, t)", ", as o has ", in.o.dim(), ", got ",
                      in.mass->dim());
    const bool packed = in.o.dim() == 3;
    if (packed) {
        // Here, so that the error names shapes without the batch.
        if (in.mass.has_value()) check_row_values("mass", *in.mass, in.o, "o", accumulation_type(in.o));
        in.o = in.o.unsqueeze(0);
        if (in.mass.has_value()) in.mass = in.mass->unsqueeze(0);
    }
    check_call(in);
    const OptionalTensor used_mass = in.remainder_bias.has_value() ? in.mass : std::nullopt;
    const at::Tensor out =
        HeadOutput::apply(unit_last_stride(in.o), used_mass, in.remainder_bias, in.norm_weight, in.norm_bias, in.eps);
    return packed ? out.squeeze(0) : out;
}

OneTensor head_output_forward(const Arguments& arguments) {
    const HeadOutputCall in = read_call(arguments);
    check_call(in);
    return in.o.is_cpu() ? forward_on_cpu(in) : forward_on_gpu(in);
}

HeadOutputGradients head_output_backward(const Arguments& arguments) {
    const HeadOutputCall in = read_call(arguments);
    const at::Tensor d_out = arguments.tensor("d_out");
    check_call(in);
    check_output_gradient(d_out, in.o);
    const auto backward = in.o.is_cpu() ? backward_on_cpu : backward_on_gpu;
    return backward(d_out, in, empty_gradients(in));
}

OneTensor head_output_forward_fake(const Arguments& arguments) {
    const HeadOutputCall in = read_call(arguments);
    check_call(in);
    return at::empty_symint(in.o.sym_sizes(), in.o.options());
}

HeadOutputGradients head_output_backward_fake(const Arguments& arguments) {
    const HeadOutputCall in = read_call(arguments);
    check_call(in);
    check_output_gradient(arguments.tensor("d_out"), in.o);
    return empty_gradients(in);
}

}  // namespace megatron_sb::ops
