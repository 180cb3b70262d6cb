// Euclidean logits (NU-CS-2024-15) are dot products of wider heads:
//
//   -|q - k|^2 = q' . k',   q' = [2q, -|q|^2, 1],   k' = [k, 1, -|k|^2]
//
// and everything that a dot product can do, and wherever its q and k can go, they can too. The norms are made in the
// accumulation type and stand in three columns, each rounded to 8 bits what is left of them, so that every type from
// bf16 on holds 24 bits; the ones stand in as many. Forget gates take columns of the same make behind the keys.
#include "ops/variants.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

#include "core/limits.h"
#include "core/params.h"
#include "ops/block.h"
#include "ops/check.h"
#include "ops/registration.h"

namespace megatron_sb::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kParts = kGateParts, kNormColumns = 8;  // of a head: 2 kParts of them, to a multiple of 8
static_assert(2 * kParts <= kNormColumns && kParts <= kGateColumns);

enum class Norm : int64_t { kNone, kOfQuery, kOfKey };

// What the norms are divided by and the ones multiplied with: fp16 ends at 65504, and |q|^2 may not.
double norm_unit(at::ScalarType type) {
    return type == at::kHalf ? 128 : 1;
}

// A gate with less is taken as this, so that its weights, A / f of which its gradient is made, do not vanish first.
double least_gate(at::ScalarType type) {
    return type == at::kHalf ? 0x1p-24 : kLeastGate;  // fp16 has nothing between that and 0
}

// x (..) as (.., kParts) of `type` whose sum it is, to 24 bits; all of it in the first part where the type is fp64.
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

// [x, or 2x | norms and ones, or ones and norms, 0 | gates, 0]
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
        ctx->save_for_backward({norm == Norm::kNone ? at::Tensor() : out});
        ctx->saved_data["norm"] = norm_value;
        ctx->saved_data["gate"] = gate.has_value() ? static_cast<int64_t>(gate->scalar_type()) : int64_t(-1);
        return out;
    }

    // A sum's parts are constants but for the first, which has the sum's gradient.
    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto norm = static_cast<Norm>(ctx->saved_data["norm"].toInt());
        const int64_t gate = ctx->saved_data["gate"].toInt();
        const at::Tensor& d_out = grads[0];
        const c10::SymInt width = d_out.sym_size(-1) - (norm == Norm::kNone ? 0 : kNormColumns) -
                                  (gate < 0 ? int64_t(0) : int64_t(kGateColumns));
        const auto column = [&](const c10::SymInt& at) { return d_out.narrow_symint(-1, at, 1); };
        at::Tensor dx = d_out.narrow_symint(-1, 0, width), d_gate;
        if (norm != Norm::kNone) {
            const auto wide = accumulation_type(d_out);
            const bool query = norm == Norm::kOfQuery;
            const at::Tensor x = ctx->get_saved_variables()[0].narrow_symint(-1, 0, width).to(wide);  // 2q, k
            const at::Tensor d_norm =
                column(width + (query ? int64_t(0) : kParts)).to(wide) / -norm_unit(d_out.scalar_type());
            const double twice = query ? 2 : 1;
            dx = (dx.to(wide) * twice + x * d_norm * (2 / twice)).to(d_out.scalar_type());
        }
        if (gate >= 0)
            d_gate = column(d_out.sym_size(-1) - kGateColumns).squeeze(-1).to(static_cast<at::ScalarType>(gate));
        return {dx, d_gate, at::Tensor()};
    }
};

}  // namespace

void check_variants(const at::Tensor& q, const at::Tensor& k, const Variants& variants) {
    if (variants.euclidean) {
        const c10::SymInt d = q.sym_size(-1);
        TORCH_CHECK_VALUE(d % kHeadDimMultiple == 0 && d > 0 && d <= kMaxHeadDim - kNormColumns, "q: head_dim is ", d,
                          "; with Euclidean logits a multiple of 8 up to ", kMaxHeadDim - kNormColumns, " is allowed");
    }
    if (!variants.forget_gate.has_value()) return;
    const at::Tensor& gate = *variants.forget_gate;
    TORCH_CHECK_TYPE(gate.scalar_type() == q.scalar_type() || gate.scalar_type() == accumulation_type(q),
                     "forget_gate: dtype is ", gate.scalar_type(), "; q's, ", q.scalar_type(), ", or ",
                     accumulation_type(q), " is allowed");
    TORCH_CHECK_VALUE(gate.device() == k.device(), "forget_gate: device is ", gate.device(), " but k's is ",
                      k.device());
    const auto of_keys = k.sym_sizes().slice(0, k.dim() - 1);
    TORCH_CHECK_VALUE(gate.sym_sizes() == of_keys, "forget_gate: shape is ", gate.sym_sizes(),
                      "; one gate for each row and head of k, ", of_keys, ", is needed");
}

double scale_of(const std::optional<double>& scale, const at::Tensor& q, const Variants& variants) {
    if (scale.has_value()) return *scale;
    const int64_t d = q.sym_size(-1).guard_int(__FILE__, __LINE__);
    return variants.euclidean ? 1 : 1 / std::sqrt(double(std::max<int64_t>(d, 1)));
}

Extended extended(const at::Tensor& q, const at::Tensor& k, const Variants& variants) {
    const auto norm = [&](Norm side) { return static_cast<int64_t>(variants.euclidean ? side : Norm::kNone); };
    return {variants.euclidean ? Extend::apply(q, std::optional<at::Tensor>(), norm(Norm::kOfQuery)) : q,
            variants.euclidean || variants.forget_gate.has_value()
                ? Extend::apply(k, variants.forget_gate, norm(Norm::kOfKey))
                : k};
}

Two with_variants(const at::Tensor& q, const at::Tensor& k, const OptionalTensor& forget_gate, bool euclidean) {
    const Variants variants{forget_gate, euclidean};
    check_variants(q, k, variants);
    const Extended x = extended(q, k, variants);
    return {x.q, x.k};
}

}  // namespace megatron_sb::ops
