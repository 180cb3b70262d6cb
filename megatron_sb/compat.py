"""Functions with the interfaces of two published packages. Their users can switch by changing one import.

| function | package with the same interface |
| --- | --- |
| `sb_attn`, `sb_attn_varlen` | `stickbreaking_attention` |
| `parallel_stickbreaking_attn` | flash-linear-attention |

These functions accept more inputs than the packages: tensors on a CPU, every dtype of `stickbreaking_attention`, and
any head_dim up to 256, which is padded to a multiple of 8. `sb_attn` and `sb_attn_varlen` also accept grouped KV heads,
and `sb_attn` accepts fewer queries than keys.

`sb_attn` and `sb_attn_varlen` differ from the package in two results:

- Older keys may be skipped once the mass of a row is below 2^-24. This changes the output by at most 2^-24 * max|v|.
- Rows after the last document have output 0 and remainder 1. The package does not initialise their output.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_sb.ops import stickbreaking_attention, stickbreaking_attention_varlen
from megatron_sb.ops.varlen import check_max_seqlen
from megatron_sb.options import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from megatron_sb.validation import check_finite, check_tensor


def sb_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inv_temp: float | None = None,
    zero_start: bool = True,
    attend_current: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute stick-breaking attention with the interface of `stickbreaking_attention.sb_attn`.

    Args:
        q: (b, h, s, d).
        k: (b, h_kv, s_k, d).
        v: (b, h_kv, s_k, d_v).
        inv_temp: factor of the logits. Default None: 1 / sqrt(d).
        zero_start: ignored, as in the package.
        attend_current: whether a query also attends to the key at its own position. Default False.

    Returns:
        out: (b, h, s, d_v) in q's dtype, under autocast in that of autocast. Contiguous if q is contiguous.
        rem: (b, h, s) in the dtype of out, the mass.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if a tensor is not 4-dimensional, if a head_dim is above 256, or if stickbreaking_attention raises
            it.

    Example:
        >>> import torch
        >>> from megatron_sb.compat import sb_attn
        >>> q, k, v = (torch.randn(1, 4, 32, 50) for _ in range(3))
        >>> out, rem = sb_attn(q, k, v)
        >>> out.shape, rem.shape
        (torch.Size([1, 4, 32, 50]), torch.Size([1, 4, 32]))
    """
    del zero_start
    _check(q, k, v, "(b, h, s, d)")
    out, mass = stickbreaking_attention(
        *(_padded(x.transpose(1, 2)) for x in (q, k, v)),
        scale=_scale("inv_temp", q, inv_temp),
        attend_current=attend_current,
        return_mass=True,
    )
    return _in_layout_of(q, out[..., : v.shape[-1]].transpose(1, 2)), mass.to(out.dtype)


def sb_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlens: int,
    inv_temp: float | None = None,
    zero_start: bool = True,
    attend_current: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention over packed documents with the interface of `stickbreaking_attention.sb_attn_varlen`.

    Args:
        q: (h, t, d).
        k: (h_kv, t, d).
        v: (h_kv, t, d_v).
        cu_seqlens: int32 or int64, (n,), the end of each document. With zero_start (n+1,), the same after a leading 0.
        max_seqlens: length of the longest document in tokens.
        inv_temp: factor of the logits. Default None: 1 / sqrt(d).
        zero_start: whether cu_seqlens has a leading 0. Default True.
        attend_current: whether a query also attends to the key at its own position. Default False.

    Returns:
        out: (h, t, d_v) in q's dtype, under autocast in that of autocast. Contiguous if q is contiguous.
        rem: (h, t) in the dtype of out, the mass.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if a tensor is not 3-dimensional, if a head_dim is above 256, or if stickbreaking_attention_varlen
            raises it.

    Example:
        >>> import torch
        >>> from megatron_sb.compat import sb_attn_varlen
        >>> q, k, v = (torch.randn(4, 32, 50) for _ in range(3))
        >>> out, rem = sb_attn_varlen(q, k, v, torch.tensor([0, 20, 32]), 20)
        >>> out.shape, rem.shape
        (torch.Size([4, 32, 50]), torch.Size([4, 32]))
    """
    _check(q, k, v, "(h, t, d)")
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must have 1 dimension, got shape {tuple(cu_seqlens.shape)}.")
    offsets = _as_int32(cu_seqlens if zero_start else pad(cu_seqlens, (1, 0)))
    check_max_seqlen("max_seqlens", max_seqlens, offsets)
    out, mass = stickbreaking_attention_varlen(
        *(_padded(x.transpose(0, 1)) for x in (q, k, v)),
        offsets,
        max_seqlens,
        scale=_scale("inv_temp", q, inv_temp),
        attend_current=attend_current,
        return_mass=True,
    )
    return _in_layout_of(q, out[..., : v.shape[-1]].transpose(0, 1)), mass.to(out.dtype)


def parallel_stickbreaking_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    attend_current: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute stick-breaking attention with the interface of flash-linear-attention's operator of this name.

    Args:
        q: (b, t, h, d).
        k: (b, t, h_kv, d).
        v: (b, t, h_kv, d_v).
        scale: factor of the logits. Default None: 1 / sqrt(d).
        attend_current: whether a query also attends to the key at its own position. Default False.
        cu_seqlens: int32 or int64, (n+1,), offsets of documents that are packed into one sequence. They start at 0, and
            b must be 1. Default None: no packing.

    Returns:
        o: (b, t, h, d_v) in q's dtype, under autocast in that of autocast. Contiguous.
        rem: (b, t, h) in the dtype of o, the mass.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if shapes do not match, h is not a multiple of h_kv, or a head_dim is above 256. Or if b is not 1
            with cu_seqlens, or the functions of megatron_sb raise it. As in flash-linear-attention, fewer queries than
            keys are an error.

    Example:
        >>> import torch
        >>> from megatron_sb.compat import parallel_stickbreaking_attn
        >>> q, k, v = (torch.randn(1, 32, 4, 64) for _ in range(3))
        >>> o, rem = parallel_stickbreaking_attn(q, k, v)
        >>> o.shape, rem.shape
        (torch.Size([1, 32, 4, 64]), torch.Size([1, 32, 4]))
    """
    _check_parallel(q, k, v, packed=cu_seqlens is not None)
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens)
    options = {
        "scale": _scale("scale", q, scale),
        "attend_current": attend_current,
        "mass_threshold": 0.0,  # flash-linear-attention skips nothing, and its tests compare small masses
        "return_mass": True,
    }
    padded = [_padded(x) for x in (q, k, v)]
    if cu_seqlens is None:
        out, mass = stickbreaking_attention(*padded, **options)
    else:
        packed = stickbreaking_attention_varlen(*(x[0] for x in padded), _as_int32(cu_seqlens), **options)
        out, mass = (x[None] for x in packed)
    return out[..., : v.shape[-1]].contiguous(), mass.transpose(1, 2).to(out.dtype).contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, shape: str) -> None:
    """Check shapes here, because the operator sees transposed axes and a padded head_dim."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != shape.count(",") + 1:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}.")
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} must have a head_dim of at least 1 and at most {MAX_HEAD_DIM}, got {x.shape[-1]}."
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have equal head_dim, got q {q.shape[-1]} and k {k.shape[-1]}.")


def _check_parallel(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Check what flash-linear-attention's operator checks, with messages that its tests accept."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes) or not (
        shapes[0][:2] == shapes[1][:2] and shapes[1][:3] == shapes[2][:3] and shapes[0][3] == shapes[1][3]
    ):
        raise ValueError(
            f"Expected q, k and v of shapes (b, t, h, d), (b, t, h_kv, d) and (b, t, h_kv, d_v), got {shapes}."
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"The heads of q must be divisible by {kv_heads}, the heads of k and v, got {heads}.")
    for name, what, x in (("q", "key", q), ("v", "value", v)):
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} must have a {what} dimension of at least 1 and at most {MAX_HEAD_DIM}, got {x.shape[-1]}."
            )
    if packed and q.shape[0] != 1:
        raise ValueError(
            f"The batch size is expected to be 1 with cu_seqlens, got {q.shape[0]} rows of q. Pack them into one."
        )


def _scale(name: str, q: Tensor, scale: float | None) -> float:
    """Return the scale. The default depends on the head_dim before padding."""
    if scale is None:
        return q.shape[-1] ** -0.5
    check_finite(name, scale)
    return scale


def _padded(x: Tensor) -> Tensor:
    """Pad with zeros to a supported head_dim. Zeros do not change logits; the output's extra columns are cut."""
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    return pad(x, (0, missing)) if missing else x


def _as_int32(cu_seqlens: Tensor) -> Tensor:
    """Convert int64 offsets, which both packages accept. The operator checks any other dtype.

    It also refuses offsets beyond the rows. So larger ones than int32 has become its limits: a cast would wrap around.
    """
    limits = torch.iinfo(torch.int32)
    return cu_seqlens.clamp(limits.min, limits.max).to(torch.int32) if cu_seqlens.dtype == torch.int64 else cu_seqlens


def _in_layout_of(q: Tensor, out: Tensor) -> Tensor:
    """Return out with q's memory order, because callers use view() on it."""
    return out.contiguous() if q.is_contiguous() else out
