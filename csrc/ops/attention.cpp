// Dense and packed attention: one autograd function over the block contract.
#include "megatron_sb/attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/block.h"
#include "ops/check.h"
#include "ops/once.h"
#include "ops/registration.h"
#include "ops/variants.h"

namespace megatron_sb {
namespace ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// q, k, v as block_forward takes them; segments, or none for the dense form.
class Attend : public torch::autograd::Function<Attend> {
  public:
    static constexpr int kNumInputs = 8;

    static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const OptionalTensor& segments, double scale, bool attend_current,
                                 double mass_threshold, bool forget_gate) {
        static const auto op = registered("megatron_sb::block_forward", block_forward_op);
        const auto [o, mass, restart_edge, restart_mass] = op.call(
            q, k, v, segments, std::nullopt, scale, attend_current, mass_threshold, q.scalar_type(), forget_gate);
        ctx->save_for_backward({q, k, v, segments.value_or(at::Tensor()), mass, restart_edge, restart_mass});
        ctx->saved_data["scale"] = scale;
        ctx->saved_data["attend_current"] = attend_current;
        ctx->saved_data["mass_threshold"] = mass_threshold;
        ctx->saved_data["forget_gate"] = forget_gate;
        ctx->set_materialize_grads(false);
        return {o, mass};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const variable_list saved = ctx->get_saved_variables();
        const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &mass = saved[4];
        const OptionalTensor segments = saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt;
        if (!grads[0].defined() && !grads[1].defined()) return variable_list(kNumInputs);
        variable_list gradients = once_differentiable({grads[0], grads[1], q, k, v}, [&]() -> variable_list {
            const at::Tensor d_o =
                grads[0].defined()
                    ? unit_last_stride(grads[0])
                    : at::zeros_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)}, q.options());
            const OptionalTensor prefix = grads[1].defined() ? OptionalTensor(mass * grads[1]) : std::nullopt;
            static const auto op = registered("megatron_sb::block_backward", block_backward_op);
            const auto [dq, dk, dv, prefix_out] = op.call(
                d_o, q, k, v, segments, saved[5], saved[6], std::nullopt, prefix, ctx->saved_data["scale"].toDouble(),
                ctx->saved_data["attend_current"].toBool(), ctx->saved_data["mass_threshold"].toDouble(),
                q.scalar_type(), ctx->saved_data["forget_gate"].toBool());
            return {dq, dk, dv};
        });
        gradients.resize(kNumInputs);
        return gradients;
    }
};

Two attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& segments,
           std::optional<double> scale, bool attend_current, double mass_threshold, const Variants& variants) {
    check_attention(q, k, v);
    check_variants(q, k, variants);
    const double used_scale = scale_of(scale, q, variants);
    check_options(used_scale, mass_threshold);
    const Extended x = extended(q, k, variants);
    const variable_list out =
        Attend::apply(unit_last_stride(x.q), unit_last_stride(x.k), unit_last_stride(v), segments, used_scale,
                      attend_current, mass_threshold, variants.forget_gate.has_value());
    return {out[0], out[1]};
}

void check_rank(const char* name, const at::Tensor& x, int64_t rank, const char* shape) {
    TORCH_CHECK_VALUE(x.dim() == rank, name, ": has ", x.dim(), " dimensions; ", rank, ", ", shape, ", are needed");
}

}  // namespace

Two attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::optional<double> scale,
              bool attend_current, double mass_threshold, const OptionalTensor& forget_gate, bool euclidean) {
    check_rank("q", q, 4, "(b, s, h, d)");
    check_rank("k", k, 4, "(b, s_k, h_kv, d)");
    check_rank("v", v, 4, "(b, s_k, h_kv, d_v)");
    check_lengths(q, k);
    return attend(q, k, v, std::nullopt, scale, attend_current, mass_threshold, {forget_gate, euclidean});
}

Two attention_varlen(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
                     const OptionalTensor& cu_seqlens_k, std::optional<double> scale, bool attend_current,
                     double mass_threshold, const OptionalTensor& forget_gate, bool euclidean) {
    check_rank("q", q, 3, "(t, h, d)");
    check_rank("k", k, 3, "(t_k, h_kv, d)");
    check_rank("v", v, 3, "(t_k, h_kv, d_v)");
    const at::Tensor keys = cu_seqlens_k.value_or(cu_seqlens);
    check_cu_seqlens_form("cu_seqlens", cu_seqlens, q);
    check_cu_seqlens_form("cu_seqlens_k", keys, q);
    TORCH_CHECK_VALUE(cu_seqlens_k.has_value() || q.sym_size(0) == k.sym_size(0), "q has ", q.sym_size(0),
                      " rows and k has ", k.sym_size(0), "; where they differ, cu_seqlens_k is needed");
    static const auto op = registered("megatron_sb::segments", segments);
    const at::Tensor table = op.call(cu_seqlens, keys, q.sym_size(0), k.sym_size(0));
    const OptionalTensor gate = forget_gate ? OptionalTensor(forget_gate->unsqueeze(0)) : std::nullopt;
    const auto [o, mass] = attend(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), table, scale, attend_current,
                                  mass_threshold, {gate, euclidean});
    return {o.squeeze(0), mass.squeeze(0)};
}

}  // namespace ops

std::tuple<at::Tensor, at::Tensor> stickbreaking_attention(const at::Tensor& q, const at::Tensor& k,
                                                           const at::Tensor& v, const AttentionOptions& options) {
    static const auto op = ops::registered("megatron_sb::attention", ops::attention);
    return op.call(q, k, v, options.scale, options.attend_current, options.mass_threshold, options.forget_gate,
                   options.euclidean);
}

std::tuple<at::Tensor, at::Tensor> stickbreaking_attention_varlen(const at::Tensor& q, const at::Tensor& k,
                                                                  const at::Tensor& v, const at::Tensor& cu_seqlens,
                                                                  const std::optional<at::Tensor>& cu_seqlens_k,
                                                                  const AttentionOptions& options) {
    static const auto op = ops::registered("megatron_sb::attention_varlen", ops::attention_varlen);
    return op.call(q, k, v, cu_seqlens, cu_seqlens_k, options.scale, options.attend_current, options.mass_threshold,
                   options.forget_gate, options.euclidean);
}

}  // namespace megatron_sb
