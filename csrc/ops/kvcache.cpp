// Attention to a KV cache: kernels/decode where it serves, else a table of segments over the block contract.
#include "ops/kvcache.h"

#include <ATen/ATen.h>

#include <cmath>

#include "core/limits.h"
#include "dispatch/table.h"
#include "ops/block.h"
#include "ops/check.h"
#include "ops/device.h"
#include "ops/registration.h"

#if defined(SB_WITH_CUDA)
#include "kernels/decode/decode.h"
#endif

namespace megatron_sb::ops {
namespace {

struct Arguments {
    at::Tensor q;                  // (b, s_q, h, d)
    at::Tensor k, v;               // (b, s_cache, h_kv, d or d_v); with a table (blocks, block_size, h_kv, d or d_v)
    at::Tensor cache_seqlens;      // (b,), int32
    OptionalTensor block_table;    // (b, max_blocks), int32
    OptionalTensor cache_leftpad;  // (b,), int32
    double scale;
    bool attend_current;
    double mass_threshold;

    bool paged() const { return block_table.has_value(); }
    // The most keys that a sequence can have.
    c10::SymInt capacity() const { return paged() ? block_table->sym_size(1) * k.sym_size(1) : k.sym_size(1); }
};

// ---- check: works on symbolic sizes too
void check_int32(const char* name, const at::Tensor& x, int64_t rank, const at::Tensor& q) {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kInt, name, ": dtype is ", x.scalar_type(), "; int32 is allowed");
    TORCH_CHECK_VALUE(x.device() == q.device(), name, ": device is ", x.device(), " but q's is ", q.device());
    TORCH_CHECK_VALUE(x.dim() == rank, name, ": has ", x.dim(), " dimensions; ",
                      rank == 1 ? "one, (b,), is allowed" : "two, (b, max_blocks), are allowed");
    TORCH_CHECK_VALUE(x.sym_size(0) == q.sym_size(0), name, ": has ", x.sym_size(0), " rows but q has ", q.sym_size(0),
                      " sequences");
}

void check_ranks(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache, bool paged) {
    const char* cache_shape = paged ? "(blocks, block_size, heads, head_dim)" : "(b, s_cache, heads, head_dim)";
    for (const auto& [name, x] :
         {std::pair<const char*, const at::Tensor&>{"q", q}, {"k_cache", k_cache}, {"v_cache", v_cache}})
        TORCH_CHECK_VALUE(x.dim() == 4, name, ": has ", x.dim(), " dimensions; 4, ",
                          name[0] == 'q' ? "(b, s_q, heads, head_dim)" : cache_shape, ", are needed");
}

void check_arguments(const Arguments& in) {
    check_ranks(in.q, in.k, in.v, in.paged());
    for (const auto& [name, x] :
         {std::pair<const char*, const at::Tensor&>{"q", in.q}, {"k_cache", in.k}, {"v_cache", in.v}}) {
        check_dtype(name, x);
        TORCH_CHECK_TYPE(x.scalar_type() == in.q.scalar_type(), name, ": dtype is ", x.scalar_type(), " but q's is ",
                         in.q.scalar_type(), "; q and the cache need one dtype (or autocast)");
        TORCH_CHECK_VALUE(x.device() == in.q.device(), name, ": device is ", x.device(), " but q's is ", in.q.device(),
                          "; q and the cache need one device");
        check_head_dim(name, x.sym_size(3));
    }
    TORCH_CHECK_VALUE(in.k.sym_size(3) == in.q.sym_size(3), "k_cache: head_dim is ", in.k.sym_size(3), " but q's is ",
                      in.q.sym_size(3));
    for (int dim = 0; dim < 3; ++dim)
        TORCH_CHECK_VALUE(in.v.sym_size(dim) == in.k.sym_size(dim), "v_cache: size ", dim, " is ", in.v.sym_size(dim),
                          " but k_cache's is ", in.k.sym_size(dim));
    TORCH_CHECK_VALUE(in.q.sym_size(2) > 0 && in.k.sym_size(2) > 0 && in.q.sym_size(2) % in.k.sym_size(2) == 0,
                      "q has ", in.q.sym_size(2), " heads and k_cache has ", in.k.sym_size(2),
                      "; the heads of q must be a positive multiple of those of the cache");
    check_int32("cache_seqlens", in.cache_seqlens, 1, in.q);
    if (in.cache_leftpad.has_value()) check_int32("cache_leftpad", *in.cache_leftpad, 1, in.q);
    if (in.paged()) {
        check_int32("block_table", *in.block_table, 2, in.q);
        TORCH_CHECK_VALUE(in.k.sym_size(1) > 0, "k_cache: block_size is 0; 1 or more is allowed");
    } else {
        TORCH_CHECK_VALUE(in.k.sym_size(0) == in.q.sym_size(0), "k_cache: batch is ", in.k.sym_size(0), " but q's is ",
                          in.q.sym_size(0), "; a cache of another shape needs a block_table");
    }
    TORCH_CHECK_VALUE(in.q.sym_size(1) <= kMaxRows && in.capacity() <= kMaxRows, "q has ", in.q.sym_size(1),
                      " positions and the cache holds ", in.capacity(), " a sequence; up to ", kMaxRows,
                      " are allowed");
    check_options(in.scale, in.mass_threshold);
}

// On a CPU, where values can be looked at.
void check_values(const Arguments& in) {
    const at::Tensor ends = in.cache_seqlens.contiguous();
    const at::Tensor firsts = in.cache_leftpad.has_value() ? in.cache_leftpad->contiguous() : at::zeros_like(ends);
    const int64_t capacity = in.capacity().expect_int();
    for (int64_t i = 0; i < ends.numel(); ++i) {
        const int32_t end = ends.const_data_ptr<int32_t>()[i], first = firsts.const_data_ptr<int32_t>()[i];
        TORCH_CHECK_VALUE(end >= 0 && end <= capacity, "cache_seqlens: sequence ", i, " has ", end, " keys; 0 to ",
                          capacity, ", what the cache holds, are allowed");
        TORCH_CHECK_VALUE(first >= 0 && first <= end, "cache_leftpad: that of sequence ", i, " is ", first, "; 0 to ",
                          end, ", its cache_seqlens, is allowed");
        if (!in.paged()) continue;
        const int64_t used = (end + in.k.size(1) - 1) / in.k.size(1);
        const at::Tensor blocks = in.block_table->select(0, i).contiguous();
        for (int64_t j = 0; j < used; ++j) {
            const int32_t block = blocks.const_data_ptr<int32_t>()[j];
            TORCH_CHECK_VALUE(block >= 0 && block < in.k.size(0), "block_table: entry ", j, " of sequence ", i, " is ",
                              block, "; 0 to ", in.k.size(0) - 1, ", a block of k_cache, is allowed");
        }
    }
}

Two empty_results(const Arguments& in) {
    return {at::empty_symint({in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2), in.v.sym_size(3)}, in.q.options()),
            at::empty_symint({in.q.sym_size(0), in.q.sym_size(2), in.q.sym_size(1)},
                             in.q.options().dtype(accumulation_type(in.q)))};
}

// ---- as segments: the caches of all sequences as one run of rows, each sequence a segment of it
Two through_blocks(const Arguments& in) {
    const int64_t b = in.q.size(0), s_q = in.q.size(1), capacity = in.capacity().expect_int();
    const auto run = [&](const at::Tensor& cache) {
        if (!in.paged()) return cache.flatten(0, 1).unsqueeze(0);
        // Entries beyond a sequence's keys may be anything: what they stand for is read by nobody.
        const at::Tensor blocks = in.block_table->clamp(0, cache.size(0) - 1).flatten();
        return cache.index_select(0, blocks).flatten(0, 1).unsqueeze(0);
    };
    const at::Tensor end = in.cache_seqlens.clamp(0, capacity);
    const at::Tensor first =
        in.cache_leftpad.has_value() ? at::minimum(in.cache_leftpad->clamp_min(0), end) : at::zeros_like(end);
    const auto table = [&](const at::Tensor& number) {
        return at::stack(
            {number * s_q, at::full_like(end, s_q), number * capacity + first, end - first, end - first - s_q}, 1);
    };
    const BlockOptions options = {in.scale, in.attend_current, in.mass_threshold};
    const auto all_alike = [](const at::Tensor& x) { return x.eq(x[0]).all().item<bool>(); };
    if (in.q.is_cpu() && !in.paged() && all_alike(end) && all_alike(first)) {  // one segment is that of every sequence
        const at::Tensor segment = table(at::zeros_like(end)).narrow(0, 0, 1);
        const BlockOutput out = block_forward(in.q, in.k, in.v, segment, std::nullopt, options, in.q.scalar_type());
        return {out.o, out.mass};
    }
    const at::Tensor segments = table(at::arange(b, end.options()));
    const BlockOutput out = block_forward(in.q.flatten(0, 1).unsqueeze(0), run(in.k), run(in.v), segments, std::nullopt,
                                          options, in.q.scalar_type());
    return {out.o.view({b, s_q, in.q.size(2), in.v.size(3)}),
            out.mass.view({in.q.size(2), b, s_q}).transpose(0, 1).contiguous()};
}

// ---- on a GPU
#if defined(SB_WITH_CUDA)
bool decode_serves(const Arguments& in) {
    const dispatch::Request request = {dispatch::Device::kCuda, device_architecture(in.q.device()),
                                       dtype_of(in.q.scalar_type()), int(in.q.size(3)), int(in.v.size(3))};
    return in.q.size(1) * (in.q.size(2) / in.k.size(2)) <= decode::kMaxQueryRows && dispatch::decode_serves(request);
}

Two through_decode(const Arguments& in) {
    const DeviceScope scope(in.q.device());
    const at::Tensor q = aligned(in.q), k = aligned(in.k), v = aligned(in.v);
    const at::Tensor ends = in.cache_seqlens.contiguous();
    const OptionalTensor firsts =
        in.cache_leftpad.has_value() ? OptionalTensor(in.cache_leftpad->contiguous()) : std::nullopt;
    const OptionalTensor table = in.paged() ? OptionalTensor(in.block_table->contiguous()) : std::nullopt;
    const auto [o, mass] = empty_results(in);

    decode::Params params;
    params.sizes = {dtype_of(q.scalar_type()), int32_t(q.size(0)), int32_t(q.size(2)),
                    int32_t(k.size(2)),        int32_t(q.size(1)), int32_t(in.capacity().expect_int()),
                    int32_t(q.size(3)),        int32_t(v.size(3))};
    params.options = {in.scale, in.mass_threshold, in.attend_current};
    params.q = rows_of<const void*>(q);
    params.k = rows_of<const void*>(k);
    params.v = rows_of<const void*>(v);
    params.o = rows_of<void*>(o);
    params.mass = mass.data_ptr<float>();
    params.ends = ends.const_data_ptr<int32_t>();
    if (firsts.has_value()) params.firsts = firsts->const_data_ptr<int32_t>();
    if (table.has_value())
        params.table = {table->const_data_ptr<int32_t>(), table->stride(0), int32_t(k.size(1)), int32_t(k.size(0))};
    const decode::Plan plan = decode::plan_for(params);
    const at::Tensor workspace = at::empty({decode::workspace_bytes(params, plan)}, q.options().dtype(at::kByte));
    params.workspace = workspace.data_ptr();
    decode::forward(params, plan, scope.stream());
    return {o, mass};
}
#endif

}  // namespace

Two kvcache_forward(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                    const at::Tensor& cache_seqlens, const OptionalTensor& block_table,
                    const OptionalTensor& cache_leftpad, double scale, bool attend_current, double mass_threshold) {
    const Arguments in = {q,     k_cache,        v_cache,       cache_seqlens, block_table, cache_leftpad,
                          scale, attend_current, mass_threshold};
    check_arguments(in);
    if (q.is_cpu()) check_values(in);
    const auto results = empty_results(in);
    if (q.numel() == 0) return results;
    if (in.capacity() == 0 || k_cache.numel() == 0) {  // no keys at all
        std::get<0>(results).zero_();
        std::get<1>(results).fill_(1);
        return results;
    }
#if defined(SB_WITH_CUDA)
    if (q.is_cuda() && decode_serves(in)) return through_decode(in);
#endif
    return through_blocks(in);
}

Two kvcache_forward_meta(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                         const at::Tensor& cache_seqlens, const OptionalTensor& block_table,
                         const OptionalTensor& cache_leftpad, double scale, bool attend_current,
                         double mass_threshold) {
    const Arguments in = {q,     k_cache,        v_cache,       cache_seqlens, block_table, cache_leftpad,
                          scale, attend_current, mass_threshold};
    check_arguments(in);
    return empty_results(in);
}

Two attention_kvcache(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                      const at::Tensor& cache_seqlens, const OptionalTensor& block_table,
                      const OptionalTensor& cache_leftpad, std::optional<double> scale, bool attend_current,
                      double mass_threshold) {
    for (const auto& [name, x] :
         {std::pair<const char*, const at::Tensor&>{"q", q}, {"k_cache", k_cache}, {"v_cache", v_cache}})
        TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !x.requires_grad(), name,
                          ": requires a gradient, which attention to a cache has none of; call it under "
                          "torch.no_grad(), or stickbreaking_attention for training");
    check_ranks(q, k_cache, v_cache, block_table.has_value());
    check_head_dim("q", q.sym_size(3));
    const double used_scale = scale.value_or(1 / std::sqrt(double(q.sym_size(3).guard_int(__FILE__, __LINE__))));
    static const auto op = registered("megatron_sb::kvcache_forward", kvcache_forward);
    return op.call(unit_last_stride(q), unit_last_stride(k_cache), unit_last_stride(v_cache), cache_seqlens,
                   block_table, cache_leftpad, used_scale, attend_current, mass_threshold);
}

}  // namespace megatron_sb::ops
