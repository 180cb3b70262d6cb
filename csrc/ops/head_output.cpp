// The remainder bias (paper eq. 14) and the norm of each head: kernels/head_output on a GPU, tensor operations on a
// CPU.
#include "kernels/head_output/head_output.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "core/limits.h"
#include "ops/block.h"
#include "ops/check.h"
#include "ops/device.h"
#include "ops/once.h"
#include "ops/registration.h"

namespace megatron_sb::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Arguments {
    at::Tensor o;                                           // (b, s, h, d)
    OptionalTensor mass;                                    // (b, h, s), accumulation type
    OptionalTensor remainder_bias, norm_weight, norm_bias;  // (h * d,)
    double eps;
};

// ---- check: works on symbolic sizes too
void check_head_vectors(const char* name, const OptionalTensor& x, const at::Tensor& o) {
    if (!x.has_value()) return;
    check_dtype(name, *x);
    TORCH_CHECK_VALUE(x->device() == o.device(), name, ": device is ", x->device(), " but o's is ", o.device());
    TORCH_CHECK_VALUE(x->dim() == 1 && x->sym_size(0) == o.sym_size(2) * o.sym_size(3), name, ": shape is ",
                      x->sym_sizes(), "; (heads * head_dim,) = (", o.sym_size(2) * o.sym_size(3), ",) is needed");
}

void check_mass(const at::Tensor& mass, const at::Tensor& o) {
    TORCH_CHECK_TYPE(mass.scalar_type() == accumulation_type(o), "mass: dtype is ", mass.scalar_type(), "; ",
                     accumulation_type(o), " is needed");
    TORCH_CHECK_VALUE(mass.device() == o.device(), "mass: device is ", mass.device(), " but o's is ", o.device());
    TORCH_CHECK_VALUE(mass.dim() == 3 && mass.sym_size(0) == o.sym_size(0) && mass.sym_size(1) == o.sym_size(2) &&
                          mass.sym_size(2) == o.sym_size(1),
                      "mass: shape is ", mass.sym_sizes(), "; (", o.sym_size(0), ", ", o.sym_size(2), ", ",
                      o.sym_size(1), "), (batch, heads, rows) of o, is needed");
}

void check_arguments(const Arguments& in) {
    constexpr double kLeastEps = 1e-30;  // still a normal number in fp32
    TORCH_CHECK_VALUE(in.o.dim() == 4, "o: has ", in.o.dim(), " dimensions; 4, (b, s, h, d), are needed");
    check_dtype("o", in.o);
    TORCH_CHECK_TYPE(!in.o.is_cuda() || in.o.scalar_type() != at::kDouble,
                     "o: dtype is Double; float32, bfloat16 and float16 are allowed on a GPU");
    check_head_dim("o", in.o.sym_size(3));
    TORCH_CHECK_VALUE(in.o.sym_size(1) <= kMaxRows, "o has ", in.o.sym_size(1), " rows; up to ", kMaxRows,
                      " are allowed");
    TORCH_CHECK_VALUE(in.remainder_bias.has_value() || in.norm_weight.has_value(),
                      "remainder_bias and norm_weight are both missing; one of them is needed");
    TORCH_CHECK_VALUE(in.norm_weight.has_value() || !in.norm_bias.has_value(),
                      "norm_bias was given without norm_weight; it needs one");
    TORCH_CHECK_VALUE(in.mass.has_value() || !in.remainder_bias.has_value(), "remainder_bias needs the mass");
    TORCH_CHECK_VALUE(std::isfinite(in.eps) && in.eps >= kLeastEps, "eps is ", in.eps, "; a finite number from ",
                      kLeastEps, " on is allowed");
    if (in.mass.has_value()) check_mass(*in.mass, in.o);
    check_head_vectors("remainder_bias", in.remainder_bias, in.o);
    check_head_vectors("norm_weight", in.norm_weight, in.o);
    check_head_vectors("norm_bias", in.norm_bias, in.o);
}

void check_output_gradient(const at::Tensor& d_out, const at::Tensor& o) {
    TORCH_CHECK_TYPE(d_out.scalar_type() == o.scalar_type(), "d_out: dtype is ", d_out.scalar_type(), "; o's, ",
                     o.scalar_type(), ", is needed");
    TORCH_CHECK_VALUE(d_out.sym_sizes() == o.sym_sizes(), "d_out: shape is ", d_out.sym_sizes(), "; o's, ",
                      o.sym_sizes(), ", is needed");
}

// ---- on a CPU, in the accumulation type
at::Tensor per_head(const at::Tensor& vectors, const at::Tensor& o) {
    return vectors.to(accumulation_type(o)).reshape({o.size(2), o.size(3)});
}
at::Tensor per_row(const at::Tensor& mass) {
    return mass.transpose(1, 2).unsqueeze(-1);
}

struct Normalised {
    at::Tensor x, rstd;
};
Normalised normalise(const at::Tensor& x, double eps) {
    const at::Tensor centred = x - x.mean(-1, true);
    const at::Tensor rstd = (centred.square().mean(-1, true) + eps).rsqrt();
    return {centred * rstd, rstd};
}

at::Tensor biased(const Arguments& in) {
    const at::Tensor x = in.o.to(accumulation_type(in.o));
    return in.remainder_bias.has_value() ? x + per_row(*in.mass) * per_head(*in.remainder_bias, in.o) : x;
}

at::Tensor forward_on_cpu(const Arguments& in) {
    at::Tensor x = biased(in);
    if (in.norm_weight.has_value()) x = normalise(x, in.eps).x * per_head(*in.norm_weight, in.o);
    if (in.norm_bias.has_value()) x = x + per_head(*in.norm_bias, in.o);
    return x.to(in.o.scalar_type()).contiguous();
}

Five backward_on_cpu(const at::Tensor& d_out, const Arguments& in, Five gradients) {
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
OptionalTensor contiguous(const OptionalTensor& x) {
    return x.has_value() ? OptionalTensor(x->contiguous()) : std::nullopt;
}

template <class Pointer>
head_output::HeadVectors<Pointer> vectors_of(const at::Tensor& x) {
    return {x.data_ptr(), dtype_of(x.scalar_type())};
}

// The arguments as the kernels take them: their Inputs, and the tensors that these point into.
class KernelInputs {
  public:
    explicit KernelInputs(const Arguments& in)
        : tensors_{aligned(unit_last_stride(in.o)), contiguous(in.mass),      contiguous(in.remainder_bias),
                   contiguous(in.norm_weight),      contiguous(in.norm_bias), in.eps} {
        const at::Tensor& o = tensors_.o;
        inputs_.dtype = dtype_of(o.scalar_type());
        inputs_.batch = int32_t(o.size(0));
        inputs_.rows = int32_t(o.size(1));
        inputs_.num_heads = int32_t(o.size(2));
        inputs_.head_dim = int32_t(o.size(3));
        inputs_.eps = float(in.eps);
        inputs_.o = rows_of<const void*>(o);
        if (in.remainder_bias.has_value()) {
            inputs_.mass = tensors_.mass->const_data_ptr<float>();
            inputs_.remainder_bias = vectors_of<const void*>(*tensors_.remainder_bias);
        }
        if (in.norm_weight.has_value()) inputs_.norm_weight = vectors_of<const void*>(*tensors_.norm_weight);
        if (in.norm_bias.has_value()) inputs_.norm_bias = vectors_of<const void*>(*tensors_.norm_bias);
    }
    const head_output::Inputs& operator*() const { return inputs_; }

  private:
    Arguments tensors_;
    head_output::Inputs inputs_;
};

at::Tensor forward_on_gpu(const Arguments& in) {
    const DeviceScope scope(in.o.device());
    const at::Tensor out = at::empty(in.o.sizes(), in.o.options());
    if (out.numel() > 0) head_output::forward(*KernelInputs(in), rows_of<void*>(out), scope.stream());
    return out;
}

Five backward_on_gpu(const at::Tensor& d_out, const Arguments& in, Five gradients) {
    const auto& [d_o, d_mass, d_remainder_bias, d_norm_weight, d_norm_bias] = gradients;
    if (in.o.numel() == 0) {
        for (const at::Tensor& sum : {d_remainder_bias, d_norm_weight, d_norm_bias}) sum.zero_();
        return gradients;
    }
    const DeviceScope scope(in.o.device());
    const KernelInputs inputs(in);
    const at::Tensor given = aligned(unit_last_stride(d_out));
    const at::Tensor workspace = at::empty({head_output::backward_workspace(*inputs)}, d_o.options().dtype(at::kByte));
    head_output::Gradients out;
    out.d_out = rows_of<const void*>(given);
    out.d_o = rows_of<void*>(d_o);
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
at::Tensor forward_on_gpu(const Arguments& in) {
    TORCH_CHECK_VALUE(false, "o: device is ", in.o.device(), ", but this is a CPU build of megatron_sb");
}
Five backward_on_gpu(const at::Tensor&, const Arguments& in, Five) {
    TORCH_CHECK_VALUE(false, "o: device is ", in.o.device(), ", but this is a CPU build of megatron_sb");
}
#endif

// Contiguous tensors of the gradients' shapes and dtypes; without elements where there is no such argument.
Five empty_gradients(const Arguments& in) {
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
        static const auto op = registered("megatron_sb::head_output_forward", head_output_forward);
        ctx->save_for_backward({o, mass.value_or(at::Tensor()), remainder_bias.value_or(at::Tensor()),
                                norm_weight.value_or(at::Tensor()), norm_bias.value_or(at::Tensor())});
        ctx->saved_data["eps"] = eps;
        ctx->set_materialize_grads(false);
        return op.call(o, mass, remainder_bias, norm_weight, norm_bias, eps);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        if (!grads[0].defined()) return variable_list(kNumInputs);
        const variable_list saved = ctx->get_saved_variables();
        const auto given = [&](int i) { return saved[i].defined() ? OptionalTensor(saved[i]) : std::nullopt; };
        variable_list sources = saved;
        sources.push_back(grads[0]);
        return once_differentiable(sources, [&]() -> variable_list {
            static const auto op = registered("megatron_sb::head_output_backward", head_output_backward);
            const auto [d_o, d_mass, d_remainder_bias, d_norm_weight, d_norm_bias] =
                op.call(grads[0], saved[0], given(1), given(2), given(3), given(4), ctx->saved_data["eps"].toDouble());
            variable_list gradients = {d_o, d_mass, d_remainder_bias, d_norm_weight, d_norm_bias, at::Tensor()};
            for (size_t i = 0; i < saved.size(); ++i)
                if (!saved[i].defined()) gradients[i] = at::Tensor();
            return gradients;
        });
    }
};

}  // namespace

at::Tensor head_output(const at::Tensor& o, const OptionalTensor& mass, const OptionalTensor& remainder_bias,
                       const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps) {
    TORCH_CHECK_VALUE(o.dim() == 3 || o.dim() == 4, "o: has ", o.dim(),
                      " dimensions; 4, (b, s, h, d), or packed 3, (t, h, d), are needed");
    TORCH_CHECK_VALUE(!mass.has_value() || mass->dim() == o.dim() - 1, "mass: has ", mass->dim(),
                      " dimensions but o has ", o.dim(), "; (b, h, s) goes with (b, s, h, d), (h, t) with (t, h, d)");
    const bool packed = o.dim() == 3;
    const auto batched = [&](const at::Tensor& x) { return packed ? x.unsqueeze(0) : x; };
    const OptionalTensor batched_mass = mass.has_value() ? OptionalTensor(batched(*mass)) : std::nullopt;
    check_arguments({batched(o), batched_mass, remainder_bias, norm_weight, norm_bias, eps});
    const at::Tensor out =
        HeadOutput::apply(unit_last_stride(batched(o)), remainder_bias.has_value() ? batched_mass : std::nullopt,
                          remainder_bias, norm_weight, norm_bias, eps);
    return packed ? out.squeeze(0) : out;
}

at::Tensor head_output_forward(const at::Tensor& o, const OptionalTensor& mass, const OptionalTensor& remainder_bias,
                               const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps) {
    const Arguments in = {o, mass, remainder_bias, norm_weight, norm_bias, eps};
    check_arguments(in);
    return o.is_cpu() ? forward_on_cpu(in) : forward_on_gpu(in);
}

Five head_output_backward(const at::Tensor& d_out, const at::Tensor& o, const OptionalTensor& mass,
                          const OptionalTensor& remainder_bias, const OptionalTensor& norm_weight,
                          const OptionalTensor& norm_bias, double eps) {
    const Arguments in = {o, mass, remainder_bias, norm_weight, norm_bias, eps};
    check_arguments(in);
    check_output_gradient(d_out, o);
    const auto backward = o.is_cpu() ? backward_on_cpu : backward_on_gpu;
    return backward(d_out, in, empty_gradients(in));
}

at::Tensor head_output_forward_meta(const at::Tensor& o, const OptionalTensor& mass,
                                    const OptionalTensor& remainder_bias, const OptionalTensor& norm_weight,
                                    const OptionalTensor& norm_bias, double eps) {
    check_arguments({o, mass, remainder_bias, norm_weight, norm_bias, eps});
    return at::empty_symint(o.sym_sizes(), o.options());
}

Five head_output_backward_meta(const at::Tensor& d_out, const at::Tensor& o, const OptionalTensor& mass,
                               const OptionalTensor& remainder_bias, const OptionalTensor& norm_weight,
                               const OptionalTensor& norm_bias, double eps) {
    const Arguments in = {o, mass, remainder_bias, norm_weight, norm_bias, eps};
    check_arguments(in);
    check_output_gradient(d_out, o);
    return empty_gradients(in);
}

}  // namespace megatron_sb::ops
