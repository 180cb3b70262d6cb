"""The operators of `operators` in pure torch, for programs that do not have the compiled library.

`save_pretrained` writes this module into the folder of a model, in place of `operators`. The functions compute every
weight in fp32 (fp64 for fp64) and never skip keys, so they are slow. They process blocks of queries, and the backward
computes each block again. Memory for weights therefore grows with the number of keys, not with its square.

    z_ij = scale * q_j . k_i,  or  -scale * |q_j - k_i|^2 with Euclidean logits
    beta_ij = f_i sigmoid(z_ij),  A_ij = beta_ij prod_{i<k<j} (1 - beta_kj),  mass_j = prod_k (1 - beta_kj)

The products are sums of logarithms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import layer_norm, logsigmoid, pad

from megatron_sb.options import DEFAULT_MASS_THRESHOLD, AttentionOptions, reach_and_step

_MAX_WEIGHTS = 2**22  # of a block of queries: 16 MiB in fp32. A block has about ten tensors of this size.
_MOST_SIZES = 8  # of blocks of one call
_GATE_COLUMNS = 3  # that a cache stores after a key: their sum is the gate, to 24 bits also in bf16


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
    reach: tuple[float, float] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what `megatron_sb.stickbreaking_attention` computes.

    Args:
        q: (b, s, h, d), of any floating-point dtype. The queries are the last s of the s_k positions.
        k: (b, s_k, h_kv, d), s_k >= s, h a multiple of h_kv.
        v: (b, s_k, h_kv, d_v).
        scale: factor of the logits. Default None: 1 / sqrt(d), and 1 for Euclidean logits.
        attend_current: whether a query also attends to the key at its own position. Default False.
        mass_threshold: not used, because no key is skipped.
        return_mass: whether to return the mass as well. Default False.
        logits: "dot" or "euclidean". Default "dot".
        forget_gate: f, (b, s_k, h_kv), clamped to [0, 1]. Default None: no gates.
        reach: a of the first and the last head: beta is 2^-a where z would be 0. Default None: no offset of the logits.

    Returns:
        o, (b, s, h, d_v), in q's dtype. With return_mass, (o, mass), where mass (b, h, s) is fp32 (fp64 for fp64).

    Raises:
        TypeError: if an option has a wrong type.
        ValueError: if an option has a wrong value, there are more queries than keys, or h is not a multiple of h_kv.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface import plain_operators
        >>> q, k, v = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
        >>> plain_operators.stickbreaking_attention(q, k, v).shape
        torch.Size([2, 8, 4, 16])
    """
    options = AttentionOptions(scale, attend_current, mass_threshold, logits, reach)
    o, mass = _attention(q, k, v, forget_gate, options)
    return (o, mass) if return_mass else o


def stickbreaking_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = DEFAULT_MASS_THRESHOLD,
    return_mass: bool = False,
    logits: str = "dot",
    forget_gate: Tensor | None = None,
    reach: tuple[float, float] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what `megatron_sb.stickbreaking_attention_varlen` computes, one document after the other.

    Args:
        q: (t, h, d).
        k: (t_k, h_kv, d).
        v: (t_k, h_kv, d_v).
        cu_seqlens: int (documents + 1,), offsets of the documents in q.
        cu_seqlens_k: offsets in k and v. The queries of a document are the last positions of its keys. Default None:
            cu_seqlens.
        scale: see `stickbreaking_attention`, also for attend_current, mass_threshold, return_mass and logits.
        attend_current: see scale.
        mass_threshold: see scale.
        return_mass: see scale.
        logits: see scale.
        forget_gate: f, (t_k, h_kv). Default None: no gates.
        reach: see scale.

    Returns:
        o, (t, h, d_v), in q's dtype. With return_mass, (o, mass), where mass (h, t) is fp32 (fp64 for fp64). Rows after
        the last document have o = 0 and mass = 1.

    Raises:
        TypeError: if an option has a wrong type.
        ValueError: as `stickbreaking_attention`, for any document.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface import plain_operators
        >>> q, k, v = (torch.randn(10, 4, 16) for _ in range(3))
        >>> plain_operators.stickbreaking_attention_varlen(q, k, v, torch.tensor([0, 7, 10])).shape
        torch.Size([10, 4, 16])
    """
    options = AttentionOptions(scale, attend_current, mass_threshold, logits, reach)
    q_edges = cu_seqlens.tolist()
    k_edges = q_edges if cu_seqlens_k is None else cu_seqlens_k.tolist()
    outputs, masses = [], []
    for (begin, end), (begin_k, end_k) in zip(pairwise(q_edges), pairwise(k_edges), strict=True):
        gate = None if forget_gate is None else forget_gate[None, begin_k:end_k]
        o, mass = _attention(q[None, begin:end], k[None, begin_k:end_k], v[None, begin_k:end_k], gate, options)
        outputs.append(o[0])
        masses.append(mass[0])
    num_after = len(q) - q_edges[-1]
    outputs.append(q.new_zeros(num_after, q.shape[1], v.shape[-1]))
    masses.append(q.new_ones(q.shape[1], num_after, dtype=_wide(q.dtype)))
    o = torch.cat(outputs)
    return (o, torch.cat(masses, dim=1)) if return_mass else o


def shared_plan() -> None:
    """Return None: ranks share a sequence only with megatron_sb."""


def is_decoding_step(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether there are fewer queries than keys. `attend_to_filled` accepts any number of queries.

    Args:
        q: (b, s, h, d).
        k: (b, s_k, h_kv, d).
        v: (b, s_k, h_kv, d_v).

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.plain_operators import is_decoding_step
        >>> is_decoding_step(torch.empty(1, 1, 4, 16), torch.empty(1, 9, 4, 16), torch.empty(1, 9, 4, 16))
        True
    """
    return q.shape[1] < k.shape[1]


def attend_to_filled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_keys: int | Tensor | None = None,
    leftpad: Tensor | None = None,
    *,
    forget_gate: bool = False,
    return_mass: bool = False,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = DEFAULT_MASS_THRESHOLD,
    logits: str = "dot",
    reach: tuple[float, float] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention to the filled slots of a cache.

    Args:
        q: (b, s, h, d), the last s of the filled positions.
        k: (b, slots, h_kv, d'), as `stored_keys` returns them.
        v: (b, slots, h_kv, d_v).
        num_keys: number of filled slots, or int (b,) with this number in each row. Default None: all.
        leftpad: int (b,), the slot where each sequence begins. Default None: 0.
        forget_gate: whether the keys have forget gates. Default False.
        return_mass: see `stickbreaking_attention`, also for scale, attend_current, mass_threshold and logits.
        scale: see return_mass.
        attend_current: see return_mass.
        mass_threshold: see return_mass.
        logits: see return_mass.
        reach: see `stickbreaking_attention`.

    Returns:
        As `stickbreaking_attention`. Queries before the first key of their sequence have o = 0 and mass = 1.

    Raises:
        TypeError: as `stickbreaking_attention`.
        ValueError: as `stickbreaking_attention`.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.plain_operators import attend_to_filled
        >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 32, 2, 16), torch.randn(2, 32, 2, 16)
        >>> attend_to_filled(q, k, v, num_keys=9, leftpad=torch.tensor([0, 5])).shape
        torch.Size([2, 1, 4, 16])
    """
    options = AttentionOptions(scale, attend_current, mass_threshold, logits, reach)
    if isinstance(num_keys, Tensor):
        num_keys = int(num_keys[0]) if len(num_keys) else q.shape[1]  # of a batch without rows
    k, gate = keys_and_gates(k[:, :num_keys], q.shape[-1], logits=logits, forget_gate=forget_gate)
    o, mass = _attention(q, k, v[:, :num_keys], gate, options, leftpad)
    return (o, mass) if return_mass else o


def stored_head_dim(head_dim: int, *, logits: str = "dot", forget_gate: bool = False) -> int:
    """Return the width of a key in a cache: head_dim, plus 3 with forget gates.

    Args:
        head_dim: channels of a key, d.
        logits: not used.
        forget_gate: whether keys have forget gates. Default False.

    Example:
        >>> from megatron_sb.huggingface.plain_operators import stored_head_dim
        >>> stored_head_dim(64, forget_gate=True)
        67
    """
    return head_dim + _GATE_COLUMNS * forget_gate


def stored_keys(k: Tensor, *, logits: str = "dot", forget_gate: Tensor | None = None) -> Tensor:
    """Return keys as a cache stores them: followed by their forget gates.

    Args:
        k: (b, s, h_kv, d).
        logits: not used.
        forget_gate: f, (b, s, h_kv), in fp32 (fp64 for fp64). Default None: no gates.

    Returns:
        (b, s, h_kv, d'), with d' from `stored_head_dim`. Without gates, k itself.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.plain_operators import stored_keys
        >>> stored_keys(torch.randn(2, 10, 4, 64), forget_gate=torch.rand(2, 10, 4)).shape
        torch.Size([2, 10, 4, 67])
    """
    if forget_gate is None:
        return k
    columns, rest = [], forget_gate.to(_wide(k.dtype))
    for _ in range(_GATE_COLUMNS):
        columns.append(rest.to(k.dtype))
        rest = rest - columns[-1].to(rest.dtype)
    return torch.cat([k, torch.stack(columns, -1)], -1)


def keys_and_gates(
    stored: Tensor, head_dim: int, *, logits: str = "dot", forget_gate: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Invert `stored_keys`.

    Args:
        stored: (b, s, h_kv, d').
        head_dim: channels of a key, d.
        logits: not used.
        forget_gate: whether the keys have forget gates. Default False.

    Returns:
        The keys (b, s, h_kv, d), and their gates (b, s, h_kv) in fp32 (fp64 for fp64), or None.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.plain_operators import keys_and_gates, stored_keys
        >>> k, f = torch.randn(2, 10, 4, 64).bfloat16(), torch.rand(2, 10, 4)
        >>> torch.equal(keys_and_gates(stored_keys(k, forget_gate=f), 64, forget_gate=True)[1], f)
        True
    """
    if not forget_gate:
        return stored, None
    first, second, third = stored[..., head_dim:].to(_wide(stored.dtype)).unbind(-1)
    return stored[..., :head_dim], first + (second + third)


def head_output(
    o: Tensor,
    mass: Tensor | None,
    remainder_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """Compute what `megatron_sb.head_output` computes: add the remainder, normalise each head, or both.

    Args:
        o: (b, s, h, d).
        mass: (b, h, s). Required with remainder_bias.
        remainder_bias: (h * d,). Default None: no remainder.
        norm_weight: (h * d,). Default None: no norm.
        norm_bias: (h * d,). Default None: 0.
        eps: number that is added to the variance. Default 1e-5.

    Returns:
        A tensor with o's shape and dtype.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.plain_operators import head_output
        >>> head_output(torch.randn(1, 16, 4, 32), torch.rand(1, 4, 16), torch.ones(128), torch.ones(128)).shape
        torch.Size([1, 16, 4, 32])
    """
    with torch.autocast(o.device.type, enabled=False):
        x, heads = o.to(_wide(o.dtype)), o.shape[-2:]
        bias, weight, norm_bias = (
            vector if vector is None else vector.to(x.dtype).view(heads)
            for vector in (remainder_bias, norm_weight, norm_bias)
        )
        if bias is not None:
            x = x + mass.transpose(-1, -2)[..., None] * bias
        if weight is not None:
            x = layer_norm(x, heads[1:], eps=eps) * weight
        if norm_bias is not None:
            x = x + norm_bias
        return x.to(o.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32, and fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, options: AttentionOptions, leftpad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output (b, s, h, d_v) and the mass (b, h, s). The arguments are those of the public functions."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    if num_queries > num_keys:
        raise ValueError(f"q must have at most as many positions as k, {num_keys}, got {num_queries}.")
    if num_heads % num_kv_heads:
        raise ValueError(f"The heads of q must be a multiple of {num_kv_heads}, the heads of k, got {num_heads}.")
    if num_queries == 0:
        o = q.new_zeros(batch, 0, num_heads, v.shape[-1])
        return o, q.new_ones(batch, num_heads, 0, dtype=_wide(q.dtype))
    scale = options.scale
    if scale is None:
        scale = 1.0 if options.logits == "euclidean" else head_dim**-0.5
    # q: (b, h_kv, query heads of a KV head, s, d); k, v: (b, h_kv, s_k, d); gate: (b, h_kv, s_k)
    q = q.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    gate = None if gate is None else gate.transpose(1, 2)
    o, mass = _InBlocks.apply(q, k, v, gate, leftpad, scale, options)
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3), mass.flatten(1, 2)


@dataclass(frozen=True)
class _Block:
    """Queries [begin, end) and keys [0, seen). The first query has position `first` among the keys."""

    begin: int
    end: int
    seen: int
    first: int

    def of(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None) -> list[Tensor | None]:
        """Return the block of each tensor, in the dtype of sums."""
        parts = [q[..., self.begin : self.end, :], k[..., : self.seen, :], v[..., : self.seen, :]]
        parts.append(None if gate is None else gate[..., : self.seen])
        return [part if part is None else part.to(_wide(q.dtype)) for part in parts]


def _blocks(q: Tensor, k: Tensor) -> Iterator[_Block]:
    """Yield blocks of all queries, with at most _MAX_WEIGHTS weights if a single query has no more.

    The numbers of keys have few values. If each block had more keys than the one before, memory of older blocks would
    be too small for it, and the allocator would not use it again.
    """
    (num_queries, num_keys), num_heads = (q.shape[3], k.shape[2]), q.shape[:3].numel()
    num_rows = max(1, _MAX_WEIGHTS // max(1, num_heads * num_keys))
    step = -(-num_keys // _MOST_SIZES)
    for begin in range(0, num_queries, num_rows):
        end, first = min(begin + num_rows, num_queries), num_keys - num_queries + begin
        yield _Block(begin, end, min(num_keys, -(-(first + end - begin) // step) * step), first)


class _InBlocks(torch.autograd.Function):
    """Compute `_rows` of blocks of queries, and each block again in the backward. Arguments as for `_rows`."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        leftpad: Tensor | None,
        scale: float,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, gate, leftpad)
        ctx.scale, ctx.options = scale, options
        o = q.new_empty(*q.shape[:-1], v.shape[-1])
        mass = q.new_empty(q.shape[:-1], dtype=_wide(q.dtype))
        for block in _blocks(q, k):
            rows = slice(block.begin, block.end)
            o[..., rows, :], mass[..., rows] = _rows(*block.of(q, k, v, gate), leftpad, block.first, scale, options)
        return o, mass

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor, dmass: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, gate, leftpad = ctx.saved_tensors
        wide = _wide(q.dtype)
        gradients = [x if x is None else torch.zeros_like(x, dtype=wide) for x in (q, k, v, gate)]
        for block in _blocks(q, k):
            rows = slice(block.begin, block.end)
            parts = [x if x is None else x.detach().requires_grad_() for x in block.of(q, k, v, gate)]
            with torch.enable_grad():
                results = _rows(*parts, leftpad, block.first, ctx.scale, ctx.options)
            leaves = [part for part in parts if part is not None]
            more = torch.autograd.grad(results, leaves, (do[..., rows, :].to(wide), dmass[..., rows]))
            for total, gradient in zip(block.of(*gradients), more, strict=False):  # views; a missing gate is the last
                total += gradient
        dq, dk, dv, dgate = (
            gradient if x is None else gradient.to(x.dtype)
            for x, gradient in zip((q, k, v, gate), gradients, strict=True)
        )
        return dq, dk, dv, dgate, None, None, None


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    leftpad: Tensor | None,
    first: int,
    scale: float,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Return output and mass of a block of queries, in the dtype of the arguments: fp32 or fp64.

    Args:
        q: (b, h_kv, g, n, d), with g query heads for each KV head.
        k: (b, h_kv, s_k, d).
        v: (b, h_kv, s_k, d_v).
        gate: (b, h_kv, s_k), or None.
        leftpad: int (b,), or None.
        first: position of the first query among the keys.
        scale: factor of the logits.
        options: attend_current, logits and reach are read.

    Returns:
        o (b, h_kv, g, n, d_v) and the mass (b, h_kv, g, n).
    """
    with torch.autocast(q.device.type, enabled=False):
        z = scale * (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])
        if options.logits == "euclidean":
            norms = q.square().sum(-1, keepdim=True) + k.square().sum(-1)[:, :, None, None]
            z = 2 * z - scale * norms
        if options.reach is not None:
            heads = q.shape[1:3].numel()
            of_first, step = reach_and_step(options.reach, heads)
            exponents = of_first + step * torch.arange(heads, dtype=z.dtype, device=z.device)
            z = z - (exponents.exp2() - 1).log().view(*q.shape[1:3], 1, 1)
        hidden = _hidden(*z.shape[-2:], first, options.attend_current, leftpad, z.device)
        if gate is None:
            log_rest = logsigmoid(-z)  # log(1 - beta)
        else:
            gate = gate.clamp(0, 1)[:, :, None, None]
            log_rest = _LogRest.apply(z, gate)
        # Sums from the newest key to each key. They are shifted by one key, because a difference could be -inf - -inf.
        sums = log_rest.masked_fill(hidden, 0).flip(-1).cumsum(-1)
        log_newer = pad(sums[..., :-1], (1, 0)).flip(-1)
        weights = (logsigmoid(z) + log_newer).masked_fill(hidden, -torch.inf).exp()
        if gate is not None:
            weights = weights * gate
        o = (weights.flatten(2, 3) @ v).unflatten(2, q.shape[2:4])
        return o, sums[..., -1].exp()


def _hidden(
    num_queries: int, num_keys: int, first: int, attend_current: bool, leftpad: Tensor | None, device: torch.device
) -> Tensor:
    """Return bool (n, s_k), or (b, 1, 1, n, s_k) with leftpad: whether a query does not see a key."""
    key = torch.arange(num_keys, device=device)
    query = torch.arange(first, first + num_queries, device=device)[:, None]
    hidden = key > query if attend_current else key >= query
    return hidden if leftpad is None else hidden | (key < leftpad[:, None, None, None, None])


class _LogRest(torch.autograd.Function):
    """Compute log(1 - f sigmoid(z)). The gradients are finite for every f in [0, 1] and finite z.

    Autograd would divide by 1 - f sigmoid(z), which is 0 for an open gate and a large logit.
    """

    @staticmethod
    def forward(ctx, z: Tensor, f: Tensor) -> Tensor:
        ctx.save_for_backward(z, f)
        sigma = z.sigmoid()
        beta = f * sigma
        rest = (-z).sigmoid() + (1 - f) * sigma  # 1 - beta without cancellation
        return torch.where(beta < 0.5, (-beta).log1p(), rest.log())

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        z, f = ctx.saved_tensors
        largest = torch.finfo(z.dtype).max
        e = z.clamp(max=0.9 * torch.tensor(largest, dtype=torch.float64).log().item()).exp()
        ratio = 1 / (1 + (1 - f) * e)  # (1 - sigmoid(z)) / (1 - f sigmoid(z))
        dz, df = -gradient * f * z.sigmoid() * ratio, -gradient * e * ratio
        return dz, df.sum_to_size(f.shape)
