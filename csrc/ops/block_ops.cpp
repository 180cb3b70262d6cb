#include <ATen/ATen.h>

#include "core/segment.h"
#include "dispatch/table.h"
#include "ops/block.h"
#include "ops/check.h"
#include "ops/device.h"
#include "ops/registration.h"

#if defined(SB_WITH_CUDA)
#include "kernels/common/segments.h"
#endif

namespace megatron_sb::ops {

at::Tensor segments(const at::Tensor& cu_seqlens, const at::Tensor& cu_seqlens_k, c10::SymInt q_rows,
                    c10::SymInt k_rows) {
    check_cu_seqlens_form("cu_seqlens", cu_seqlens, cu_seqlens);
    check_cu_seqlens_form("cu_seqlens_k", cu_seqlens_k, cu_seqlens);
    TORCH_CHECK_VALUE(cu_seqlens.numel() == cu_seqlens_k.numel(), "cu_seqlens has ", cu_seqlens.numel() - 1,
                      " documents and cu_seqlens_k has ", cu_seqlens_k.numel() - 1, "; they must be as many");
    const int32_t documents = int32_t(cu_seqlens.numel() - 1);
    const int32_t q_end = int32_t(q_rows.expect_int()), k_end = int32_t(k_rows.expect_int());
    const at::Tensor q = cu_seqlens.contiguous(), k = cu_seqlens_k.contiguous();
    const at::Tensor table = at::empty({documents, kSegmentFields}, q.options());
    Segment* out = reinterpret_cast<Segment*>(table.data_ptr<int32_t>());
    if (!q.is_cpu()) {
#if defined(SB_WITH_CUDA)
        const DeviceScope scope(q.device());
        portable::segments_from_cu_seqlens(q.const_data_ptr<int32_t>(), k.const_data_ptr<int32_t>(), documents, q_end,
                                           k_end, out, scope.stream());
        return table;
#else
        TORCH_CHECK_VALUE(false, "cu_seqlens: device is ", q.device(), ", but this is a CPU build of megatron_sb");
#endif
    }
    check_cu_seqlens_values("cu_seqlens", q, q_end);
    check_cu_seqlens_values("cu_seqlens_k", k, k_end);
    for (int32_t i = 0; i < documents; ++i) {
        out[i] = document_segment(q.const_data_ptr<int32_t>(), k.const_data_ptr<int32_t>(), i, q_end, k_end);
        TORCH_CHECK_VALUE(out[i].q_len <= out[i].k_len, "document ", i, " has ", out[i].q_len, " queries and ",
                          out[i].k_len,
                          " keys; the queries are the last positions of the keys, so it may not have more");
    }
    return table;
}

Four block_forward_op(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& segments,
                      const OptionalTensor& mass_in, double scale, bool attend_current, double mass_threshold,
                      std::optional<at::ScalarType> out_dtype, bool forget_gate) {
    BlockOutput out =
        block_forward(q, k, v, segments, mass_in, {scale, attend_current, mass_threshold, forget_gate}, out_dtype);
    return {out.o, out.mass, out.restart_edge, out.restart_mass};
}

Four block_backward_op(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const OptionalTensor& segments, const at::Tensor& restart_edge, const at::Tensor& restart_mass,
                       const OptionalTensor& mass_in, const OptionalTensor& prefix_in, double scale,
                       bool attend_current, double mass_threshold, std::optional<at::ScalarType> out_dtype,
                       bool forget_gate) {
    const at::ScalarType wide = accumulation_type(q), type = out_dtype.value_or(wide);
    TORCH_CHECK_TYPE(type == wide || type == q.scalar_type(), "out_dtype is ", type, "; ", wide, " or q's ",
                     q.scalar_type(), " is allowed");
    const BlockOptions options{scale, attend_current, mass_threshold, forget_gate};
    const bool narrow = type != wide && narrow_gradients(q, v, options);
    // Where there is nothing to do, no kernel writes.
    const bool all_written = narrow && q.numel() > 0 && k.numel() > 0 && (!segments || segments->numel() > 0);
    const BlockGradients gradients =
        all_written ? empty_gradients(q, k, v, type) : zero_gradients(q, k, v, narrow ? type : wide);
    const at::Tensor prefix_out =
        block_backward(d_o, q, k, v, segments, restart_edge, restart_mass, mass_in, prefix_in, options, gradients);
    return {gradients.dq.to(type), gradients.dk.to(type), gradients.dv.to(type), prefix_out};
}

std::string describe_kernels() {
    return dispatch::describe();
}

std::string instruction_set() {
    return dispatch::instruction_set();
}

}  // namespace megatron_sb::ops
