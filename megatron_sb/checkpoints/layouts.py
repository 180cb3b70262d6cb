"""How other people's checkpoints fuse the weights that `StickBreakingForCausalLM` has one by one."""

from __future__ import annotations

import torch
from torch import Tensor


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, num_kv_heads: int) -> Tensor:
    """Projections (heads * d, hidden) as one: for every KV head its query heads, its keys, its values, d rows each.

    Megatron-Core and Dolomite both have this for any number of KV heads.
    """
    parts = [x.unflatten(0, (num_kv_heads, -1)) for x in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


def split_qkv(fused: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `fuse_qkv`. Raises ValueError where the rows are not of that many heads."""
    head_dim, rest = divmod(len(fused), num_heads + 2 * num_kv_heads)
    if rest:
        raise ValueError(
            f"rows = {len(fused)} of a fused projection; a multiple of num_heads + 2 * num_kv_heads = "
            f"{num_heads + 2 * num_kv_heads} is allowed"
        )
    rows = [num_heads // num_kv_heads * head_dim, head_dim, head_dim]
    q, k, v = (part.flatten(0, 1) for part in fused.unflatten(0, (num_kv_heads, -1)).split(rows, 1))
    return q, k, v


def fuse_glu(name: str, weights: dict[str, Tensor], halves: tuple[str, str]) -> Tensor:
    """The two wide projections of the gated MLP `name` as one; halves: "gate" and "up" in the order of their rows."""
    return torch.cat([weights[f"{name}.{half}_proj.weight"] for half in halves])


def split_glu(name: str, fused: Tensor, halves: tuple[str, str]) -> dict[str, Tensor]:
    """The inverse of `fuse_glu`."""
    return {f"{name}.{half}_proj.weight": rows for half, rows in zip(halves, fused.chunk(2), strict=True)}


def split_experts(name: str, wide: Tensor, back: Tensor, halves: tuple[str, str]) -> dict[str, Tensor]:
    """The projections of every expert in the stacks of a mixture, each named `name`.experts.N."""
    made = {f"{name}.experts.{expert}.down_proj.weight": columns for expert, columns in enumerate(back)}
    for expert, rows in enumerate(wide):
        made |= split_glu(f"{name}.experts.{expert}", rows, halves)
    return made


def tiled_heads(num_heads: int, num_kv_heads: int) -> Tensor:
    """The order in which query heads that read KV heads in turns (head n reads n % num_kv_heads) stand group by group.

    x[order] has the heads of the first KV head first; `order.argsort()` is the way back.
    """
    return torch.arange(num_heads).view(-1, num_kv_heads).t().flatten()


def reorder_heads(x: Tensor, order: Tensor, dim: int = 0) -> Tensor:
    """x with its heads, of as many places each along dim, in another order."""
    return x.unflatten(dim, (len(order), -1)).index_select(dim, order).flatten(dim, dim + 1)
