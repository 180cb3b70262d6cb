// Dense and packed attention: one autograd function over the block contract.
#include "megatron_sb/attention.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/check.h"
#include "ops/once.h"
#include "ops/options.h"
#include "ops/registration.h"
#include "ops/tensors.h"
#include "ops/variants.h"

namespace megatron_sb {
namespace ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A call of attention or attention_varlen.
struct AttentionCall {
    at::Tensor q, k, v;
    AttentionOptions options;

    explicit AttentionCall(const Arguments& arguments)
        : q(arguments.tensor("q")),
          k(arguments.tensor("k")),
          v(arguments.tensor("v")),
          options(read_attention_options(arguments)) {}
};

// What the forward saves for the backward.
struct SavedAttention {
    at::Tensor q, k, v;
    at::Tensor segments;  // undefined for dense attention
    at::Tensor mass, restart_edge, restart_mass;
    std::optional<c10::SymInt> max_seqlen_k;
    BlockOptions options;

    void save(AutogradContext* ctx) const {
        ctx->save_for_backward({q, k, v, segments, mass, restart_edge, restart_mass});
        ctx->saved_data["max_seqlen_k"] = max_seqlen_k;
        ctx->saved_data["options"] = saved(options);
    }
    static SavedAttention load(AutogradContext* ctx) {
        const variable_list tensors = ctx->get_saved_variables();
        return {tensors[0],
                tensors[1],
                tensors[2],
                tensors[3],
                tensors[4],
                tensors[5],
                tensors[6],
                ctx->saved_data["max_seqlen_k"].to<std::optional<c10::SymInt>>(),
                restored_options(ctx->saved_data["options"])};
    }
};

// Takes q, k, v as block_forward does. segments: (n, 5), or none for dense attention. max_seqlen_k: no segment has more
// keys.
class Attend : public torch::autograd::Function<Attend> {
  public:
    static constexpr int kNumInputs = 6;

    static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const OptionalTensor& segments, const std::optional<c10::SymInt>& max_seqlen_k,
                                 const BlockOptions& options) {
        static const Operator block_forward("megatron_sb::block_forward");
        const NamedArguments inputs = {{"q", q}, {"k", k}, {"v", v}, {"segments", segments}, {"out_like_q", true}};
        const torch::jit::Stack results = block_forward.call(inputs, named(options));
        const at::Tensor o = results[0].toTensor(), mass = results[1].toTensor();
        SavedAttention{q,
                       k,
                       v,
                       segments.value_or(at::Tensor()),
                       mass,
                       results[2].toTensor(),
                       results[3].toTensor(),
                       max_seqlen_k,
                       options}
            .save(ctx);
        ctx->set_materialize_grads(false);
        return {o, mass};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const at::Tensor &d_o = grads[0], &d_mass = grads[1];
        if (!d_o.defined() && !d_mass.defined()) return variable_list(kNumInputs);
        const SavedAttention kept = SavedAttention::load(ctx);
        const at::Tensor &q = kept.q, &v = kept.v;
        variable_list gradients = once_differentiable({d_o, d_mass, q, kept.k, v}, [&]() -> variable_list {
            static const Operator block_backward("megatron_sb::block_backward");
            const auto zero_gradient = [&] {
                return at::zeros_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)}, q.options());
            };
            const NamedArguments inputs = {
                {"do", d_o.defined() ? unit_last_stride(d_o) : zero_gradient()},
                {"q", q},
                {"k", kept.k},
                {"v", v},
                {"segments", if_defined(kept.segments)},
                {"restart_edge", kept.restart_edge},
                {"restart_mass", kept.restart_mass},
                {"max_seqlen_k", kept.max_seqlen_k},
                {"prefix_in", d_mass.defined() ? OptionalTensor(kept.mass * d_mass) : std::nullopt},
                {"out_like_q", true}};
            const torch::jit::Stack results = block_backward.call(inputs, named(kept.options));
            return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
        });
        gradients.resize(kNumInputs);
        return gradients;
    }
};

// q, k, v of rank 4. The arguments have passed check_attention and check_variants. `options` are the block_options() of
// the call.
TensorPair attend(const AttentionCall& call, const BlockOptions& options, const OptionalTensor& segments,
                  const std::optional<c10::SymInt>& max_seqlen_k) {
    const BiasColumns columns = bias_columns(call.options, options.scale);
    const at::Tensor q = extended_queries(call.q, call.options.query_bias, columns);
    const at::Tensor k = extended_keys(call.k, call.options.key_bias, call.options.forget_gate, columns);
    const variable_list out = Attend::apply(unit_last_stride(q), unit_last_stride(k), unit_last_stride(call.v),
                                            segments, max_seqlen_k, options);
    return {out[0], out[1]};
}

}  // namespace

TensorPair attention(const Arguments& arguments) {
    const AttentionCall call(arguments);
    check_rank("q", call.q, 4, "(b, s, h, d)");
    check_rank("k", call.k, 4, "(b, s_k, h_kv, d)");
    check_rank("v", call.v, 4, "(b, s_k, h_kv, d_v)");
    check_lengths(call.q, call.k);
    check_attention(call.q, call.k, call.v);
    check_variants(call.q, call.k, call.options);
    return attend(call, block_options(call.options, call.q), std::nullopt, std::nullopt);
}

TensorPair attention_varlen(const Arguments& arguments) {
    AttentionCall call(arguments);
    check_rank("q", call.q, 3, "(t, h, d)");
    check_rank("k", call.k, 3, "(t_k, h_kv, d)");
    check_rank("v", call.v, 3, "(t_k, h_kv, d_v)");
    const at::Tensor cu_seqlens = arguments.tensor("cu_seqlens");
    const OptionalTensor own_cu_seqlens_k = arguments.optional_tensor("cu_seqlens_k");
    const at::Tensor cu_seqlens_k = own_cu_seqlens_k.value_or(cu_seqlens);
    check_cu_seqlens_form("cu_seqlens", cu_seqlens, call.q, "q");
    check_cu_seqlens_form("cu_seqlens_k", cu_seqlens_k, call.q, "q");
    const c10::SymInt q_rows = call.q.sym_size(0), k_rows = call.k.sym_size(0);
    TORCH_CHECK_VALUE(own_cu_seqlens_k.has_value() || q_rows == k_rows,
                      "without cu_seqlens_k, q and k must have equal numbers of rows, got ", q_rows, " and ", k_rows);
    const auto max_seqlen_k = arguments.get<std::optional<c10::SymInt>>("max_seqlen_k");
    TORCH_CHECK_VALUE(!max_seqlen_k.has_value() || *max_seqlen_k >= 0, "max_seqlen_k must be at least 0, got ",
                      max_seqlen_k.value_or(0));
    const at::Tensor packed_q = call.q, packed_k = call.k;
    for (at::Tensor* x : {&call.q, &call.k, &call.v}) *x = x->unsqueeze(0);
    check_attention(call.q, call.k, call.v);
    check_variants(packed_q, packed_k, call.options);  // its errors name the shapes without the batch
    const BlockOptions options = block_options(call.options, call.q);
    static const Operator segments("megatron_sb::segments");
    const torch::jit::Stack table = segments.call(
        {{"cu_seqlens", cu_seqlens}, {"cu_seqlens_k", cu_seqlens_k}, {"q_rows", q_rows}, {"k_rows", k_rows}});
    for (OptionalTensor* x : {&call.options.forget_gate, &call.options.query_bias, &call.options.key_bias})
        if (x->has_value()) *x = (*x)->unsqueeze(0);
    const auto [o, mass] = attend(call, options, table[0].toTensor(), max_seqlen_k);
    return {o.squeeze(0), mass.squeeze(0)};
}

}  // namespace ops

std::tuple<at::Tensor, at::Tensor> stickbreaking_attention(const at::Tensor& q, const at::Tensor& k,
                                                           const at::Tensor& v, const AttentionOptions& options) {
    static const ops::Operator attention("megatron_sb::attention");
    const ops::NamedArguments inputs = {{"q", q}, {"k", k}, {"v", v}};
    return ops::output_and_mass(attention.call(inputs, ops::named(options)));
}

std::tuple<at::Tensor, at::Tensor> stickbreaking_attention_varlen(const at::Tensor& q, const at::Tensor& k,
                                                                  const at::Tensor& v, const at::Tensor& cu_seqlens,
                                                                  const std::optional<at::Tensor>& cu_seqlens_k,
                                                                  const AttentionOptions& options) {
    static const ops::Operator attention_varlen("megatron_sb::attention_varlen");
    const ops::NamedArguments inputs = {
        {"q", q}, {"k", k}, {"v", v}, {"cu_seqlens", cu_seqlens}, {"cu_seqlens_k", cu_seqlens_k}};
    return ops::output_and_mass(attention_varlen.call(inputs, ops::named(options)));
}

}  // namespace megatron_sb
