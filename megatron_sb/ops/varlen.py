"""Stick-breaking attention over packed documents on one device."""

from numbers import Integral

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch._subclasses.fake_tensor import is_fake

from megatron_sb.ops import attention
from megatron_sb.options import DEFAULT_MASS_THRESHOLD, AttentionOptions
from megatron_sb.validation import check_flag, check_optional_tensors, check_tensor

_MAX_INT32 = 2**31 - 1  # no document has more rows


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
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    reach: tuple[float, float] | None = None,
) -> attention.Result:
    """Compute causal stick-breaking attention within each document of a packed sequence.

    Args:
        q: (t, h, d), as in `stickbreaking_attention`.
        k: (t_k, h_kv, d), in q's dtype.
        v: (t_k, h_kv, d_v), in q's dtype.
        cu_seqlens: int32, (documents + 1,). Document n has the rows cu_seqlens[n] to cu_seqlens[n + 1] - 1 of q. The
            first entry is 0. Documents may be empty. On a GPU the host does not read the values. The kernels then clamp
            offsets to t, and replace an offset that is smaller than an earlier one by the largest earlier offset.
        max_seqlen: length of the longest document in tokens. Without this length, the portable GPU kernels plan the
            backward as if one document had all rows, which takes many launches. If cu_seqlens is a CPU tensor, it is
            checked against max_seqlen. On a GPU, the backward of a longer document may end with a device-side
            assertion. Default: None.
        cu_seqlens_k: cu_seqlens of the keys, if the keys have other document lengths than the queries. In each
            document, the queries are the last positions of its keys. Default: cu_seqlens.
        max_seqlen_k: max_seqlen of the keys. Default: max_seqlen without cu_seqlens_k, else None.
        scale: see `stickbreaking_attention`, also for attend_current, mass_threshold, return_mass and logits.
        attend_current: see scale.
        mass_threshold: see scale.
        return_mass: see scale.
        logits: see scale.
        forget_gate: f, (t_k, h_kv), as in `stickbreaking_attention`.
        query_bias: (t, h), as in `stickbreaking_attention`.
        key_bias: (t_k, h_kv), as in `stickbreaking_attention`.
        reach: see scale.

    Returns:
        o, (t, h, d_v), in q's dtype. With return_mass, (o, mass), where mass (h, t) is fp32 (fp64 for fp64). Rows after
        the last document have o = 0, mass = 1 and zero gradients.

    Raises:
        TypeError: If an argument has a wrong type or dtype.
        ValueError: If an argument has a wrong shape, device or value. Nothing is computed in either case.

    Example:
        >>> import torch
        >>> import megatron_sb as sb
        >>> q, k, v = (torch.randn(100, 4, 64) for _ in range(3))
        >>> cu_seqlens = torch.tensor([0, 70, 100], dtype=torch.int32)  # documents of 70 and 30 tokens
        >>> sb.stickbreaking_attention_varlen(q, k, v, cu_seqlens).shape
        torch.Size([100, 4, 64])
    """
    options = AttentionOptions(scale, attend_current, mass_threshold, logits, reach)
    check_flag("return_mass", return_mass)
    for name, value in (("q", q), ("k", k), ("v", v), ("cu_seqlens", cu_seqlens)):
        check_tensor(name, value)
    variants = {"forget_gate": forget_gate, "query_bias": query_bias, "key_bias": key_bias}
    check_optional_tensors({"cu_seqlens_k": cu_seqlens_k, **variants})
    if attention.over_ranks is not None:
        raise ValueError(
            "stickbreaking_attention_varlen must not be called in shared_sequence, whose plan has the documents. Call "
            "stickbreaking_attention with a batch of one row."
        )
    check_max_seqlen("max_seqlen", max_seqlen, cu_seqlens)
    check_max_seqlen("max_seqlen_k", max_seqlen_k, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    o, mass = torch.ops.megatron_sb.attention_varlen(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens_k,
        max_seqlen_k=_host_integer(max_seqlen if cu_seqlens_k is None and max_seqlen_k is None else max_seqlen_k),
        scale=options.scale,
        attend_current=options.attend_current,
        mass_threshold=options.mass_threshold,
        **variants,
        euclidean=options.logits == "euclidean",
        reach=options.reach,
    )
    return (o, mass) if return_mass else o


def _host_integer(max_seqlen: object) -> int | None:
    """Return max_seqlen, or None for a tensor: the host must not wait for a value on a GPU."""
    if isinstance(max_seqlen, Tensor):
        return None
    return min(max_seqlen, _MAX_INT32) if isinstance(max_seqlen, int) else max_seqlen  # operators take 64 bits


def _has_values(x: Tensor) -> bool:
    """Return whether the host can read the values of x. torch.vmap does not let it read those of a batch."""
    return not (is_fake(x) or is_batchedtensor(x))


def check_max_seqlen(name: str, max_seqlen: object, cu_seqlens: Tensor) -> None:
    """Raise unless max_seqlen is a length. If cu_seqlens is a CPU tensor with values, no document may be longer."""
    if max_seqlen is None:
        return
    # Some callers pass a tensor. If it is on a GPU, the host must not read it.
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (Integral, torch.SymInt, Tensor)):
        raise TypeError(f"{name} must be an int, got {type(max_seqlen).__name__}.")
    if isinstance(max_seqlen, Tensor) and max_seqlen.numel() != 1:
        raise ValueError(f"{name} must be an int, or a tensor with one element, got shape {tuple(max_seqlen.shape)}.")
    if not isinstance(max_seqlen, Tensor) and max_seqlen < 0:
        raise ValueError(f"{name} must be at least 0, got {max_seqlen}.")
    known = not torch.compiler.is_compiling() and cu_seqlens.device.type == "cpu" and _has_values(cu_seqlens)
    if not known or cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32:
        return  # the operator says what is wrong
    longest = int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0
    if max_seqlen < longest:
        raise ValueError(
            f"{name} must be at least the length of the longest document, {longest}, got {int(max_seqlen)}."
        )
