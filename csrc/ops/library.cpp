// The operators on one screen. csrc/distributed registers context_parallel_attention and its plan.
//
// Shapes        dense (b, s, h, d)                               packed (t, h, d)
// q             (b, s, h, d)                                     (t, h, d)
// k, v          (b, s_k, h_kv, d), (b, s_k, h_kv, d_v)           (t_k, h_kv, d), (t_k, h_kv, d_v)
// o             (b, s, h, d_v)                                   (t, h, d_v)
// mass          (b, h, s), as all other values of a row          (h, t)
// query_bias    (b, s, h)                                        (t, h)
// key_bias      (b, s_k, h_kv), also forget_gate                 (t_k, h_kv)
// remainder_bias, norm_weight, norm_bias: (h * d_v,)
#include <torch/library.h>

#include "ops/autocast.h"
#include "ops/registration.h"

TORCH_LIBRARY(megatron_sb, m) {
    // For users, with autograd and autocast.
    m.def(
        "attention(Tensor q, Tensor k, Tensor v, *, float? scale=None, bool attend_current=False, "
        "float mass_threshold=5.9604644775390625e-08, Tensor? forget_gate=None, bool euclidean=False, "
        "Tensor? query_bias=None, Tensor? key_bias=None, float[]? reach=None) -> (Tensor o, Tensor mass)");
    m.def(
        "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? cu_seqlens_k=None, *, "
        "SymInt? max_seqlen_k=None, float? scale=None, bool attend_current=False, "
        "float mass_threshold=5.9604644775390625e-08, Tensor? forget_gate=None, bool euclidean=False, "
        "Tensor? query_bias=None, Tensor? key_bias=None, float[]? reach=None) -> (Tensor o, Tensor mass)");
    // Caches: (b, s_cache, h_kv, d), or (blocks, block_size, h_kv, d) with block_table (b, max_blocks). No autograd.
    // With k and v, the new keys and values, it first appends them (kvcache_append). With forget_gate, Euclidean logits
    // or key_bias, k_cache and k hold the results of keys_for_blocks.
    m.def(
        "attention_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, "
        "Tensor? block_table=None, Tensor? cache_leftpad=None, *, Tensor? k=None, Tensor? v=None, float? scale=None, "
        "bool attend_current=False, float mass_threshold=5.9604644775390625e-08, bool forget_gate=False, "
        "bool euclidean=False, Tensor? query_bias=None, bool key_bias=False, float[]? reach=None) "
        "-> (Tensor o, Tensor mass)");
    m.def(
        "head_output(Tensor o, Tensor? mass, Tensor? remainder_bias=None, Tensor? norm_weight=None, "
        "Tensor? norm_bias=None, *, float eps=1e-05) -> Tensor");

    m.def(
        "kvcache_forward(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table, "
        "Tensor? cache_leftpad, *, float scale, bool attend_current=False, "
        "float mass_threshold=5.9604644775390625e-08, bool forget_gate=False, float reach=1.0, "
        "float reach_step=0.0, bool bias_columns=False) -> (Tensor o, Tensor mass)");

    // Writes k and v (b, s_new, h_kv, d) to positions cache_seqlens, cache_seqlens + 1, ... of the caches.
    m.def(
        "kvcache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
        "Tensor? block_table=None, Tensor? cache_leftpad=None, *, bool forget_gate=False) -> ()");

    // Without autograd; o (b, s, h, d). The gradient of an absent argument has no elements.
    m.def(
        "head_output_forward(Tensor o, Tensor? mass, Tensor? remainder_bias, Tensor? norm_weight, Tensor? norm_bias, "
        "float eps) -> Tensor");
    m.def(
        "head_output_backward(Tensor d_out, Tensor o, Tensor? mass, Tensor? remainder_bias, Tensor? norm_weight, "
        "Tensor? norm_bias, float eps) "
        "-> (Tensor d_o, Tensor d_mass, Tensor d_remainder_bias, Tensor d_norm_weight, Tensor d_norm_bias)");

    // q and k with the extra columns of the variants (ops/variants.h), as attention passes them to block_forward, and
    // as caches store keys. If only one of the two has a bias, the other needs a bias of zeros here.
    m.def("queries_for_blocks(Tensor q, *, bool euclidean, Tensor? query_bias=None, float? scale=None) -> Tensor");
    m.def(
        "keys_for_blocks(Tensor k, *, Tensor? forget_gate=None, bool euclidean=False, Tensor? key_bias=None, "
        "float? scale=None) -> Tensor");

    // What these two compute, without autograd: (b, s, h, d) -> (b, s, h, d'). side: 0 without bias columns, 1 those of
    // queries, 2 those of keys. A bias or norms need bias columns. The backward computes the gradient of x with norms.
    m.def(
        "extend_forward(Tensor x, Tensor? bias, Tensor? gate, int side, bool norms=False, float scale=1.0) -> Tensor");
    m.def("extend_backward(Tensor d_extended, Tensor extended, int side, SymInt head_dim) -> Tensor");

    // The segment table (documents, 5) of a packed batch: {q_begin, q_len, k_begin, k_len, q_pos_minus_k_pos}.
    m.def("segments(Tensor cu_seqlens, Tensor cu_seqlens_k, SymInt q_rows, SymInt k_rows) -> Tensor");

    // The block contract (core/params.h), without autograd. With forget_gate, k and dk have columns for the gates.
    // bias_columns: q and k have bias columns.
    // out_like_q: out_dtype is q's dtype. The operators of users pass this and no dtype, because AOTInductor of
    // torch 2.11 and earlier passes another dtype than a graph has (pytorch/pytorch#169157).
    m.def(
        "block_forward(Tensor q, Tensor k, Tensor v, Tensor? segments=None, Tensor? mass_in=None, *, float scale, "
        "bool attend_current=False, float mass_threshold=5.9604644775390625e-08, ScalarType? out_dtype=None, "
        "bool forget_gate=False, float reach=1.0, float reach_step=0.0, bool bias_columns=False, "
        "bool out_like_q=False) "
        "-> (Tensor o, Tensor mass_out, Tensor restart_edge, Tensor restart_mass)");
    m.def(
        "block_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor? segments, Tensor restart_edge, "
        "Tensor restart_mass, Tensor? mass_in=None, Tensor? prefix_in=None, *, float scale, bool attend_current=False, "
        "float mass_threshold=5.9604644775390625e-08, ScalarType? out_dtype=None, bool forget_gate=False, "
        "SymInt? max_seqlen_k=None, float reach=1.0, float reach_step=0.0, bool bias_columns=False, "
        "bool out_like_q=False) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor prefix_out)");

    // The kernels of this build as text, the instruction set of its CPU kernels on this machine, and the version of
    // torch that this library was built with.
    m.def("describe_kernels() -> str", megatron_sb::ops::describe_kernels);
    m.def("instruction_set() -> str", megatron_sb::ops::instruction_set);
    m.def("torch_version() -> str", megatron_sb::ops::torch_version);

    // The waits of GPU kernels that ended their launch in this process (kernels/common/expired_wait.h), or "".
    m.def("expired_waits() -> str", megatron_sb::ops::expired_waits);
}

namespace {

template <auto function>
torch::CppFunction boxed() {
    return torch::CppFunction::makeFromBoxedFunction<&megatron_sb::ops::boxed_kernel<function>>();
}

template <auto function>
auto without_autograd(const megatron_sb::ops::Arguments& arguments) {
    const at::NoGradGuard no_grad;
    return function(arguments);
}

// A kernel of an operator without autograd. A program of torch.export that was decomposed calls these operators itself,
// and its tensors may require gradients.
template <auto function>
torch::CppFunction device_kernel() {
    return boxed<without_autograd<function>>();
}

void register_device_kernels(torch::Library& m) {
    using namespace megatron_sb::ops;
    m.impl("kvcache_forward", device_kernel<kvcache_forward>());
    m.impl("kvcache_append", device_kernel<kvcache_append>());
    m.impl("head_output_forward", device_kernel<head_output_forward>());
    m.impl("head_output_backward", device_kernel<head_output_backward>());
    m.impl("extend_forward", device_kernel<extend_forward_op>());
    m.impl("extend_backward", device_kernel<extend_backward_op>());
    m.impl("segments", device_kernel<segments>());
    m.impl("block_forward", device_kernel<block_forward_op>());
    m.impl("block_backward", device_kernel<block_backward_op>());
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_sb, CompositeImplicitAutograd, m) {
    using namespace megatron_sb::ops;
    m.impl("attention", boxed<attention>());
    m.impl("attention_varlen", boxed<attention_varlen>());
    m.impl("attention_kvcache", boxed<attention_kvcache>());
    m.impl("head_output", boxed<head_output>());
    m.impl("queries_for_blocks", boxed<queries_for_blocks>());
    m.impl("keys_for_blocks", boxed<keys_for_blocks>());
}

TORCH_LIBRARY_IMPL(megatron_sb, CPU, m) {
    register_device_kernels(m);
}

TORCH_LIBRARY_IMPL(megatron_sb, CUDA, m) {
    register_device_kernels(m);
}

TORCH_LIBRARY_IMPL(megatron_sb, Meta, m) {
    using namespace megatron_sb::ops;
    m.impl("kvcache_forward", boxed<kvcache_forward_fake>());
    m.impl("kvcache_append", boxed<kvcache_append_fake>());
    m.impl("head_output_forward", boxed<head_output_forward_fake>());
    m.impl("head_output_backward", boxed<head_output_backward_fake>());
    m.impl("extend_forward", boxed<extend_forward_fake>());
    m.impl("extend_backward", boxed<extend_backward_fake>());
    m.impl("segments", boxed<segments_fake>());
    m.impl("block_forward", boxed<block_forward_fake>());
    m.impl("block_backward", boxed<block_backward_fake>());
}

TORCH_LIBRARY_IMPL(megatron_sb, AutocastCPU, m) {
    for (const char* op : {"attention", "attention_varlen", "attention_kvcache"})
        m.impl(op, torch::CppFunction::makeFromBoxedFunction<&megatron_sb::ops::autocast_cpu>());
}

TORCH_LIBRARY_IMPL(megatron_sb, AutocastCUDA, m) {
    for (const char* op : {"attention", "attention_varlen", "attention_kvcache"})
        m.impl(op, torch::CppFunction::makeFromBoxedFunction<&megatron_sb::ops::autocast_cuda>());
}
