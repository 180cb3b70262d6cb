"""Stick-breaking attention over packed documents on one device."""

from numbers import Integral

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megatron_sb.options import DEFAULT_MASS_THRESHOLD, check_options, variant_arguments
from megatron_sb.validation import check_tensor


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
        check_tensor(name, value)
    if cu_seqlens_k is not None:
        check_tensor("cu_seqlens_k", cu_seqlens_k)
    check_options(scale, attend_current, mass_threshold)
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
        **variant_arguments(logits, forget_gate),
    )
    return (o, mass) if return_mass else o
