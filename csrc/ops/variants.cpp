// Euclidean logits (NU-CS-2024-15) are dot products of wider heads:
//
//   -|q - k|^2 = q' . k',   q' = [2q, -|q|^2, 1],   k' = [k, 1, -|k|^2]
//
// So every kernel and every context-parallel mode supports them. A norm is computed in the accumulation type and stored
// in three columns: each column holds the next 8 bits, so that bf16 too holds 24 bits. The ones take three columns as
// well. A forget gate takes three columns of the same kind after its key.
#include "ops/variants.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/limits.h"
#include "core/params.h"
#include "ops/check.h"
#include "ops/extend.h"
#include "ops/once.h"
#include "ops/registration.h"
#include "ops/tensors.h"

namespace megatron_sb::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the forward of Extend saves for the backward.
struct SavedExtension {
    Norm norm;
    std::optional<at::ScalarType> gate_type;  // none without a forget gate
    at::Tensor extended;                      // undefined without norms

    void save(AutogradContext* ctx) const {
        ctx->save_for_backward({extended});
        ctx->saved_data["norm"] = static_cast<int64_t>(norm);
        ctx->saved_data["gate_type"] = gate_type;
    }
    static SavedExtension load(AutogradContext* ctx) {
        return {static_cast<Norm>(ctx->saved_data["norm"].toInt()),
                ctx->saved_data["gate_type"].toOptional<at::ScalarType>(), ctx->get_saved_variables()[0]};
    }
};

// Appends columns to x (batch, rows, heads, head_dim): [2x | norms, ones, 0] for queries, [x | ones, norms, 0 | gates,
// 0] for keys. The columns of a variant that is not used are left out.
class Extend : public torch::autograd::Function<Extend> {
  public:
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const std::optional<at::Tensor>& gate,
                              int64_t norm_value) {
        const auto norm = static_cast<Norm>(norm_value);
        const OptionalTensor wide_gate =
            gate.has_value() ? OptionalTensor(gate->to(accumulation_type(x))) : std::nullopt;
        const at::Tensor out = extend_forward(x, wide_gate, norm);
        const auto gate_type = gate.has_value() ? std::optional(gate->scalar_type()) : std::nullopt;
        SavedExtension{norm, gate_type, norm == Norm::kNone ? at::Tensor() : out}.save(ctx);
        return out;
    }

    // The gradient of a number is the gradient of its first part.
    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto [norm, gate_type, extended] = SavedExtension::load(ctx);
        const at::Tensor& d_out = grads[0];
        const c10::SymInt width = d_out.sym_size(-1) - (norm == Norm::kNone ? 0 : kNormColumns) -
                                  (gate_type.has_value() ? int64_t(kGateColumns) : int64_t(0));
        at::Tensor dx = d_out.narrow_symint(-1, 0, width), d_gate;
        if (norm != Norm::kNone)
            dx = once_differentiable({d_out, extended}, [&, norm = norm, extended = extended]() -> variable_list {
                return {extend_backward(d_out, extended, norm, width)};
            })[0];
        if (gate_type.has_value()) d_gate = d_out.select_symint(-1, d_out.sym_size(-1) - kGateColumns).to(*gate_type);
        return {dx, d_gate, at::Tensor()};
    }
};

// Extends x, which may be packed: (t, heads, head_dim).
at::Tensor extended(const at::Tensor& x, const std::optional<at::Tensor>& gate, Norm norm) {
    if (x.dim() == 4) return Extend::apply(x, gate, static_cast<int64_t>(norm));
    const OptionalTensor batched_gate = gate.has_value() ? OptionalTensor(gate->unsqueeze(0)) : std::nullopt;
    return Extend::apply(x.unsqueeze(0), batched_gate, static_cast<int64_t>(norm)).squeeze(0);
}

void check_heads(const char* name, const at::Tensor& x) {
    TORCH_CHECK_VALUE(x.dim() == 3 || x.dim() == 4, name, ": number of dimensions must be 4 (batch, rows, heads, ",
                      "head_dim) or 3 without batch, got ", x.dim());
    check_dtype(name, x);
    check_head_dim(name, x.sym_size(-1));
    if (x.dim() == 4) check_counts(name, x);
}

}  // namespace

void check_variants(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& options) {
    if (options.euclidean) {
        const c10::SymInt d = q.sym_size(-1);
        TORCH_CHECK_VALUE(d % kHeadDimMultiple == 0 && d > 0 && d <= kMaxHeadDim - kNormColumns,
                          "q: head_dim must be a multiple of ", kHeadDimMultiple, " and at most ",
                          kMaxHeadDim - kNormColumns, " with Euclidean logits, got ", d);
    }
    if (!options.forget_gate.has_value()) return;
    const at::Tensor& gate = *options.forget_gate;
    TORCH_CHECK_TYPE(gate.scalar_type() == q.scalar_type() || gate.scalar_type() == accumulation_type(q),
                     "forget_gate: dtype must be ", q.scalar_type(), " as in q or ", accumulation_type(q), ", got ",
                     gate.scalar_type());
    check_device("forget_gate", gate, k, "k");
    const auto expected = k.sym_sizes().slice(0, k.dim() - 1);
    TORCH_CHECK_VALUE(gate.sym_sizes() == expected, "forget_gate: shape must be ", expected,
                      ", one gate for each row and head of k, got ", gate.sym_sizes());
}

at::Tensor extended_queries(const at::Tensor& q, bool euclidean) {
    if (!euclidean) return q;
    return extended(q, std::nullopt, Norm::kOfQuery);
}

at::Tensor extended_keys(const at::Tensor& k, const std::optional<at::Tensor>& forget_gate, bool euclidean) {
    if (!euclidean && !forget_gate.has_value()) return k;
    return extended(k, forget_gate, euclidean ? Norm::kOfKey : Norm::kNone);
}

OneTensor queries_for_blocks(const Arguments& arguments) {
    const at::Tensor q = arguments.tensor("q");
    check_heads("q", q);
    AttentionOptions options;
    options.euclidean = arguments.get<bool>("euclidean");
    check_variants(q, q, options);
    return extended_queries(q, options.euclidean);
}

OneTensor keys_for_blocks(const Arguments& arguments) {
    const at::Tensor k = arguments.tensor("k");
    check_heads("k", k);
    AttentionOptions options;
    options.forget_gate = arguments.optional_tensor("forget_gate");
    options.euclidean = arguments.get<bool>("euclidean");
    check_variants(k, k, options);
    return extended_keys(k, options.forget_gate, options.euclidean);
}

}  // namespace megatron_sb::ops
