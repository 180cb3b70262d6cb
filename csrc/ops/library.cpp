// The operators on one screen. Shapes: q (b, s, h, d), k (b, s_k, h_kv, d), v (b, s_k, h_kv, d_v), o (b, s, h, d_v),
// mass and all other values per row (b, h, s); packed: q (t, h, d), o (t, h, d_v), mass (h, t). remainder_bias,
// norm_weight, norm_bias (h * d_v,), forget_gate (b, s_k, h_kv), packed (t_k, h_kv).
// context_parallel_attention is registered with its plan in csrc/distributed.
#include <torch/library.h>

#include "ops/kvcache.h"
#include "ops/registration.h"

TORCH_LIBRARY(megatron_sb, m) {
    // What users call. Autograd and autocast included.
    m.def(
        "attention(Tensor q, Tensor k, Tensor v, *, float? scale=None, bool attend_current=False, "
        "float mass_threshold=5.9604644775390625e-08, Tensor? forget_gate=None, bool euclidean=False) "
        "-> (Tensor o, Tensor mass)");
    m.def(
        "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? cu_seqlens_k=None, *, "
        "float? scale=None, bool attend_current=False, float mass_threshold=5.9604644775390625e-08, "
        "Tensor? forget_gate=None, bool euclidean=False) -> (Tensor o, Tensor mass)");
    // To a cache (b, s_cache, h_kv, d), or (blocks, block_size, h_kv, d) with a block table (b, max_blocks); no
    // autograd.
    m.def(
        "attention_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table=None, "
        "Tensor? cache_leftpad=None, *, float? scale=None, bool attend_current=False, "
        "float mass_threshold=5.9604644775390625e-08) -> (Tensor o, Tensor mass)");
    m.def(
        "head_output(Tensor o, Tensor? mass, Tensor? remainder_bias=None, Tensor? norm_weight=None, "
        "Tensor? norm_bias=None, *, float eps=1e-05) -> Tensor");

    m.def(
        "kvcache_forward(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table, "
        "Tensor? cache_leftpad, *, float scale, bool attend_current=False, "
        "float mass_threshold=5.9604644775390625e-08) -> (Tensor o, Tensor mass)");

    // The same without autograd, o (b, s, h, d); gradients of what is absent have no elements.
    m.def(
        "head_output_forward(Tensor o, Tensor? mass, Tensor? remainder_bias, Tensor? norm_weight, Tensor? norm_bias, "
        "float eps) -> Tensor");
    m.def(
        "head_output_backward(Tensor d_out, Tensor o, Tensor? mass, Tensor? remainder_bias, Tensor? norm_weight, "
        "Tensor? norm_bias, float eps) "
        "-> (Tensor d_o, Tensor d_mass, Tensor d_remainder_bias, Tensor d_norm_weight, Tensor d_norm_bias)");

    // q and k with which plain logits, and gates behind the keys, are those of a variant: what attention makes of them.
    m.def("with_variants(Tensor q, Tensor k, Tensor? forget_gate, bool euclidean) -> (Tensor q, Tensor k)");

    // The segment table (documents, 5) of a packed batch: {q_begin, q_len, k_begin, k_len, q_pos_minus_k_pos}.
    m.def("segments(Tensor cu_seqlens, Tensor cu_seqlens_k, SymInt q_rows, SymInt k_rows) -> Tensor");

    // The block contract (core/params.h), without autograd; with forget_gate k and dk have columns for the gates.
    m.def(
        "block_forward(Tensor q, Tensor k, Tensor v, Tensor? segments=None, Tensor? mass_in=None, *, float scale, "
        "bool attend_current=False, float mass_threshold=5.9604644775390625e-08, ScalarType? out_dtype=None, "
        "bool forget_gate=False) -> (Tensor o, Tensor mass_out, Tensor restart_edge, Tensor restart_mass)");
    m.def(
        "block_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor? segments, Tensor restart_edge, "
        "Tensor restart_mass, Tensor? mass_in=None, Tensor? prefix_in=None, *, float scale, bool attend_current=False, "
        "float mass_threshold=5.9604644775390625e-08, ScalarType? out_dtype=None, bool forget_gate=False) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor prefix_out)");

    // What this build serves, in words, and the instruction set of its CPU kernels on this machine.
    m.def("describe_kernels() -> str", megatron_sb::ops::describe_kernels);
    m.def("instruction_set() -> str", megatron_sb::ops::instruction_set);
}

TORCH_LIBRARY_IMPL(megatron_sb, CompositeImplicitAutograd, m) {
    m.impl("attention", megatron_sb::ops::attention);
    m.impl("attention_varlen", megatron_sb::ops::attention_varlen);
    m.impl("attention_kvcache", megatron_sb::ops::attention_kvcache);
    m.impl("head_output", megatron_sb::ops::head_output);
    m.impl("with_variants", megatron_sb::ops::with_variants);
}

#define SB_REGISTER_DEVICE(KEY)                                                 \
    TORCH_LIBRARY_IMPL(megatron_sb, KEY, m) {                                   \
        m.impl("kvcache_forward", megatron_sb::ops::kvcache_forward);           \
        m.impl("head_output_forward", megatron_sb::ops::head_output_forward);   \
        m.impl("head_output_backward", megatron_sb::ops::head_output_backward); \
        m.impl("segments", megatron_sb::ops::segments);                         \
        m.impl("block_forward", megatron_sb::ops::block_forward_op);            \
        m.impl("block_backward", megatron_sb::ops::block_backward_op);          \
    }
SB_REGISTER_DEVICE(CPU)
SB_REGISTER_DEVICE(CUDA)

TORCH_LIBRARY_IMPL(megatron_sb, Meta, m) {
    m.impl("kvcache_forward", megatron_sb::ops::kvcache_forward_meta);
    m.impl("head_output_forward", megatron_sb::ops::head_output_forward_meta);
    m.impl("head_output_backward", megatron_sb::ops::head_output_backward_meta);
    m.impl("segments", megatron_sb::ops::segments_meta);
    m.impl("block_forward", megatron_sb::ops::block_forward_meta);
    m.impl("block_backward", megatron_sb::ops::block_backward_meta);
}

TORCH_LIBRARY_IMPL(megatron_sb, AutocastCPU, m) {
    m.impl("attention", megatron_sb::ops::attention_autocast<c10::DeviceType::CPU>);
    m.impl("attention_varlen", megatron_sb::ops::attention_varlen_autocast<c10::DeviceType::CPU>);
    m.impl("attention_kvcache", megatron_sb::ops::attention_kvcache_autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(megatron_sb, AutocastCUDA, m) {
    m.impl("attention", megatron_sb::ops::attention_autocast<c10::DeviceType::CUDA>);
    m.impl("attention_varlen", megatron_sb::ops::attention_varlen_autocast<c10::DeviceType::CUDA>);
    m.impl("attention_kvcache", megatron_sb::ops::attention_kvcache_autocast<c10::DeviceType::CUDA>);
}
