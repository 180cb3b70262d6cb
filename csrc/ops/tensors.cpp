#include "ops/tensors.h"

#include <ATen/ops/empty.h>

namespace megatron_sb::ops {

at::ScalarType accumulation_type(const at::Tensor& x) {
    return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Dtype dtype_of(at::ScalarType type) {
    switch (type) {
        case at::kFloat:
            return Dtype::kFloat32;
        case at::kDouble:
            return Dtype::kFloat64;
        case at::kBFloat16:
            return Dtype::kBFloat16;
        case at::kHalf:
            return Dtype::kFloat16;
        default:
            TORCH_CHECK_TYPE(false, "dtype must be float32, float64, bfloat16 or float16, got ", type);
    }
}

std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& x) {
    return x.has_value() ? std::optional<at::Tensor>(x->contiguous()) : std::nullopt;
}

at::Tensor per_row(const at::Tensor& values) {
    return values.transpose(1, 2).unsqueeze(-1);
}

at::Tensor unit_last_stride(const at::Tensor& x) {
    return x.sym_stride(-1) == 1 ? x : x.contiguous();
}

at::Tensor aligned(const at::Tensor& x) {
    constexpr int64_t kBytes = 16;
    if (x.is_cpu()) return x;
    bool fits = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kBytes == 0;
    for (int dim = 0; dim < 3; ++dim)
        fits &= x.size(dim) <= 1 || (x.stride(dim) > 0 && x.stride(dim) * x.element_size() % kBytes == 0);
    return fits ? x : x.clone(at::MemoryFormat::Contiguous);
}

at::Tensor empty_in_sectors(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
    constexpr int64_t kSectorBytes = 32;
    c10::SymDimVector stored(sizes.begin(), sizes.end());
    const int64_t elements = kSectorBytes / int64_t(options.dtype().itemsize());
    stored.back() = (stored.back() + (elements - 1)) / elements * elements;
    return at::empty_symint(stored, options).narrow_symint(-1, 0, sizes.back());
}

at::Tensor empty_workspace(int64_t bytes, const at::Tensor& like) {
    return at::empty({bytes}, like.options().dtype(at::kByte));
}

}  // namespace megatron_sb::ops
