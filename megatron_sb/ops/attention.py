"""Stick-breaking attention on one device, dense and packed, and what may follow it head by head.

z_ij = scale * q_j . k_i,  beta = sigmoid(z),  A_ij = beta_ij * prod_{i<k<j} (1 - beta_kj)     (paper eq. 1)
o_j = sum_i A_ij v_i,      mass_j = prod_k (1 - beta_kj) = 1 - sum_i A_ij, the stick that is left

Variants of the logit: z_ij = -scale * |q_j - k_i|^2 (logits="euclidean"), beta_ij = f_i * sigmoid(z_ij) (forget_gate).
"""

import math
from collections.abc import Callable
from numbers import Integral, Real

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

DEFAULT_MASS_THRESHOLD = 2.0**-24
LOGITS = ("dot", "euclidean")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}; a torch.Tensor is allowed")


def _check_number(
    name: str, value: object, allowed: str = "a number", fits: Callable[[float], bool] | None = None
) -> None:
    """fits, which number is allowed, is only for what torch.compile does not trace: it would settle a symbol's value.

    A tensor is no number: the operators would take its value and give it no gradient.
    """
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} is {type(value).__name__}; {allowed} is allowed")
    if fits is not None and not fits(value):
        raise ValueError(f"{name} is {value}; {allowed} is allowed")


def _check_finite(name: str, value: object) -> None:
    _check_number(name, value, "a finite number", math.isfinite)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {type(value).__name__}; True or False is allowed")


def _check_options(scale: object, attend_current: object, mass_threshold: object) -> None:
    """Types alone: values are the operators' to check."""
    if scale is not None:
        _check_number("scale", scale)
    _check_flag("attend_current", attend_current)
    _check_number("mass_threshold", mass_threshold)


def _check_mass_threshold(value: object) -> None:
    _check_number("mass_threshold", value, "0 (no skipping) up to, not including, 1", lambda x: 0 <= x < 1)


def _variant(logits: object, forget_gate: object) -> dict[str, object]:
    """The operators' arguments for the variant of the logit."""
    _check_logits(logits)
    if forget_gate is not None:
        _check_tensor("forget_gate", forget_gate)
    return {"forget_gate": forget_gate, "euclidean": logits == "euclidean"}


def _check_logits(logits: object) -> None:
    if logits not in LOGITS:
        raise ValueError(f"logits is {logits!r}; {' and '.join(map(repr, LOGITS))} are allowed")


def _check_counts(sizes: dict[str, object]) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; an int of 1 or more is allowed")


def _head_dim_of(hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size is {hidden_size}; without head_dim a multiple of num_heads, {num_heads}, is allowed"
        )
    return hidden_size // num_heads if head_dim is None else head_dim


def _check_max_seqlen(name: str, max_seqlen: object, cu_seqlens: Tensor) -> None:
    if max_seqlen is None:
        return
    # Some callers have it as a tensor, and on a GPU nobody reads it.
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (Integral, torch.SymInt, Tensor)):
        raise TypeError(f"{name} is {type(max_seqlen).__name__}; an int is allowed")
    known = not torch.compiler.is_compiling() and cu_seqlens.device.type == "cpu" and not is_fake(cu_seqlens)
    if not known or cu_seqlens.dim() != 1:
        return
    longest = int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0
    if max_seqlen < longest:
        raise ValueError(f"{name} is {max_seqlen}, but the longest document has {longest} positions")


def stickbreaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = DEFAULT_MASS_THRESHOLD,
    return_mass: bool = False,
    logits: str = "dot",
    forget_gate: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend by breaking a stick over the keys, newest first (Tan et al., arXiv 2410.17980, eq. 1).

    Differentiable once; no position embedding is needed. Strides are taken as they are where the last one is 1.

    Args:
        q: (b, s, h, d), in bf16, fp16, fp32, or fp64 on CPU. d: a multiple of 8 up to 256.
        k: (b, s_k, h_kv, d), s_k >= s: the queries are the last s positions. h is a multiple of h_kv; query head i
            reads key head i // (h / h_kv).
        v: (b, s_k, h_kv, d_v).
        scale: factor of the logits, a number: what should learn multiplies q. 1 / sqrt(d) by default, and 1 for
            Euclidean ones.
        attend_current: let position j attend to itself too (keys i <= j instead of i < j).
        mass_threshold: a row whose mass is below this is used up; older keys that only such rows see are skipped.
            Changes o by at most mass_threshold * max |v|. 0 turns skipping off.
        return_mass: return the mass too.
        logits: "dot", z_ij = scale * q_j . k_i, or "euclidean", z_ij = -scale * |q_j - k_i|^2 (NU-CS-2024-15); the
            latter takes 8 more columns of q and k, so that d is 248 at most.
        forget_gate: f (b, s_k, h_kv) in (0, 1], for beta_ij = f_i * sigmoid(z_ij), in q's dtype or in fp32 (fp64 for
            fp64), which keeps 1 - f of a gate that is nearly open; clamped to [0, 1]. Its gradient is rounded to q's
            dtype.

    Returns:
        o (b, s, h, d_v) in q's dtype; with return_mass also mass (b, h, s), fp32 (fp64 for fp64). Once a row is used up
        its mass is somewhere in [0, mass_threshold].

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, value)
    _check_options(scale, attend_current, mass_threshold)
    o, mass = torch.ops.megatron_sb.attention(
        q,
        k,
        v,
        scale=scale,
        attend_current=attend_current,
        mass_threshold=mass_threshold,
        **_variant(logits, forget_gate),
    )
    return (o, mass) if return_mass else o


def stickbreaking_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    *,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = DEFAULT_MASS_THRESHOLD,
    return_mass: bool = False,
    logits: str = "dot",
    forget_gate: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Stick-breaking attention over packed documents, each by itself.

    Args:
        q: (t, h, d).
        k: (t_k, h_kv, d).
        v: (t_k, h_kv, d_v).
        cu_seqlens: int32 (documents + 1,), where each document starts and the last one ends; starts at 0. Documents may
            be empty. On a GPU the values are not read back: offsets beyond t are clamped.
        max_seqlen: not needed; checked against cu_seqlens where that has values on the CPU.
        cu_seqlens_k: the same for the keys where they differ; per document the queries are the last of its keys.
        max_seqlen_k: as max_seqlen, for the keys.
        scale, attend_current, mass_threshold, return_mass, logits: as in `stickbreaking_attention`.
        forget_gate: as there, (t_k, h_kv).

    Returns:
        o (t, h, d_v) in q's dtype; with return_mass also mass (h, t), fp32 (fp64 for fp64). Rows beyond the last
        document: o = 0, mass = 1, gradients 0.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs.
    """
    for name, value in (("q", q), ("k", k), ("v", v), ("cu_seqlens", cu_seqlens)):
        _check_tensor(name, value)
    if cu_seqlens_k is not None:
        _check_tensor("cu_seqlens_k", cu_seqlens_k)
    _check_options(scale, attend_current, mass_threshold)
    _check_max_seqlen("max_seqlen", max_seqlen, cu_seqlens)
    _check_max_seqlen("max_seqlen_k", max_seqlen_k, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    o, mass = torch.ops.megatron_sb.attention_varlen(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens_k,
        scale=scale,
        attend_current=attend_current,
        mass_threshold=mass_threshold,
        **_variant(logits, forget_gate),
    )
    return (o, mass) if return_mass else o


def head_output(
    o: Tensor,
    mass: Tensor | None,
    remainder_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """Add what the stick that is left carries to an attention's output, and normalise each head; both, or one of them.

    x_j = o_j + P_j r, P the mass and r = remainder_bias (paper eq. 14); then, where there is a norm_weight, group norm
    with one group per head: (x_j - mean(x_j)) / sqrt(var(x_j) + eps) * norm_weight + norm_bias, mean and variance over
    the d channels of a position and head. Computed in fp32 (fp64 for fp64) and rounded once. Differentiable once.

    Args:
        o: (b, s, h, d), or packed (t, h, d), as an attention returns it; bf16, fp16, fp32, or fp64 on CPU. d: a
            multiple of 8 up to 256.
        mass: (b, h, s), or packed (h, t), fp32 (fp64 for fp64), as an attention returns it; needed with remainder_bias
            and not read without.
        remainder_bias: r, (h * d,), of any of these dtypes, as the next two.
        norm_weight: (h * d,).
        norm_bias: (h * d,), only with norm_weight; 0 by default.
        eps: added to the variance.

    Returns:
        A tensor of o's shape and dtype. Gradients come in each argument's dtype.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs.
    """
    _check_tensor("o", o)
    _check_number("eps", eps)
    for name, value in (
        ("mass", mass),
        ("remainder_bias", remainder_bias),
        ("norm_weight", norm_weight),
        ("norm_bias", norm_bias),
    ):
        if value is not None:
            _check_tensor(name, value)
    return torch.ops.megatron_sb.head_output(o, mass, remainder_bias, norm_weight, norm_bias, eps=eps)
