#include "ops/extend.h"

#include <ATen/ATen.h>

#include "ops/check.h"
#include "ops/device.h"
#include "ops/registration.h"
#include "ops/tensors.h"

namespace megatron_sb::ops {
namespace {

constexpr int64_t kParts = kGateParts;  // columns of one number

// Smaller gates are replaced by this one: the gradient of a gate is computed from A / f, and A must not vanish first.
double least_gate(at::ScalarType type) {
    return type == at::kHalf ? 0x1p-24 : kLeastGate;  // 2^-24 is the smallest positive fp16 number
}

// Larger numbers are replaced by this one, which hides a key or uses up a stick as an infinity does. Kernels multiply
// columns by rows of zeros that do not exist, and 0 times infinity is NaN. In fp16, 65280 is the largest with 8 bits.
double largest_number(at::ScalarType type) {
    return type == at::kHalf ? 65280 : 0x1p100;
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

// The number (batch, rows, heads) that the columns of x hold, times the unit.
at::Tensor number_of(const at::Tensor& x, const OptionalTensor& bias, const Columns& columns) {
    const at::ScalarType wide = accumulation_type(x);
    at::Tensor number = bias.has_value() ? *bias / columns.scale : at::Tensor();
    if (columns.norms) {
        const at::Tensor norms = x.to(wide).square().sum(-1);
        number = number.defined() ? number - norms : -norms;
    }
    return number.defined() ? number : at::zeros(x.sizes().slice(0, 3), x.options().dtype(wide));
}

// Returns the uninitialised result of extend_forward. Its strides depend on its dtype, but not on its device, which
// torch.compile hides. With gates alone, GPU kernels gain nothing from whole sectors, and a cache should be compact.
at::Tensor empty_extended(const at::Tensor& x, const OptionalTensor& gate, const Columns& columns) {
    c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    sizes.back() += columns.count() + (gate.has_value() ? int64_t(kGateColumns) : int64_t(0));
    const bool in_sectors = x.element_size() == 2 && columns.side != Side::kNone;
    return in_sectors ? empty_in_sectors(sizes, x.options()) : at::empty_symint(sizes, x.options());
}

at::Tensor forward_of_tensors(const at::Tensor& x, const OptionalTensor& bias, const OptionalTensor& gate,
                              const Columns& columns) {
    const at::ScalarType type = x.scalar_type();
    const bool query = columns.side == Side::kQuery;
    std::vector<at::Tensor> parts{query && columns.norms ? x * 2 : x};
    if (columns.side != Side::kNone) {
        const double unit = number_unit(type), largest = largest_number(type);
        const at::Tensor number = in_parts((number_of(x, bias, columns) / unit).clamp(-largest, largest), type);
        const at::Tensor ones = constant_columns(x, kParts, unit);
        parts.push_back(query ? number : ones);
        parts.push_back(query ? ones : number);
        parts.push_back(constant_columns(x, kBiasColumns - 2 * kParts, 0));
    }
    if (gate.has_value()) {
        parts.push_back(in_parts(gate->clamp(least_gate(type), 1), type));
        parts.push_back(constant_columns(x, kGateColumns - kParts, 0));
    }
    at::Tensor out = empty_extended(x, gate, columns);
    return at::cat_out(out, parts, -1);
}

at::Tensor backward_of_tensors(const at::Tensor& d_extended, const at::Tensor& extended, Side side, int64_t head_dim) {
    const auto wide = accumulation_type(d_extended);
    const at::Tensor x = extended.narrow(-1, 0, head_dim).to(wide);  // 2q or k
    const int64_t number = head_dim + Columns{side}.number();
    const at::Tensor d_norm = d_extended.narrow(-1, number, 1).to(wide) / -number_unit(d_extended.scalar_type());
    const double twice = side == Side::kQuery ? 2 : 1;
    const at::Tensor d_x = d_extended.narrow(-1, 0, head_dim).to(wide) * twice;
    // Rows after the last document have gradients of 0, whatever they hold: 0 times infinity would be NaN.
    const at::Tensor of_norm = at::where(d_norm == 0, 0, x * d_norm * (2 / twice));
    return (d_x + of_norm).to(d_extended.scalar_type()).contiguous();
}

#if defined(SB_WITH_CUDA)
bool on_gpu(const at::Tensor& x) {
    return x.is_cuda() && x.element_size() == 2 && x.numel() > 0;
}

// Describes x (batch, rows, heads, ..), of which the kernels use head_dim columns.
extend::Params params_of(const at::Tensor& x, const Columns& columns, int64_t head_dim) {
    const at::ScalarType type = x.scalar_type();
    extend::Params params;
    params.dtype = dtype_of(type);
    params.side = columns.side;
    params.norms = columns.norms;
    params.batch = int32_t(x.size(0));
    params.rows = int32_t(x.size(1));
    params.num_heads = int32_t(x.size(2));
    params.head_dim = int32_t(head_dim);
    params.x = strided_rows<const void*>(x);
    params.least_gate = float(least_gate(type));
    params.largest = float(largest_number(type));
    params.unit = float(number_unit(type));
    params.scale = float(columns.scale);
    return params;
}

at::Tensor extend_on_gpu(const at::Tensor& x_given, const OptionalTensor& bias_given, const OptionalTensor& gate_given,
                         const Columns& columns) {
    const DeviceScope scope(x_given.device());
    const at::Tensor x = aligned(unit_last_stride(x_given));
    const at::Tensor bias = bias_given.has_value() ? bias_given->contiguous() : at::Tensor();
    const at::Tensor gate = gate_given.has_value() ? gate_given->contiguous() : at::Tensor();
    const at::Tensor out = empty_extended(x, gate_given, columns);
    extend::Params params = params_of(x, columns, x.size(3));
    params.padded = columns.side != Side::kNone && out.stride(2) == out.size(3) + kBiasColumns;
    if (bias.defined()) params.bias = bias.const_data_ptr<float>();
    if (gate.defined()) params.gate = gate.const_data_ptr<float>();
    extend::forward(params, strided_rows<void*>(out), scope.stream());
    return out;
}

at::Tensor extend_backward_on_gpu(const at::Tensor& d_extended_given, const at::Tensor& extended_given, Side side,
                                  int64_t head_dim) {
    const DeviceScope scope(extended_given.device());
    const at::Tensor d_extended = aligned(unit_last_stride(d_extended_given));
    const at::Tensor extended = aligned(unit_last_stride(extended_given));
    const at::Tensor d_x =
        at::empty({extended.size(0), extended.size(1), extended.size(2), head_dim}, extended.options());
    extend::backward(params_of(extended, {side, true}, head_dim), strided_rows<const void*>(d_extended),
                     strided_rows<void*>(d_x), scope.stream());
    return d_x;
}
#endif

// Returns the side, which must be kQuery or kKey if the call `needs` the columns of a number.
Side side_of(const Arguments& arguments, bool needs) {
    const auto side = arguments.get<int64_t>("side");
    const int64_t least = needs ? 1 : 0, most = static_cast<int64_t>(Side::kKey);
    TORCH_CHECK_VALUE(side >= least && side <= most, "side must be from ", least, " to ", most,
                      least > 0 ? " with a bias or norms" : "", ", got ", side);
    return static_cast<Side>(side);
}

void check_rows_of_heads(const char* name, const at::Tensor& x) {
    check_rank(name, x, 4, "(batch, rows, heads, head_dim)");
    check_dtype(name, x);
    check_counts(name, x);
}

void check_forward(const at::Tensor& x, const OptionalTensor& bias, const OptionalTensor& gate) {
    check_rows_of_heads("x", x);
    check_head_dim("x", x.sym_size(3));
    for (const auto& [name, values] : {std::pair<const char*, const OptionalTensor&>{"bias", bias}, {"gate", gate}}) {
        if (!values.has_value()) continue;
        TORCH_CHECK_TYPE(values->scalar_type() == accumulation_type(x), name, ": dtype must be ", accumulation_type(x),
                         ", got ", values->scalar_type());
        check_device(name, *values, x, "x");
        TORCH_CHECK_VALUE(values->sym_sizes() == x.sym_sizes().slice(0, 3), name, ": shape must be ",
                          x.sym_sizes().slice(0, 3), ", as x without its last dimension, got ", values->sym_sizes());
    }
}

void check_backward(const at::Tensor& d_extended, const at::Tensor& extended, const c10::SymInt& head_dim) {
    check_rows_of_heads("extended", extended);
    check_head_dim("extended", head_dim);
    const c10::SymInt least = head_dim + int64_t(kBiasColumns);  // there may be gates, too
    TORCH_CHECK_VALUE(extended.sym_size(3) >= least, "extended: last size must be at least ", least, ", got ",
                      extended.sym_size(3));
    check_same_dtype("d_extended", d_extended, extended, "extended");
    check_device("d_extended", d_extended, extended, "extended");
    TORCH_CHECK_VALUE(d_extended.sym_sizes() == extended.sym_sizes(), "d_extended: shape must be ",
                      extended.sym_sizes(), " as in extended, got ", d_extended.sym_sizes());
}

Columns columns_of(const Arguments& arguments) {
    const auto norms = arguments.get<bool>("norms");
    const bool has_bias = arguments.optional_tensor("bias").has_value();
    return {side_of(arguments, norms || has_bias), norms, arguments.get<double>("scale")};
}

}  // namespace

double number_unit(at::ScalarType type) {
    return bias_unit(dtype_of(type));
}

at::Tensor extend_forward(const at::Tensor& x, const OptionalTensor& bias, const OptionalTensor& gate,
                          const Columns& columns) {
    static const Operator op("megatron_sb::extend_forward");
    const NamedArguments inputs = {{"x", x},
                                   {"bias", bias},
                                   {"gate", gate},
                                   {"side", static_cast<int64_t>(columns.side)},
                                   {"norms", columns.norms},
                                   {"scale", columns.scale}};
    return op.call(inputs)[0].toTensor();
}

at::Tensor extend_backward(const at::Tensor& d_extended, const at::Tensor& extended, Side side,
                           const c10::SymInt& head_dim) {
    static const Operator op("megatron_sb::extend_backward");
    const NamedArguments inputs = {{"d_extended", d_extended},
                                   {"extended", extended},
                                   {"side", static_cast<int64_t>(side)},
                                   {"head_dim", head_dim}};
    return op.call(inputs)[0].toTensor();
}

OneTensor extend_forward_op(const Arguments& arguments) {
    const at::Tensor x = arguments.tensor("x");
    const OptionalTensor bias = arguments.optional_tensor("bias"), gate = arguments.optional_tensor("gate");
    check_forward(x, bias, gate);
#if defined(SB_WITH_CUDA)
    if (on_gpu(x)) return extend_on_gpu(x, bias, gate, columns_of(arguments));
#endif
    return forward_of_tensors(x, bias, gate, columns_of(arguments));
}
OneTensor extend_forward_fake(const Arguments& arguments) {
    const at::Tensor x = arguments.tensor("x");
    const OptionalTensor gate = arguments.optional_tensor("gate");
    check_forward(x, arguments.optional_tensor("bias"), gate);
    return empty_extended(x, gate, columns_of(arguments));
}

OneTensor extend_backward_op(const Arguments& arguments) {
    const at::Tensor d_extended = arguments.tensor("d_extended"), extended = arguments.tensor("extended");
    const int64_t head_dim = arguments.get<c10::SymInt>("head_dim").expect_int();
    check_backward(d_extended, extended, head_dim);
    const Side side = side_of(arguments, true);
#if defined(SB_WITH_CUDA)
    if (on_gpu(extended)) return extend_backward_on_gpu(d_extended, extended, side, head_dim);
#endif
    return backward_of_tensors(d_extended, extended, side, head_dim);
}
OneTensor extend_backward_fake(const Arguments& arguments) {
    const at::Tensor d_extended = arguments.tensor("d_extended");
    const auto head_dim = arguments.get<c10::SymInt>("head_dim");
    check_backward(d_extended, arguments.tensor("extended"), head_dim);
    side_of(arguments, true);
    c10::SymDimVector sizes(d_extended.sym_sizes().begin(), d_extended.sym_sizes().end());
    sizes.back() = head_dim;
    return at::empty_symint(sizes, d_extended.options());
}

}  // namespace megatron_sb::ops
