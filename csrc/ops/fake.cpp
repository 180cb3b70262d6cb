#include <ATen/ATen.h>

#include "core/params.h"
#include "ops/block.h"
#include "ops/check.h"
#include "ops/registration.h"

namespace megatron_sb::ops {

at::Tensor segments_meta(const at::Tensor& cu_seqlens, const at::Tensor&, c10::SymInt, c10::SymInt) {
    return at::empty_symint({cu_seqlens.sym_size(0) - 1, kSegmentFields}, cu_seqlens.options());
}

Four block_forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor&,
                        const OptionalTensor&, double, bool, double, std::optional<at::ScalarType> out_dtype,
                        bool forget_gate) {
    check_attention(q, k, v, forget_gate);
    const at::TensorOptions wide = q.options().dtype(accumulation_type(q));
    const std::vector<c10::SymInt> rows = {q.sym_size(0), q.sym_size(2), q.sym_size(1)};
    return {at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)},
                             q.options().dtype(out_dtype.value_or(accumulation_type(q)))),
            at::empty_symint(rows, wide), at::empty_symint(rows, q.options().dtype(at::kInt)),
            at::empty_symint(rows, wide)};
}

Four block_backward_meta(const at::Tensor&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const OptionalTensor&, const at::Tensor&, const at::Tensor& restart_mass,
                         const OptionalTensor&, const OptionalTensor&, double, bool, double,
                         std::optional<at::ScalarType> out_dtype, bool) {
    const at::TensorOptions wide = q.options().dtype(accumulation_type(q)),
                            out = q.options().dtype(out_dtype.value_or(accumulation_type(q)));
    return {at::empty_symint(q.sym_sizes(), out), at::empty_symint(k.sym_sizes(), out),
            at::empty_symint(v.sym_sizes(), out), at::empty_symint(restart_mass.sym_sizes(), wide)};
}

}  // namespace megatron_sb::ops
