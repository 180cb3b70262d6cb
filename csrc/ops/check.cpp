#include "ops/check.h"

#include <ATen/ATen.h>

#include <cmath>

#include "core/error.h"
#include "core/limits.h"

namespace megatron_sb::ops {

void check_defined(const char* name, const at::Tensor& x) {
    TORCH_CHECK_VALUE(x.defined(), name, " must be a tensor, got an undefined one.");
}

void check_rank(const char* name, const at::Tensor& x, int64_t rank, const char* shape) {
    check_defined(name, x);
    TORCH_CHECK_VALUE(x.dim() == rank, name, " must have ", rank, rank == 1 ? " dimension, " : " dimensions, ", shape,
                      ", got ", x.dim());
}

void check_dtype(const char* name, const at::Tensor& x) {
    check_defined(name, x);
    const at::ScalarType type = x.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf, name,
                     ": dtype must be float32, float64, bfloat16 or float16, got ", type);
}

void check_elements(const char* name, const at::Tensor& x) {
    const bool holds_elements =
        x.has_storage() && x.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
    TORCH_CHECK_TYPE(holds_elements || (x.has_storage() && x.sym_numel() == 0), name,
                     " must be a tensor that holds its elements, got one on ", x.device(),
                     " that holds none. Pass the local tensor of a DTensor, and no FakeTensor or other wrapper.");
}

void check_device(const char* name, const at::Tensor& x, const at::Tensor& like, const char* like_name) {
    TORCH_CHECK_VALUE(x.device() == like.device(), name, ": device must be ", like.device(), " as in ", like_name,
                      ", got ", x.device());
}

void check_size(const char* name, const char* what, const c10::SymInt& size, const char* like_name,
                const c10::SymInt& like) {
    TORCH_CHECK_VALUE(size == like, name, ": ", what, " must be ", like, " as in ", like_name, ", got ", size);
}

void check_same_dtype(const char* name, const at::Tensor& x, const at::Tensor& like, const char* like_name) {
    TORCH_CHECK_TYPE(x.scalar_type() == like.scalar_type(), name, ": dtype must be ", like.scalar_type(), " as in ",
                     like_name, ", got ", x.scalar_type(), ". Convert the tensors or use autocast.");
}

void check_head_counts(const at::Tensor& q, const at::Tensor& k, const char* k_name) {
    TORCH_CHECK_VALUE(q.sym_size(2) > 0 && k.sym_size(2) > 0 && q.sym_size(2) % k.sym_size(2) == 0,
                      "q: number of heads must be a positive multiple of the heads of ", k_name, ", got ",
                      q.sym_size(2), " heads of q and ", k.sym_size(2), " of ", k_name);
}

void check_head_dim(const char* name, const c10::SymInt& head_dim) {
    TORCH_CHECK_VALUE(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % kHeadDimMultiple == 0, name,
                      ": head_dim must be a multiple of ", kHeadDimMultiple, " and at most ", kMaxHeadDim, ", got ",
                      head_dim);
}

void check_at_most(const char* name, const char* what, const c10::SymInt& size, int64_t limit) {
    TORCH_CHECK_VALUE(size <= limit, name, ": ", what, " must be at most ", limit, ", got ", size);
}

void check_counts(const char* name, const at::Tensor& x) {
    check_at_most(name, "number of rows", x.sym_size(1), kMaxRows);
    check_at_most(name, "batch size", x.sym_size(0), kMaxHeads);
    check_at_most(name, "number of heads", x.sym_size(2), kMaxHeads);  // so that the product cannot overflow
    check_at_most(name, "batch size times number of heads", x.sym_size(0) * x.sym_size(2), kMaxHeads);
}

void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool gates) {
    for (const auto& [name, x] : {std::pair<const char*, const at::Tensor&>{"q", q}, {"k", k}, {"v", v}}) {
        check_dtype(name, x);
        check_same_dtype(name, x, q, "q");
        check_device(name, x, q, "q");
    }
    check_size("k", "batch size", k.sym_size(0), "q", q.sym_size(0));
    check_size("v", "batch size", v.sym_size(0), "q", q.sym_size(0));
    check_size("v", "number of keys", v.sym_size(1), "k", k.sym_size(1));
    check_size("v", "number of heads", v.sym_size(2), "k", k.sym_size(2));
    const c10::SymInt k_head_dim = k.sym_size(3) - (gates ? int64_t(kGateColumns) : int64_t(0));
    check_size("k", gates ? "head_dim without the gates" : "head_dim", k_head_dim, "q", q.sym_size(3));
    check_head_dim("q", q.sym_size(3));
    check_head_dim("v", v.sym_size(3));
    check_head_counts(q, k, "k");
    check_counts("q", q);
    check_counts("k", k);
}

void check_lengths(const at::Tensor& q, const at::Tensor& k) {
    TORCH_CHECK_VALUE(q.sym_size(1) <= k.sym_size(1), "q: number of positions must be at most ", k.sym_size(1),
                      " as in k, got ", q.sym_size(1), ". The queries are the last positions of the keys.");
}

void check_options(const Options& options) {
    TORCH_CHECK_VALUE(std::isfinite(options.scale), "scale must be finite, got ", options.scale);
    TORCH_CHECK_VALUE(options.mass_threshold >= 0 && options.mass_threshold < 1,
                      "mass_threshold must be in [0, 1), got ", options.mass_threshold, ". Use 0 to disable skipping.");
    TORCH_CHECK_VALUE(options.reach >= kMinReach && options.reach <= kMaxReach && std::isfinite(options.reach_step),
                      "reach must be from ", kMinReach, " to ", kMaxReach, ", and reach_step finite, got ",
                      options.reach, " and ", options.reach_step);
}

void check_cu_seqlens_form(const char* name, const at::Tensor& cu_seqlens, const at::Tensor& like,
                           const char* like_name) {
    check_defined(name, cu_seqlens);
    TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == at::kInt, name, ": dtype must be int32, got ",
                     cu_seqlens.scalar_type());
    check_rank(name, cu_seqlens, 1, "(documents + 1,)");
    TORCH_CHECK_VALUE(cu_seqlens.sym_size(0) >= 1, name, " must have documents + 1 entries, got none");
    check_device(name, cu_seqlens, like, like_name);
}

void check_cu_seqlens_values(const char* name, const at::Tensor& cu_seqlens, int64_t rows) {
    const int32_t* at = cu_seqlens.const_data_ptr<int32_t>();
    const int64_t documents = cu_seqlens.numel() - 1;
    TORCH_CHECK_VALUE(at[0] == 0, name, " must start at 0, got ", at[0]);
    for (int64_t i = 0; i < documents; ++i)
        TORCH_CHECK_VALUE(at[i + 1] >= at[i], name, " must not decrease, got ", at[i], " and then ", at[i + 1],
                          " at document ", i);
    TORCH_CHECK_VALUE(at[documents] <= rows, name, " must end at most at the number of rows, ", rows, ", got ",
                      at[documents]);
}

void check_row_values(const char* name, const at::Tensor& values, const at::Tensor& x, const char* x_name,
                      at::ScalarType dtype) {
    check_defined(name, values);
    TORCH_CHECK_TYPE(values.scalar_type() == dtype, name, ": dtype must be ", dtype, ", got ", values.scalar_type());
    check_device(name, values, x, x_name);
    const bool packed = x.dim() == 3;
    const c10::SymInt rows = x.sym_size(-3), heads = x.sym_size(-2);
    const bool fits = values.dim() == x.dim() - 1 && (packed || values.sym_size(0) == x.sym_size(0)) &&
                      values.sym_size(-2) == heads && values.sym_size(-1) == rows;
    TORCH_CHECK_VALUE(fits, name, ": shape must be (", packed ? "" : "batch, ", "heads, rows) of ", x_name, ", (",
                      packed ? "" : concat(x.sym_size(0), ", "), heads, ", ", rows, "), got ", values.sym_sizes());
}

}  // namespace megatron_sb::ops
