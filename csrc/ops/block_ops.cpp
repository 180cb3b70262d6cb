// The operators of the block contract: kernels and fake kernels.
#include <ATen/ops/empty.h>

#include "core/limits.h"
#include "core/segment.h"
#include "dispatch/table.h"
#include "ops/block.h"
#include "ops/check.h"
#include "ops/device.h"
#include "ops/registration.h"
#include "ops/tensors.h"

#if defined(SB_WITH_CUDA)
#include "kernels/common/expired_wait.h"
#include "kernels/common/segments.h"
#endif

namespace megatron_sb::ops {
namespace {

// The arguments that block_forward and block_backward share.
struct BlockCall {
    at::Tensor q, k, v;
    OptionalTensor segments, mass_in;
    BlockOptions options;
    at::ScalarType out_dtype;

    explicit BlockCall(const Arguments& arguments)
        : q(arguments.tensor("q")),
          k(arguments.tensor("k")),
          v(arguments.tensor("v")),
          segments(arguments.optional_tensor("segments")),
          mass_in(arguments.optional_tensor("mass_in")),
          options(read_block_options(arguments)),
          out_dtype(arguments.get_or("out_like_q", false)
                        ? q.scalar_type()
                        : arguments.get<std::optional<at::ScalarType>>("out_dtype").value_or(accumulation_type(q))) {}
};

// The arguments of block_backward.
struct BackwardCall : BlockCall {
    at::Tensor d_o, restart_edge, restart_mass;
    OptionalTensor prefix_in;

    explicit BackwardCall(const Arguments& arguments)
        : BlockCall(arguments),
          d_o(arguments.tensor("do")),
          restart_edge(arguments.tensor("restart_edge")),
          restart_mass(arguments.tensor("restart_mass")),
          prefix_in(arguments.optional_tensor("prefix_in")) {
        check_block_backward(d_o, q, k, v, segments, restart_edge, restart_mass, mass_in, prefix_in, options);
        check_out_dtype(out_dtype, q);
    }
};

// Returns an argument that counts rows.
int32_t row_count(const Arguments& arguments, const char* name) {
    const int64_t rows = arguments.get<int64_t>(name);
    TORCH_CHECK_VALUE(rows >= 0 && rows <= kMaxRows, name, " must be from 0 to ", kMaxRows, ", got ", rows);
    return int32_t(rows);
}

}  // namespace

OneTensor segments(const Arguments& arguments) {
    const at::Tensor cu_seqlens = arguments.tensor("cu_seqlens"), cu_seqlens_k = arguments.tensor("cu_seqlens_k");
    check_cu_seqlens_form("cu_seqlens", cu_seqlens, cu_seqlens, "cu_seqlens");
    check_cu_seqlens_form("cu_seqlens_k", cu_seqlens_k, cu_seqlens, "cu_seqlens");
    TORCH_CHECK_VALUE(cu_seqlens.numel() == cu_seqlens_k.numel(),
                      "cu_seqlens_k must have as many documents as cu_seqlens, ", cu_seqlens.numel() - 1, ", got ",
                      cu_seqlens_k.numel() - 1);
    check_at_most("cu_seqlens", "number of documents", cu_seqlens.numel() - 1, kMaxSegments);
    const int32_t documents = int32_t(cu_seqlens.numel() - 1);
    const int32_t q_end = row_count(arguments, "q_rows"), k_end = row_count(arguments, "k_rows");
    const at::Tensor q = cu_seqlens.contiguous(), k = cu_seqlens_k.contiguous();
    const at::Tensor table = at::empty({documents, kSegmentFields}, q.options());
    Segment* out = reinterpret_cast<Segment*>(table.data_ptr<int32_t>());
    const int32_t *q_at = q.const_data_ptr<int32_t>(), *k_at = k.const_data_ptr<int32_t>();
    if (!q.is_cpu()) {
#if defined(SB_WITH_CUDA)
        const DeviceScope scope(q.device());
        common::segments_from_cu_seqlens(q_at, k_at, documents, q_end, k_end, out, scope.stream());
        return table;
#else
        TORCH_CHECK_VALUE(false, "cu_seqlens: device must be cpu in this CPU build of megatron_sb, got ", q.device());
#endif
    }
    check_cu_seqlens_values("cu_seqlens", q, q_end);
    check_cu_seqlens_values("cu_seqlens_k", k, k_end);
    for (int32_t i = 0; i < documents; ++i) {
        out[i] = document_segment(q_at[i], q_at[i + 1], k_at[i], k_at[i + 1]);
        TORCH_CHECK_VALUE(out[i].q_len <= out[i].k_len, "document ", i,
                          " must have at most as many queries as keys, got ", out[i].q_len, " queries and ",
                          out[i].k_len, " keys. The queries are the last positions of the keys.");
    }
    return table;
}

OneTensor segments_fake(const Arguments& arguments) {
    const at::Tensor cu_seqlens = arguments.tensor("cu_seqlens");
    return at::empty_symint({cu_seqlens.sym_size(0) - 1, kSegmentFields}, cu_seqlens.options());
}

BlockForwardResults block_forward_op(const Arguments& arguments) {
    const BlockCall call(arguments);
    const BlockOutput out =
        block_forward(call.q, call.k, call.v, call.segments, call.mass_in, call.options, call.out_dtype);
    return {out.o, out.mass, out.restart_edge, out.restart_mass};
}

BlockForwardResults block_forward_fake(const Arguments& arguments) {
    const BlockCall call(arguments);
    const at::Tensor &q = call.q, &v = call.v;
    check_block(q, call.k, v, call.segments, call.mass_in, call.options);
    check_out_dtype(call.out_dtype, q);
    const at::TensorOptions wide = q.options().dtype(accumulation_type(q));
    const std::vector<c10::SymInt> rows = {q.sym_size(0), q.sym_size(2), q.sym_size(1)};
    return {at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)},
                             q.options().dtype(call.out_dtype)),
            at::empty_symint(rows, wide), at::empty_symint(rows, q.options().dtype(at::kInt)),
            at::empty_symint(rows, wide)};
}

BlockBackwardResults block_backward_op(const Arguments& arguments) {
    const BackwardCall call(arguments);
    const at::ScalarType type = call.out_dtype;
    const BlockGradients gradients = empty_gradients(call.q, call.k, call.v, call.options, type);
    const at::Tensor prefix_out = block_backward(call.d_o, call.q, call.k, call.v, call.segments, call.restart_edge,
                                                 call.restart_mass, call.mass_in, call.prefix_in, call.options,
                                                 gradients, arguments.get<std::optional<int64_t>>("max_seqlen_k"));
    return {gradients.dq.to(type), gradients.dk.to(type), gradients.dv.to(type), prefix_out};
}

BlockBackwardResults block_backward_fake(const Arguments& arguments) {
    const BackwardCall call(arguments);
    const auto empty_like = [](const at::Tensor& x, at::ScalarType type) {
        return at::empty_symint(x.sym_sizes(), x.options().dtype(type));
    };
    return {empty_like(call.q, call.out_dtype), empty_like(call.k, call.out_dtype), empty_like(call.v, call.out_dtype),
            empty_like(call.restart_mass, accumulation_type(call.q))};
}

std::string describe_kernels() {
    return with_value_errors([] { return dispatch::describe(); });
}

std::string instruction_set() {
    return with_value_errors([] { return dispatch::instruction_set(); });
}

std::string torch_version() {
    return SB_TORCH_VERSION;
}

std::string expired_waits() {
#if defined(SB_WITH_CUDA)
    return common::describe_expired_waits();
#else
    return "";
#endif
}

}  // namespace megatron_sb::ops
