// Attention to a KV cache. Uses the decode kernel if it serves the call, else the block contract with a table of
// segments.
#include <ATen/ATen.h>

#include "core/limits.h"
#include "dispatch/table.h"
#include "ops/block.h"
#include "ops/check.h"
#include "ops/device.h"
#include "ops/options.h"
#include "ops/registration.h"
#include "ops/tensors.h"
#include "ops/variants.h"

#if defined(SB_WITH_CUDA)
#include "kernels/decode/append.h"
#include "kernels/decode/decode.h"
#endif

namespace megatron_sb::ops {
namespace {

struct KvCacheCall {
    at::Tensor q;  // (b, s_q, h, d)
    // (b, s_cache, h_kv, d or d_v); with a table (blocks, block_size, h_kv, d or d_v). With forget_gate, rows of k are
    // wider by kGateColumns (core/params.h).
    at::Tensor k, v;
    at::Tensor cache_seqlens;      // (b,), int32
    OptionalTensor block_table;    // (b, max_blocks), int32
    OptionalTensor cache_leftpad;  // (b,), int32

    bool forget_gate;
    const char* q_name;   // the argument that q is: of an append "k"
    at::Tensor new_keys;  // of an append: (b, s_new, h_kv, d), with their gates

    explicit KvCacheCall(const Arguments& arguments, const char* q_name = "q")
        : q(arguments.tensor(q_name)),
          k(arguments.tensor("k_cache")),
          v(arguments.tensor("v_cache")),
          cache_seqlens(arguments.tensor("cache_seqlens")),
          block_table(arguments.optional_tensor("block_table")),
          cache_leftpad(arguments.optional_tensor("cache_leftpad")),
          forget_gate(arguments.get_or("forget_gate", false)),
          q_name(q_name) {}

    // The call that checks an append: the new keys, without their gates, take the place of the queries.
    static KvCacheCall of_append(const Arguments& arguments) {
        KvCacheCall call(arguments, "k");
        check_rank("k", call.q, 4, "(b, s_new, heads, head_dim)");
        call.new_keys = call.q;
        if (call.forget_gate) {
            const c10::SymInt head_dim = call.q.sym_size(3) - kGateColumns;
            TORCH_CHECK_VALUE(head_dim > 0, "k: head_dim with the gates must be more than ", kGateColumns, ", got ",
                              call.q.sym_size(3));
            call.q = call.q.narrow_symint(3, 0, head_dim);
        }
        return call;
    }

    bool paged() const { return block_table.has_value(); }
    // The largest possible number of keys of a sequence.
    c10::SymInt capacity() const { return paged() ? block_table->sym_size(1) * k.sym_size(1) : k.sym_size(1); }
};

// ---- checks, which also accept symbolic sizes
// x is int32 on the device of q, with one entry or row for each sequence.
void check_int32(const char* name, const at::Tensor& x, int64_t rank, const KvCacheCall& in) {
    check_defined(name, x);
    TORCH_CHECK_TYPE(x.scalar_type() == at::kInt, name, ": dtype must be int32, got ", x.scalar_type());
    check_device(name, x, in.q, in.q_name);
    check_rank(name, x, rank, rank == 1 ? "(b,)" : "(b, max_blocks)");
    check_size(name, "batch size", x.sym_size(0), in.q_name, in.q.sym_size(0));
}

void check_ranks(const KvCacheCall& in) {
    const char* cache_shape = in.paged() ? "(blocks, block_size, heads, head_dim)" : "(b, s_cache, heads, head_dim)";
    check_rank(in.q_name, in.q, 4, "(b, s_q, heads, head_dim)");
    check_rank("k_cache", in.k, 4, cache_shape);
    check_rank("v_cache", in.v, 4, cache_shape);
}

void check_call(const KvCacheCall& in) {
    check_ranks(in);
    for (const auto& [name, x] :
         {std::pair<const char*, const at::Tensor&>{in.q_name, in.q}, {"k_cache", in.k}, {"v_cache", in.v}}) {
        check_dtype(name, x);
        check_same_dtype(name, x, in.q, in.q_name);
        check_device(name, x, in.q, in.q_name);
    }
    check_head_dim(in.q_name, in.q.sym_size(3));
    check_head_dim("v_cache", in.v.sym_size(3));
    const c10::SymInt k_head_dim = in.k.sym_size(3) - (in.forget_gate ? int64_t(kGateColumns) : int64_t(0));
    check_size("k_cache", in.forget_gate ? "head_dim without the gates" : "head_dim", k_head_dim, in.q_name,
               in.q.sym_size(3));
    for (const auto& [dim, what] : {std::pair{0, "size 0"}, {1, "size 1"}, {2, "number of heads"}})
        check_size("v_cache", what, in.v.sym_size(dim), "k_cache", in.k.sym_size(dim));
    check_head_counts(in.q, in.k, "k_cache");
    check_int32("cache_seqlens", in.cache_seqlens, 1, in);
    if (in.cache_leftpad.has_value()) check_int32("cache_leftpad", *in.cache_leftpad, 1, in);
    if (in.paged()) {
        check_int32("block_table", *in.block_table, 2, in);
        TORCH_CHECK_VALUE(in.k.sym_size(1) > 0, "k_cache: block_size must be at least 1, got 0");
        check_at_most("k_cache", "block_size", in.k.sym_size(1), kMaxRows);  // so that the product cannot overflow
        check_at_most("block_table", "number of blocks of a sequence", in.block_table->sym_size(1), kMaxRows);
    } else {
        TORCH_CHECK_VALUE(in.k.sym_size(0) == in.q.sym_size(0), "k_cache: batch size must be ", in.q.sym_size(0),
                          " as in ", in.q_name, ", got ", in.k.sym_size(0), ". A paged cache needs a block_table.");
    }
    check_counts(in.q_name, in.q);
    check_at_most("k_cache", in.paged() ? "number of blocks" : "batch size", in.k.sym_size(0), kMaxCacheBlocks);
    check_at_most("k_cache", "number of positions", in.capacity(), kMaxRows);
}

// Checks the values of CPU tensors. Values on a GPU are not read: kernels clamp them.
void check_values(const KvCacheCall& in) {
    const at::Tensor ends = in.cache_seqlens.contiguous();
    const at::Tensor firsts = in.cache_leftpad.has_value() ? in.cache_leftpad->contiguous() : at::zeros_like(ends);
    const int64_t capacity = in.capacity().expect_int();
    for (int64_t i = 0; i < ends.numel(); ++i) {
        const int32_t end = ends.const_data_ptr<int32_t>()[i], first = firsts.const_data_ptr<int32_t>()[i];
        TORCH_CHECK_VALUE(end >= 0 && end <= capacity, "cache_seqlens of sequence ", i,
                          " must be from 0 to the capacity of the cache, ", capacity, ", got ", end);
        TORCH_CHECK_VALUE(first >= 0 && first <= end, "cache_leftpad of sequence ", i,
                          " must be from 0 to its cache_seqlens, ", end, ", got ", first);
        if (!in.paged()) continue;
        const int64_t used = (end + in.k.size(1) - 1) / in.k.size(1);
        const at::Tensor blocks = in.block_table->select(0, i).contiguous();
        for (int64_t j = 0; j < used; ++j) {
            const int32_t block = blocks.const_data_ptr<int32_t>()[j];
            TORCH_CHECK_VALUE(block >= 0 && block < in.k.size(0), "block_table: entry ", j, " of sequence ", i,
                              " must be a block of k_cache, from 0 to ", in.k.size(0) - 1, ", got ", block);
        }
    }
}

TensorPair empty_results(const KvCacheCall& in) {
    return {at::empty_symint({in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2), in.v.sym_size(3)}, in.q.options()),
            at::empty_symint({in.q.sym_size(0), in.q.sym_size(2), in.q.sym_size(1)},
                             in.q.options().dtype(accumulation_type(in.q)))};
}

// ---- as segments: the keys of all sequences are rows of one batch element, and each sequence is one segment

// The keys, without a copy. Sequence i has its first key in row i * pitch.
struct KeyRows {
    at::Tensor k, v;       // (1, rows, h_kv, d or d_v); with a table (blocks, block_size, h_kv, d or d_v)
    OptionalTensor table;  // of block_forward_paged
    int64_t pitch;
};

// Returns how many rows a sequence of a cache without blocks begins after the one before it. Returns 0 if that is no
// whole number, or if the sequences overlap.
int64_t rows_between_sequences(const at::Tensor& cache) {
    if (cache.size(0) == 1) return cache.size(1);
    const int64_t row = cache.stride(1), sequence = cache.stride(0);
    return row > 0 && sequence % row == 0 && sequence / row >= cache.size(1) ? sequence / row : 0;
}

KeyRows key_rows(const KvCacheCall& in) {
    const int64_t b = in.q.size(0), capacity = in.capacity().expect_int();
    if (in.paged()) return {in.k, in.v, in.block_table->contiguous(), capacity};
    const int64_t pitch = rows_between_sequences(in.k), rows = (b - 1) * pitch + capacity;
    if (pitch > 0 && pitch == rows_between_sequences(in.v) && rows <= kMaxRows) {
        const auto concatenated = [&](const at::Tensor& x) {
            return x.as_strided({1, rows, x.size(2), x.size(3)}, {x.stride(0), x.stride(1), x.stride(2), x.stride(3)});
        };
        return {concatenated(in.k), concatenated(in.v), std::nullopt, pitch};
    }
    return {in.k, in.v, at::arange(b, in.cache_seqlens.options()), capacity};  // each sequence is one block
}

TensorPair through_blocks(const KvCacheCall& in, const BlockOptions& options) {
    const int64_t b = in.q.size(0), s_q = in.q.size(1), capacity = in.capacity().expect_int();
    check_at_most("q", "number of rows of all sequences", b * s_q, kMaxRows);
    check_at_most("k_cache", "number of positions of all sequences", b * capacity, kMaxRows);
    const KeyRows keys = key_rows(in);
    const at::Tensor end = in.cache_seqlens.clamp(0, capacity);
    const at::Tensor first =
        in.cache_leftpad.has_value() ? at::minimum(in.cache_leftpad->clamp_min(0), end) : at::zeros_like(end);
    const at::Tensor sequence = at::arange(b, end.options());
    const at::Tensor segments = at::stack(
        {sequence * s_q, at::full_like(end, s_q), sequence * keys.pitch + first, end - first, end - first - s_q}, 1);
    const at::Tensor q = in.q.flatten(0, 1).unsqueeze(0);
    const at::ScalarType type = q.scalar_type();
    const BlockOutput out = keys.table.has_value()
                                ? block_forward_paged(q, keys.k, keys.v, *keys.table, segments, options, type)
                                : block_forward(q, keys.k, keys.v, segments, std::nullopt, options, type);
    return {out.o.view({b, s_q, in.q.size(2), in.v.size(3)}),
            out.mass.view({in.q.size(2), b, s_q}).transpose(0, 1).contiguous()};
}

// ---- on a GPU
#if defined(SB_WITH_CUDA)
Sizes sizes_of(const KvCacheCall& in) {
    return {dtype_of(in.q.scalar_type()),
            0,
            int32_t(in.q.size(0)),
            int32_t(in.q.size(2)),
            int32_t(in.k.size(2)),
            int32_t(in.q.size(1)),
            int32_t(in.capacity().expect_int()),
            int32_t(in.q.size(3)),
            int32_t(in.v.size(3))};
}

// Call this and through_decode on the device of the call.
bool decode_serves(const KvCacheCall& in, const Sizes& sizes) {
    if (sizes.q_rows * int64_t(sizes.num_heads / sizes.num_kv_heads) > decode::kMaxQueryRows) return false;
    const dispatch::Request request = {dispatch::Device::kCuda, device_architecture(in.q.device()), sizes.dtype,
                                       sizes.head_dim, sizes.head_dim_v};
    return dispatch::decode_serves(request) && decode::fits_device(sizes);
}

TensorPair through_decode(const KvCacheCall& in, const Sizes& sizes, const BlockOptions& options, void* stream) {
    const at::Tensor q = aligned(in.q), k = aligned(in.k), v = aligned(in.v);
    const at::Tensor ends = in.cache_seqlens.contiguous();
    const OptionalTensor firsts =
        in.cache_leftpad.has_value() ? OptionalTensor(in.cache_leftpad->contiguous()) : std::nullopt;
    const OptionalTensor table = in.paged() ? OptionalTensor(in.block_table->contiguous()) : std::nullopt;
    const auto [o, mass] = empty_results(in);

    decode::Params params;
    params.sizes = sizes;
    params.options = options;
    params.q = strided_rows<const void*>(q);
    params.k = strided_rows<const void*>(k);
    params.v = strided_rows<const void*>(v);
    params.o = strided_rows<void*>(o);
    params.mass = mass.data_ptr<float>();
    params.ends = ends.const_data_ptr<int32_t>();
    if (firsts.has_value()) params.firsts = firsts->const_data_ptr<int32_t>();
    if (table.has_value())
        params.table = {table->const_data_ptr<int32_t>(), table->stride(0), int32_t(k.size(1)), int32_t(k.size(0))};
    const decode::Plan plan = decode::plan_for(params);
    const at::Tensor workspace = empty_workspace(decode::workspace_bytes(params, plan), q);
    params.workspace = workspace.data_ptr();
    decode::forward(params, plan, stream);
    return {o, mass};
}
#endif

// ---- append
// The new keys come before `check_call`, which would name them q.
void check_append(const KvCacheCall& in, const at::Tensor& v) {
    check_rank("v", v, 4, "(b, s_new, heads, head_dim)");
    check_rank("cache_seqlens", in.cache_seqlens, 1, "(b,)");
    check_ranks(in);
    for (const auto& [name, x] : {std::pair<const char*, const at::Tensor&>{"k", in.new_keys}, {"v", v}}) {
        check_dtype(name, x);
        check_same_dtype(name, x, in.k, "k_cache");
        check_device(name, x, in.k, "k_cache");
        check_size(name, "batch size", x.sym_size(0), "cache_seqlens", in.cache_seqlens.sym_size(0));
        check_size(name, "number of heads", x.sym_size(2), "k_cache", in.k.sym_size(2));
    }
    for (const auto& [name, cache] : {std::pair<const char*, const at::Tensor&>{"k_cache", in.k}, {"v_cache", in.v}}) {
        TORCH_CHECK_VALUE(cache.sym_stride(3) == 1 || cache.sym_size(3) <= 1, name,
                          ": last stride must be 1 to append keys, got ", cache.sym_stride(3));
        for (int dim = 0; dim < 3; ++dim)  // the elements of an expanded dimension are one element
            TORCH_CHECK_VALUE(cache.sym_size(dim) <= 1 || cache.sym_stride(dim) != 0, name, ": stride of dimension ",
                              dim, " must not be 0 to append keys, as of an expanded tensor, got strides ",
                              cache.sym_strides());
    }
    check_size("k", "head_dim", in.new_keys.sym_size(3), "k_cache", in.k.sym_size(3));
    check_size("v", "head_dim", v.sym_size(3), "v_cache", in.v.sym_size(3));
    check_size("v", "number of positions", v.sym_size(1), "k", in.new_keys.sym_size(1));
    check_call(in);
}

// Checks the values of CPU tensors before anything is written.
void check_append_values(const KvCacheCall& in) {
    const at::Tensor lengths = in.cache_seqlens.contiguous();
    const int64_t num_new = in.q.size(1), capacity = in.capacity().expect_int();
    for (int64_t i = 0; i < lengths.numel(); ++i) {
        const int64_t length = lengths.const_data_ptr<int32_t>()[i];
        TORCH_CHECK_VALUE(length >= 0 && length <= capacity, "cache_seqlens of sequence ", i,
                          " must be from 0 to the capacity of the cache, ", capacity, ", got ", length);
        TORCH_CHECK_VALUE(length + num_new <= capacity, "k: number of positions must be at most ", capacity - length,
                          " for sequence ", i, ", the free ones in the cache, got ", num_new);
    }
    KvCacheCall after = in;
    after.cache_seqlens = lengths + num_new;
    check_values(after);
}

// Returns new keys or values, copied if they lie in the memory of a cache: rows are written while others are read.
at::Tensor apart_from_caches(const at::Tensor& x, const KvCacheCall& in) {
    return x.is_alias_of(in.k) || x.is_alias_of(in.v) ? x.clone() : x;
}

void append_on_cpu(const KvCacheCall& in, const at::Tensor& v) {
    const at::TensorOptions options = in.q.options().dtype(at::kLong);
    at::Tensor position = in.cache_seqlens.to(at::kLong).unsqueeze(1) + at::arange(in.q.size(1), options);
    at::Tensor block = at::arange(in.q.size(0), options).unsqueeze(1);
    if (in.paged()) {
        block = in.block_table->to(at::kLong).gather(1, position.floor_divide(in.k.size(1)));
        position = position.remainder(in.k.size(1));
    }
    const c10::List<OptionalTensor> where({block, position});
    at::Tensor k_cache = in.k, v_cache = in.v;
    k_cache.index_put_(where, in.new_keys);
    v_cache.index_put_(where, v);
}

#if defined(SB_WITH_CUDA)
// Tells autograd that a kernel has written to x, as operators of torch do: a backward that saved x then raises an
// error.
void count_write(const at::Tensor& x) {
    if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

void append_on_gpu(const KvCacheCall& in, const at::Tensor& v_given) {
    const DeviceScope scope(in.q.device());
    const at::Tensor k = unit_last_stride(in.new_keys), v = unit_last_stride(v_given);
    const at::Tensor lengths = in.cache_seqlens.contiguous();
    const OptionalTensor table = in.paged() ? OptionalTensor(in.block_table->contiguous()) : std::nullopt;
    decode::AppendParams params;
    params.k = strided_rows<const void*>(k);
    params.v = strided_rows<const void*>(v);
    params.k_cache = strided_rows<void*>(in.k);
    params.v_cache = strided_rows<void*>(in.v);
    params.batch = int32_t(k.size(0));
    params.num_rows = int32_t(k.size(1));
    params.num_heads = int32_t(k.size(2));
    params.k_width = int32_t(k.size(3));
    params.v_width = int32_t(v.size(3));
    params.element_bytes = int32_t(k.element_size());
    params.capacity = int32_t(in.capacity().expect_int());
    params.lengths = lengths.const_data_ptr<int32_t>();
    if (table.has_value())
        params.table = {table->const_data_ptr<int32_t>(), table->stride(0), int32_t(in.k.size(1)),
                        int32_t(in.k.size(0))};
    decode::append(params, scope.stream());
    for (const at::Tensor& cache : {in.k, in.v}) count_write(cache);
}
#endif

// The new keys and values of attention_kvcache, if any, and the lengths after they are appended.
at::Tensor append_new_keys(const KvCacheCall& in, const OptionalTensor& k, const OptionalTensor& v) {
    TORCH_CHECK_VALUE(k.has_value() == v.has_value(), k.has_value() ? "v" : "k", " must be given with ",
                      k.has_value() ? "k" : "v", ", got None");
    if (!k.has_value()) return in.cache_seqlens;
    check_call(in);  // an invalid argument raises its error before the cache is changed
    static const Operator kvcache_append("megatron_sb::kvcache_append");
    kvcache_append.call({{"k_cache", in.k},
                         {"v_cache", in.v},
                         {"k", *k},
                         {"v", *v},
                         {"cache_seqlens", in.cache_seqlens},
                         {"block_table", in.block_table},
                         {"cache_leftpad", in.cache_leftpad},
                         {"forget_gate", in.forget_gate}});
    return in.cache_seqlens.add(at::Scalar(k->sym_size(1)));
}

void check_no_gradient(const char* name, const at::Tensor& x) {
    TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !x.requires_grad(), name,
                      " must not require a gradient, got requires_grad=True: attention to a cache has no backward. "
                      "Call it under torch.no_grad(), or use stickbreaking_attention for training.");
    TORCH_CHECK_VALUE(!x._fw_grad(/*level=*/0).defined(), name,
                      " must have no tangent, got one: attention to a cache has no derivative, in forward mode either "
                      "(torch.func.jvp, torch.autograd.forward_ad).");
}

// The queries with their columns. key_bias: whether the keys have columns of biases; those of Euclidean logits do.
at::Tensor queries_of_cache(const KvCacheCall& in, const AttentionOptions& options, double scale, bool key_bias) {
    TORCH_CHECK_VALUE(!options.query_bias.has_value() || key_bias || options.euclidean,
                      "key_bias must be True with query_bias and dot-product logits, because the stored keys need the "
                      "columns of biases, got False. Store the keys with a key_bias, for example of zeros.");
    if (options.query_bias.has_value()) check_no_gradient("query_bias", *options.query_bias);
    check_variants(in.q, in.k, options, key_bias);
    BiasColumns columns = bias_columns(options, scale);
    columns.exist = columns.exist || key_bias;
    return extended_queries(in.q, options.query_bias, columns);
}

}  // namespace

NoTensor kvcache_append(const Arguments& arguments) {
    KvCacheCall in = KvCacheCall::of_append(arguments);
    at::Tensor v = arguments.tensor("v");
    check_append(in, v);
    if (in.q.is_cpu()) check_append_values(in);
    if (in.q.numel() == 0 || in.k.numel() == 0) return {};
    for (at::Tensor* x : {&in.new_keys, &v}) *x = apart_from_caches(*x, in);
#if defined(SB_WITH_CUDA)
    if (in.q.is_cuda()) {
        append_on_gpu(in, v);
        return {};
    }
#endif
    append_on_cpu(in, v);
    return {};
}

NoTensor kvcache_append_fake(const Arguments& arguments) {
    check_append(KvCacheCall::of_append(arguments), arguments.tensor("v"));
    return {};
}

TensorPair kvcache_forward(const Arguments& arguments) {
    KvCacheCall in(arguments);
    const BlockOptions options = read_block_options(arguments);
    check_call(in);
    check_options(options);
    if (in.q.is_cpu()) check_values(in);
    const auto results = empty_results(in);
    if (in.q.numel() == 0) return results;
    if (in.capacity() == 0 || in.k.numel() == 0) {  // no keys
        std::get<0>(results).zero_();
        std::get<1>(results).fill_(1);
        return results;
    }
    for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = unit_last_stride(*x);
#if defined(SB_WITH_CUDA)
    if (in.q.is_cuda()) {
        const DeviceScope scope(in.q.device());
        const Sizes sizes = sizes_of(in);
        if (decode_serves(in, sizes)) return through_decode(in, sizes, options, scope.stream());
    }
#endif
    return through_blocks(in, options);
}

TensorPair kvcache_forward_fake(const Arguments& arguments) {
    const KvCacheCall in(arguments);
    check_call(in);
    check_options(read_block_options(arguments));
    return empty_results(in);
}

TensorPair attention_kvcache(const Arguments& arguments) {
    KvCacheCall in(arguments);
    const OptionalTensor k = arguments.optional_tensor("k"), v = arguments.optional_tensor("v");
    for (const auto& [name, x] :
         {std::pair<const char*, const at::Tensor&>{"q", in.q}, {"k_cache", in.k}, {"v_cache", in.v}})
        check_no_gradient(name, x);
    if (k.has_value()) check_no_gradient("k", *k);
    if (v.has_value()) check_no_gradient("v", *v);
    check_ranks(in);
    check_head_dim("q", in.q.sym_size(3));
    const AttentionOptions given = read_query_options(arguments);
    BlockOptions options = block_options(given, in.q);
    options.forget_gate = in.forget_gate;
    const auto key_bias = arguments.get<bool>("key_bias");
    options.bias_columns = options.bias_columns || key_bias;
    in.q = queries_of_cache(in, given, options.scale, key_bias);
    const at::Tensor cache_seqlens = append_new_keys(in, k, v);
    static const Operator kvcache_forward("megatron_sb::kvcache_forward");
    const NamedArguments inputs = {{"q", in.q},
                                   {"k_cache", in.k},
                                   {"v_cache", in.v},
                                   {"cache_seqlens", cache_seqlens},
                                   {"block_table", in.block_table},
                                   {"cache_leftpad", in.cache_leftpad}};
    return output_and_mass(kvcache_forward.call(inputs, named(options)));
}

}  // namespace megatron_sb::ops
