"""Drop-ins for the two published packages, so that their users switch by changing one import.

`sb_attn` and `sb_attn_varlen` are what the `stickbreaking_attention` package offers, `parallel_stickbreaking_attn` is
flash-linear-attention's. Beyond what those do: CPU and every dtype of ours, any head_dim up to 256 (padded here to a
multiple of 8), and for the first two grouped key/value heads and fewer queries than keys. Differences worth knowing:

- In the first two, once a stick is used up to 2**-24 older keys may be skipped, which changes an output by at most
  2**-24 * max|v|.
- Rows beyond the last document get output 0 and remainder 1, where the package leaves the output uninitialised.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_sb.ops import stickbreaking_attention, stickbreaking_attention_varlen
from megatron_sb.options import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from megatron_sb.validation import check_number, check_tensor


def sb_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inv_temp: float | None = None,
    zero_start: bool = True,
    attend_current: bool = False,
) -> tuple[Tensor, Tensor]:
    """Dense stick-breaking attention as `stickbreaking_attention.sb_attn` computes it.

    Args:
        q: (b, h, s, d).
        k: (b, h_kv, s_k, d).
        v: (b, h_kv, s_k, d_v).
        inv_temp: the scale of the logits; None means 1/sqrt(d).
        zero_start: without a meaning here, as in the package.
        attend_current: whether the key at a query's own position takes part.

    Returns:
        out: (b, h, s, d_v) in q's dtype, contiguous if q is.
        rem: (b, h, s) in q's dtype, the stick that is left.

    Raises:
        TypeError: for an argument of another type.
        ValueError: for a tensor that is not 4-dimensional or a head_dim above 256, and as stickbreaking_attention does.

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
    return _in_layout_of(q, out[..., : v.shape[-1]].transpose(1, 2)), mass.to(q.dtype)


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
    """Stick-breaking attention over packed documents as `stickbreaking_attention.sb_attn_varlen` computes it.

    Args:
        q: (h, t, d).
        k: (h_kv, t, d).
        v: (h_kv, t, d_v).
        cu_seqlens: int32 or int64, (n+1,) with a leading 0 if zero_start, otherwise (n,): where each document ends.
        max_seqlens: the length of the longest document.
        inv_temp: the scale of the logits; None means 1/sqrt(d).
        zero_start: whether cu_seqlens begins with the 0 at which the first document starts.
        attend_current: whether the key at a query's own position takes part.

    Returns:
        out: (h, t, d_v) in q's dtype, contiguous if q is.
        rem: (h, t) in q's dtype, the stick that is left.

    Raises:
        TypeError: for an argument of another type.
        ValueError: for a tensor that is not 3-dimensional or a head_dim above 256, and as
            stickbreaking_attention_varlen does.

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
    out, mass = stickbreaking_attention_varlen(
        *(_padded(x.transpose(0, 1)) for x in (q, k, v)),
        _as_int32(cu_seqlens if zero_start else pad(cu_seqlens, (1, 0))),
        max_seqlens,
        scale=_scale("inv_temp", q, inv_temp),
        attend_current=attend_current,
        return_mass=True,
    )
    return _in_layout_of(q, out[..., : v.shape[-1]].transpose(0, 1)), mass.to(q.dtype)


def parallel_stickbreaking_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    attend_current: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Stick-breaking attention as flash-linear-attention's operator of this name computes it.

    Args:
        q: (b, t, h, d).
        k: (b, t, h_kv, d).
        v: (b, t, h_kv, d_v).
        scale: of the logits; None means 1/sqrt(d).
        attend_current: whether the key at a query's own position takes part.
        cu_seqlens: int32 or int64 (n+1,), starts at 0, for documents packed into one sequence; b is 1 then.

    Returns:
        o: (b, t, h, d_v) in q's dtype.
        rem: (b, t, h) in q's dtype, the stick that is left.

    Raises:
        TypeError: for an argument of another type.
        ValueError: for what the operator there refuses, in words that it uses: shapes that do not belong together
            (fewer queries than keys among them), h not a multiple of h_kv, a head_dim above 256, cu_seqlens with
            b != 1; and as the functions of megatron_sb do.

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
        "mass_threshold": 0.0,  # the operator there skips nothing, and its tests look at what is left of a stick
        "return_mass": True,
    }
    padded = [_padded(x) for x in (q, k, v)]
    if cu_seqlens is None:
        out, mass = stickbreaking_attention(*padded, **options)
    else:
        packed = stickbreaking_attention_varlen(*(x[0] for x in padded), _as_int32(cu_seqlens), **options)
        out, mass = (x[None] for x in packed)
    return out[..., : v.shape[-1]], mass.transpose(1, 2).to(q.dtype).contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, shape: str) -> None:
    """Check what moved axes and a padded head_dim would hide."""
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
    """Check what flash-linear-attention's operator checks."""
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
            f"The batch size of q is expected to be 1 with cu_seqlens, got {q.shape[0]}. Pack into one row."
        )


def _scale(name: str, q: Tensor, scale: float | None) -> float:
    """Return the scale. The default depends on the head_dim before padding."""
    if scale is None:
        return q.shape[-1] ** -0.5
    check_number(name, scale)
    return scale


def _padded(x: Tensor) -> Tensor:
    """Pad with zeros to a supported head_dim. Zeros do not change logits; the output's extra columns are cut."""
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    return pad(x, (0, missing)) if missing else x


def _as_int32(cu_seqlens: Tensor) -> Tensor:
    """Convert int64 offsets, which both packages accept. The operator checks any other dtype."""
    return cu_seqlens.to(torch.int32) if cu_seqlens.dtype == torch.int64 else cu_seqlens


def _in_layout_of(q: Tensor, out: Tensor) -> Tensor:
    """Return out with q's memory order, because callers use view() on it."""
    return out.contiguous() if q.is_contiguous() else out
