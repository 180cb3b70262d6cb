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
#include "ops/registration.h"
#include "ops/tensors.h"

namespace megatron_sb::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kParts = kGateParts;  // columns of one number
constexpr int64_t kNormColumns = 8;     // columns of norms and ones: 2 * kParts, padded to a multiple of 8
static_assert(2 * kParts <= kNormColumns && kParts <= kGateColumns);

enum class Norm : int64_t { kNone, kOfQuery, kOfKey };

// The norms are divided by this unit and the ones multiplied by it, because |q|^2 can exceed 65504, the largest fp16
// number.
double norm_unit(at::ScalarType type) {
    return type == at::kHalf ? 128 : 1;
}

// Smaller gates are replaced by this one: the gradient of a gate is computed from A / f, and A must not vanish first.
double least_gate(at::ScalarType type) {
    return type == at::kHalf ? 0x1p-24 : kLeastGate;  // 2^-24 is the smallest positive fp16 number
}

// Splits x (..) into numbers (.., kParts) of `type`. Their sum is x to 24 bits. In fp64 the first one is x.
at::Tensor in_parts(const at::Tensor& x, at::ScalarType type) {
    if (type == at::kDouble) return at::constant_pad_nd(x.unsqueeze(-1), {0, kParts - 1});
    std::vector<at::Tensor> parts;
    at::Tensor rest = x;
    for (int64_t i = 0; i < kParts; ++i) {
        const at::Tensor part = rest.to(at::kBFloat16);
        parts.push_back(part.to(type));
        rest = rest - part.to(rest.scalar_type());
    }
    return at::stack(parts, -1);
}

at::Tensor constant_columns(const at::Tensor& x, int64_t columns, double value) {
    c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    sizes.back() = columns;
    return value == 0 ? at::zeros_symint(sizes, x.options()) : at::ones_symint(sizes, x.options()) * value;
}

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

// Appends columns to x: [2x | norms, ones, 0] for queries, [x | ones, norms, 0 | gates, 0] for keys. The columns of a
// variant that is not used are left out.
class Extend : public torch::autograd::Function<Extend> {
  public:
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const std::optional<at::Tensor>& gate,
                              int64_t norm_value) {
        const auto norm = static_cast<Norm>(norm_value);
        const at::ScalarType type = x.scalar_type(), wide = accumulation_type(x);
        std::vector<at::Tensor> columns{norm == Norm::kOfQuery ? x * 2 : x};
        if (norm != Norm::kNone) {
            const double unit = norm_unit(type);
            const at::Tensor norms = in_parts(x.to(wide).square().sum(-1) / -unit, type);
            const at::Tensor ones = constant_columns(x, kParts, unit);
            columns.push_back(norm == Norm::kOfQuery ? norms : ones);
            columns.push_back(norm == Norm::kOfQuery ? ones : norms);
            columns.push_back(constant_columns(x, kNormColumns - 2 * kParts, 0));
        }
        if (gate.has_value()) {
            columns.push_back(in_parts(gate->to(wide).clamp(least_gate(type), 1), type));
            columns.push_back(constant_columns(x, kGateColumns - kParts, 0));
        }
        const at::Tensor out = at::cat(columns, -1);
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
        const auto column = [&](const c10::SymInt& at) { return d_out.narrow_symint(-1, at, 1); };
        at::Tensor dx = d_out.narrow_symint(-1, 0, width), d_gate;
        if (norm != Norm::kNone) {
            const auto wide = accumulation_type(d_out);
            const bool query = norm == Norm::kOfQuery;
            const at::Tensor x = extended.narrow_symint(-1, 0, width).to(wide);  // 2q or k
            const at::Tensor d_norm =
                column(width + (query ? int64_t(0) : kParts)).to(wide) / -norm_unit(d_out.scalar_type());
            const double twice = query ? 2 : 1;
            dx = (dx.to(wide) * twice + x * d_norm * (2 / twice)).to(d_out.scalar_type());
        }
        if (gate_type.has_value()) d_gate = column(d_out.sym_size(-1) - kGateColumns).squeeze(-1).to(*gate_type);
        return {dx, d_gate, at::Tensor()};
    }
};

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
    return Extend::apply(q, std::optional<at::Tensor>(), static_cast<int64_t>(Norm::kOfQuery));
}

at::Tensor extended_keys(const at::Tensor& k, const std::optional<at::Tensor>& forget_gate, bool euclidean) {
    if (!euclidean && !forget_gate.has_value()) return k;
    return Extend::apply(k, forget_gate, static_cast<int64_t>(euclidean ? Norm::kOfKey : Norm::kNone));
}

OneTensor queries_for_blocks(const Arguments& arguments) {
    const at::Tensor q = arguments.tensor("q");
    AttentionOptions options;
    options.euclidean = arguments.get<bool>("euclidean");
    check_variants(q, q, options);
    return extended_queries(q, options.euclidean);
}

OneTensor keys_for_blocks(const Arguments& arguments) {
    const at::Tensor k = arguments.tensor("k");
    AttentionOptions options;
    options.forget_gate = arguments.optional_tensor("forget_gate");
    options.euclidean = arguments.get<bool>("euclidean");
    check_variants(k, k, options);
    return extended_keys(k, options.forget_gate, options.euclidean);
}

}  // namespace megatron_sb::ops
