#include "ops/check.h"

#include <ATen/ATen.h>

#include <cmath>

#include "core/limits.h"
#include "core/params.h"

namespace megatron_sb::ops {
namespace {

void check_same_size(const char* what, const c10::SymInt& a, const char* a_name, const c10::SymInt& b,
                     const char* b_name) {
    TORCH_CHECK_VALUE(a == b, what, " differs: ", a_name, " has ", a, ", ", b_name, " has ", b);
}

}  // namespace

void check_dtype(const char* name, const at::Tensor& x) {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble ||
                         x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf,
                     name, ": dtype is ", x.scalar_type(), "; float32, float64, bfloat16 and float16 are allowed");
}

void check_head_dim(const char* name, const c10::SymInt& head_dim) {
    TORCH_CHECK_VALUE(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % kHeadDimMultiple == 0, name,
                      ": head_dim is ", head_dim, "; a multiple of ", kHeadDimMultiple, " up to ", kMaxHeadDim,
                      " is allowed");
}

void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool gates) {
    for (const auto& [name, x] : {std::pair<const char*, const at::Tensor&>{"q", q}, {"k", k}, {"v", v}}) {
        check_dtype(name, x);
        TORCH_CHECK_TYPE(x.scalar_type() == q.scalar_type(), name, ": dtype is ", x.scalar_type(), " but q's is ",
                         q.scalar_type(), "; q, k and v need one dtype (or autocast)");
        TORCH_CHECK_VALUE(x.device() == q.device(), name, ": device is ", x.device(), " but q's is ", q.device(),
                          "; q, k and v need one device");
    }
    check_same_size("batch", k.sym_size(0), "k", q.sym_size(0), "q");
    check_same_size("batch", v.sym_size(0), "v", q.sym_size(0), "q");
    check_same_size("number of keys", v.sym_size(1), "v", k.sym_size(1), "k");
    check_same_size("number of heads", v.sym_size(2), "v", k.sym_size(2), "k");
    const c10::SymInt k_width = k.sym_size(3) - (gates ? int64_t(kGateColumns) : int64_t(0));
    check_same_size(gates ? "head_dim without gates" : "head_dim", k_width, "k", q.sym_size(3), "q");
    check_head_dim("q", q.sym_size(3));
    check_head_dim("v", v.sym_size(3));
    TORCH_CHECK_VALUE(q.sym_size(2) > 0 && k.sym_size(2) > 0 && q.sym_size(2) % k.sym_size(2) == 0, "q has ",
                      q.sym_size(2), " heads and k has ", k.sym_size(2),
                      "; the heads of q must be a positive multiple of those of k and v");
    TORCH_CHECK_VALUE(q.sym_size(1) <= kMaxRows && k.sym_size(1) <= kMaxRows, "q has ", q.sym_size(1), " rows and k ",
                      k.sym_size(1), "; up to ", kMaxRows, " are allowed");
}

void check_lengths(const at::Tensor& q, const at::Tensor& k) {
    TORCH_CHECK_VALUE(q.sym_size(1) <= k.sym_size(1), "q has ", q.sym_size(1), " positions and k has ", k.sym_size(1),
                      "; the queries are the last positions of the keys, so q may not have more");
}

void check_options(double scale, double mass_threshold) {
    TORCH_CHECK_VALUE(std::isfinite(scale), "scale is ", scale, "; a finite number is allowed");
    TORCH_CHECK_VALUE(mass_threshold >= 0 && mass_threshold < 1, "mass_threshold is ", mass_threshold,
                      "; 0 (no skipping) up to, not including, 1 is allowed");
}

void check_cu_seqlens_form(const char* name, const at::Tensor& cu_seqlens, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == at::kInt, name, ": dtype is ", cu_seqlens.scalar_type(),
                     "; int32 is allowed");
    TORCH_CHECK_VALUE(cu_seqlens.dim() == 1, name, ": has ", cu_seqlens.dim(),
                      " dimensions; one, (documents + 1,), is allowed");
    TORCH_CHECK_VALUE(cu_seqlens.sym_size(0) >= 1, name,
                      ": is empty; (documents + 1,) entries, the first 0, are needed");
    TORCH_CHECK_VALUE(cu_seqlens.device() == tensor.device(), name, ": device is ", cu_seqlens.device(), " but q's is ",
                      tensor.device());
}

void check_cu_seqlens_values(const char* name, const at::Tensor& cu_seqlens, int64_t rows) {
    const int32_t* at = cu_seqlens.const_data_ptr<int32_t>();
    const int64_t documents = cu_seqlens.numel() - 1;
    TORCH_CHECK_VALUE(at[0] == 0, name, ": starts at ", at[0], "; it must start at 0");
    for (int64_t i = 0; i < documents; ++i)
        TORCH_CHECK_VALUE(at[i + 1] >= at[i], name, ": decreases from ", at[i], " to ", at[i + 1], " at document ", i,
                          "; offsets may not decrease");
    TORCH_CHECK_VALUE(at[documents] <= rows, name, ": ends at ", at[documents], ", beyond the ", rows,
                      " rows there are");
}

void check_row_values(const char* name, const at::Tensor& values, const at::Tensor& q, at::ScalarType dtype) {
    TORCH_CHECK_TYPE(values.scalar_type() == dtype, name, ": dtype is ", values.scalar_type(), "; ", dtype,
                     " is needed");
    TORCH_CHECK_VALUE(values.device() == q.device(), name, ": device is ", values.device(), " but q's is ", q.device());
    TORCH_CHECK_VALUE(values.dim() == 3 && values.sym_size(0) == q.sym_size(0) && values.sym_size(1) == q.sym_size(2) &&
                          values.sym_size(2) == q.sym_size(1),
                      name, ": shape is ", values.sym_sizes(), "; (batch, heads, rows) of q is needed");
}

}  // namespace megatron_sb::ops
