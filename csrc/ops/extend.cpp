#include "ops/extend.h"

#include <ATen/ATen.h>

#include "ops/device.h"
#include "ops/registration.h"
#include "ops/tensors.h"

namespace megatron_sb::ops {
namespace {

constexpr int64_t kParts = kGateParts;  // columns of one number

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
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = columns;
    return at::full(sizes, value, x.options());
}

at::Tensor forward_of_tensors(const at::Tensor& x, const OptionalTensor& gate, Norm norm) {
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
        columns.push_back(in_parts(gate->clamp(least_gate(type), 1), type));
        columns.push_back(constant_columns(x, kGateColumns - kParts, 0));
    }
    return at::cat(columns, -1);
}

at::Tensor backward_of_tensors(const at::Tensor& d_extended, const at::Tensor& extended, Norm norm, int64_t head_dim) {
    const auto wide = accumulation_type(d_extended);
    const bool query = norm == Norm::kOfQuery;
    const at::Tensor x = extended.narrow(-1, 0, head_dim).to(wide);  // 2q or k
    const at::Tensor d_norm =
        d_extended.narrow(-1, head_dim + (query ? 0 : kParts), 1).to(wide) / -norm_unit(d_extended.scalar_type());
    const double twice = query ? 2 : 1;
    const at::Tensor d_x = d_extended.narrow(-1, 0, head_dim).to(wide) * twice;
    return (d_x + x * d_norm * (2 / twice)).to(d_extended.scalar_type());
}

c10::SymInt extended_width(const at::Tensor& x, const OptionalTensor& gate, Norm norm) {
    return x.sym_size(-1) + (norm == Norm::kNone ? int64_t(0) : kNormColumns) +
           (gate.has_value() ? int64_t(kGateColumns) : int64_t(0));
}

#if defined(SB_WITH_CUDA)
bool on_gpu(const at::Tensor& x) {
    return x.is_cuda() && x.element_size() == 2 && x.numel() > 0;
}

// Describes x (batch, rows, heads, ..), of which the kernels use head_dim columns.
extend::Params params_of(const at::Tensor& x, Norm norm, int64_t head_dim) {
    const at::ScalarType type = x.scalar_type();
    extend::Params params;
    params.dtype = dtype_of(type);
    params.norm = norm;
    params.batch = int32_t(x.size(0));
    params.rows = int32_t(x.size(1));
    params.num_heads = int32_t(x.size(2));
    params.head_dim = int32_t(head_dim);
    params.x = strided_rows<const void*>(x);
    params.least_gate = float(least_gate(type));
    params.unit = float(norm_unit(type));
    return params;
}

at::Tensor forward_on_gpu(const at::Tensor& x_given, const OptionalTensor& gate_given, Norm norm) {
    const DeviceScope scope(x_given.device());
    const at::Tensor x = aligned(unit_last_stride(x_given));
    const at::Tensor gate = gate_given.has_value() ? gate_given->contiguous() : at::Tensor();
    const std::vector<int64_t> sizes = {x.size(0), x.size(1), x.size(2),
                                        extended_width(x, gate_given, norm).expect_int()};
    // With gates alone, kernels gain nothing from whole sectors, and a cache should be compact.
    const at::Tensor out = norm == Norm::kNone ? at::empty(sizes, x.options()) : empty_in_sectors(sizes, x.options());
    extend::Params params = params_of(x, norm, x.size(3));
    if (gate.defined()) params.gate = gate.const_data_ptr<float>();
    extend::forward(params, strided_rows<void*>(out), scope.stream());
    return out;
}

at::Tensor backward_on_gpu(const at::Tensor& d_extended_given, const at::Tensor& extended_given, Norm norm,
                           int64_t head_dim) {
    const DeviceScope scope(extended_given.device());
    const at::Tensor d_extended = aligned(unit_last_stride(d_extended_given));
    const at::Tensor extended = aligned(unit_last_stride(extended_given));
    const at::Tensor d_x =
        at::empty({extended.size(0), extended.size(1), extended.size(2), head_dim}, extended.options());
    extend::backward(params_of(extended, norm, head_dim), strided_rows<const void*>(d_extended),
                     strided_rows<void*>(d_x), scope.stream());
    return d_x;
}
#endif

Norm norm_of(const Arguments& arguments) {
    return static_cast<Norm>(arguments.get<int64_t>("norm"));
}

}  // namespace

at::Tensor extend_forward(const at::Tensor& x, const OptionalTensor& gate, Norm norm) {
    static const Operator op("megatron_sb::extend_forward");
    return op.call({{"x", x}, {"gate", gate}, {"norm", static_cast<int64_t>(norm)}})[0].toTensor();
}

at::Tensor extend_backward(const at::Tensor& d_extended, const at::Tensor& extended, Norm norm,
                           const c10::SymInt& head_dim) {
    static const Operator op("megatron_sb::extend_backward");
    const NamedArguments inputs = {{"d_extended", d_extended},
                                   {"extended", extended},
                                   {"norm", static_cast<int64_t>(norm)},
                                   {"head_dim", head_dim}};
    return op.call(inputs)[0].toTensor();
}

OneTensor extend_forward_op(const Arguments& arguments) {
    const at::Tensor x = arguments.tensor("x");
    const OptionalTensor gate = arguments.optional_tensor("gate");
#if defined(SB_WITH_CUDA)
    if (on_gpu(x)) return forward_on_gpu(x, gate, norm_of(arguments));
#endif
    return forward_of_tensors(x, gate, norm_of(arguments));
}
OneTensor extend_forward_fake(const Arguments& arguments) {
    const at::Tensor x = arguments.tensor("x");
    c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    sizes.back() = extended_width(x, arguments.optional_tensor("gate"), norm_of(arguments));
    return at::empty_symint(sizes, x.options());
}

OneTensor extend_backward_op(const Arguments& arguments) {
    const at::Tensor d_extended = arguments.tensor("d_extended"), extended = arguments.tensor("extended");
    const int64_t head_dim = arguments.get<c10::SymInt>("head_dim").expect_int();
#if defined(SB_WITH_CUDA)
    if (on_gpu(extended)) return backward_on_gpu(d_extended, extended, norm_of(arguments), head_dim);
#endif
    return backward_of_tensors(d_extended, extended, norm_of(arguments), head_dim);
}
OneTensor extend_backward_fake(const Arguments& arguments) {
    const at::Tensor d_extended = arguments.tensor("d_extended");
    c10::SymDimVector sizes(d_extended.sym_sizes().begin(), d_extended.sym_sizes().end());
    sizes.back() = arguments.get<c10::SymInt>("head_dim");
    return at::empty_symint(sizes, d_extended.options());
}

}  // namespace megatron_sb::ops
