// Biases of the logits are columns of wider heads: scale q.k + query_bias + key_bias = scale q' . k' with
//
//   q' = [q, query_bias / scale, 1],   k' = [k, 1, key_bias / scale]
//
// Euclidean logits (NU-CS-2024-15) use the same columns, because -|q - k|^2 = 2 q.k - |q|^2 - |k|^2:
//
//   q' = [2q, query_bias / scale - |q|^2, 1],   k' = [k, 1, key_bias / scale - |k|^2]
//
// So every kernel and every context-parallel mode supports them. The number after the channels is computed in the
// accumulation type and stored in three columns: each column holds the next 8 bits, so that bf16 too holds 24 bits. The
// ones take three columns as well. A forget gate takes three columns of the same kind after its key.
#include "ops/variants.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "core/limits.h"
#include "core/params.h"
#include "ops/check.h"
#include "ops/extend.h"
#include "ops/once.h"
#include "ops/options.h"
#include "ops/registration.h"
#include "ops/tensors.h"

namespace megatron_sb::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalType = std::optional<at::ScalarType>;

// The least scale with biases. Columns hold bias / scale, and at most 2^100 (extend.cpp): with this scale, biases of up
// to 2^36, and an infinity still hides its key. Also in megatron_sb/ops/kvcache.py.
constexpr double kLeastScale = 0x1p-64;

OptionalType type_of(const OptionalTensor& x) {
    return x.has_value() ? OptionalType(x->scalar_type()) : std::nullopt;
}

// What the forward of Extend saves for the backward.
struct SavedExtension {
    Columns columns;
    OptionalType bias_type, gate_type;  // none without the tensor
    at::Tensor extended;                // undefined without norms

    void save(AutogradContext* ctx) const {
        ctx->save_for_backward({extended});
        ctx->saved_data["side"] = static_cast<int64_t>(columns.side);
        ctx->saved_data["norms"] = columns.norms;
        ctx->saved_data["scale"] = columns.scale;
        ctx->saved_data["bias_type"] = bias_type;
        ctx->saved_data["gate_type"] = gate_type;
    }
    static SavedExtension load(AutogradContext* ctx) {
        auto& data = ctx->saved_data;
        return {{static_cast<Side>(data["side"].toInt()), data["norms"].toBool(), data["scale"].toDouble()},
                data["bias_type"].toOptional<at::ScalarType>(),
                data["gate_type"].toOptional<at::ScalarType>(),
                ctx->get_saved_variables()[0]};
    }
};

// Appends columns to x (batch, rows, heads, head_dim): [x | number, ones, 0] for queries, [x | ones, number, 0 | gates,
// 0] for keys. The columns of a variant that is not used are left out.
class Extend : public torch::autograd::Function<Extend> {
  public:
    static constexpr int kNumInputs = 6;

    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const OptionalTensor& bias,
                              const OptionalTensor& gate, int64_t side, bool norms, double scale) {
        const Columns columns{static_cast<Side>(side), norms, scale};
        const auto wide = [&](const OptionalTensor& given) {
            return given.has_value() ? OptionalTensor(given->to(accumulation_type(x))) : std::nullopt;
        };
        const at::Tensor out = extend_forward(x, wide(bias), wide(gate), columns);
        SavedExtension{columns, type_of(bias), type_of(gate), norms ? out : at::Tensor()}.save(ctx);
        return out;
    }

    // The gradient of a number is the gradient of its first part.
    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = SavedExtension::load(ctx);
        const Columns& columns = saved.columns;
        const at::Tensor& d_out = grads[0];
        const c10::SymInt width =
            d_out.sym_size(-1) - columns.count() - (saved.gate_type.has_value() ? int64_t(kGateColumns) : int64_t(0));
        variable_list gradients(kNumInputs);
        gradients[0] = d_out.narrow_symint(-1, 0, width);
        if (columns.norms)
            gradients[0] = once_differentiable({d_out, saved.extended}, [&]() -> variable_list {
                return {extend_backward(d_out, saved.extended, columns.side, width)};
            })[0];
        if (saved.bias_type.has_value()) {
            const at::Tensor d_number = d_out.select_symint(-1, width + columns.number()).to(accumulation_type(d_out));
            gradients[1] = (d_number / columns.scale / number_unit(d_out.scalar_type())).to(*saved.bias_type);
        }
        if (saved.gate_type.has_value())
            gradients[2] = d_out.select_symint(-1, d_out.sym_size(-1) - kGateColumns).to(*saved.gate_type);
        return gradients;
    }
};

// Extends x, which may be packed: (t, heads, head_dim).
at::Tensor extended(const at::Tensor& x, const OptionalTensor& bias, const OptionalTensor& gate, Side side,
                    const BiasColumns& columns) {
    const auto extend = [&](const at::Tensor& x, const OptionalTensor& bias, const OptionalTensor& gate) {
        return Extend::apply(x, bias, gate, static_cast<int64_t>(side), columns.norms, columns.scale);
    };
    const auto batched = [](const OptionalTensor& value) {
        return value.has_value() ? OptionalTensor(value->unsqueeze(0)) : std::nullopt;
    };
    return x.dim() == 4 ? extend(x, bias, gate) : extend(x.unsqueeze(0), batched(bias), batched(gate)).squeeze(0);
}

void check_heads(const char* name, const at::Tensor& x) {
    TORCH_CHECK_VALUE(x.dim() == 3 || x.dim() == 4, name, ": number of dimensions must be 4 (batch, rows, heads, ",
                      "head_dim) or 3 without batch, got ", x.dim());
    check_dtype(name, x);
    check_head_dim(name, x.sym_size(-1));
    if (x.dim() == 4) check_counts(name, x);
}

// Checks a tensor with one value for each row and head of `like` (.., heads, head_dim), if it is given.
void check_values(const char* name, const OptionalTensor& values, const char* what, const char* like_name,
                  const at::Tensor& like) {
    if (!values.has_value()) return;
    check_defined(name, *values);
    const at::ScalarType type = like.scalar_type(), wide = accumulation_type(like);
    TORCH_CHECK_TYPE(values->scalar_type() == type || values->scalar_type() == wide, name, ": dtype must be ", type,
                     " as in ", like_name, type == wide ? "" : c10::str(" or ", wide), ", got ", values->scalar_type());
    check_device(name, *values, like, like_name);
    const auto expected = like.sym_sizes().slice(0, like.dim() - 1);
    TORCH_CHECK_VALUE(values->sym_sizes() == expected, name, ": shape must be ", expected, ", one ", what,
                      " for each row and head of ", like_name, ", got ", values->sym_sizes());
}

}  // namespace

void check_variants(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& options, bool stored_biases,
                    const char* q_name) {
    const bool biases = options.query_bias.has_value() || options.key_bias.has_value() || stored_biases;
    if (options.euclidean || biases) {
        const c10::SymInt d = q.sym_size(-1);
        TORCH_CHECK_VALUE(d % kHeadDimMultiple == 0 && d > 0 && d <= kMaxHeadDim - kBiasColumns, q_name,
                          ": head_dim must be a multiple of ", kHeadDimMultiple, " and at most ",
                          kMaxHeadDim - kBiasColumns, " with ",
                          options.euclidean ? "Euclidean logits" : "query_bias or key_bias", ", got ", d);
    }
    TORCH_CHECK_VALUE(!biases || !(std::abs(options.scale.value_or(1)) < kLeastScale),
                      "scale must not be 0 with query_bias or key_bias: its magnitude must be at least ", kLeastScale,
                      ", got ", options.scale.value_or(1));
    check_values("query_bias", options.query_bias, "bias", "q", q);
    check_values("key_bias", options.key_bias, "bias", "k", k);
    check_values("forget_gate", options.forget_gate, "gate", "k", k);
}

BiasColumns bias_columns(const AttentionOptions& options, double scale) {
    return {has_bias_columns(options), options.euclidean, scale};
}

at::Tensor extended_queries(const at::Tensor& q, const OptionalTensor& query_bias, const BiasColumns& columns) {
    if (!columns.exist) return q;
    return extended(q, query_bias, std::nullopt, Side::kQuery, columns);
}

at::Tensor extended_keys(const at::Tensor& k, const OptionalTensor& key_bias, const OptionalTensor& forget_gate,
                         const BiasColumns& columns) {
    if (!columns.exist && !forget_gate.has_value()) return k;
    return extended(k, key_bias, forget_gate, columns.exist ? Side::kKey : Side::kNone, columns);
}

OneTensor queries_for_blocks(const Arguments& arguments) {
    const at::Tensor q = arguments.tensor("q");
    check_heads("q", q);
    AttentionOptions options;
    options.euclidean = arguments.get<bool>("euclidean");
    options.query_bias = arguments.optional_tensor("query_bias");
    options.scale = arguments.get<std::optional<double>>("scale");
    check_variants(q, q, options);
    return extended_queries(q, options.query_bias, bias_columns(options, block_options(options, q).scale));
}

OneTensor keys_for_blocks(const Arguments& arguments) {
    const at::Tensor k = arguments.tensor("k");
    check_heads("k", k);
    AttentionOptions options;
    options.euclidean = arguments.get<bool>("euclidean");
    options.key_bias = arguments.optional_tensor("key_bias");
    options.forget_gate = arguments.optional_tensor("forget_gate");
    options.scale = arguments.get<std::optional<double>>("scale");
    check_variants(k, k, options, false, "k");
    return extended_keys(k, options.key_bias, options.forget_gate,
                         bias_columns(options, block_options(options, k).scale));
}

}  // namespace megatron_sb::ops
