"""Convert between fused weights of other formats and the separate weights of `StickBreakingForCausalLM`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.validation import InputError


def parts_of_qkv(config: StickBreakingConfig) -> tuple[str, ...]:
    """Return the names of the parameters that each of the projections to queries, keys and values has."""
    return ("weight", "bias") if config.qkv_bias else ("weight",)


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, num_kv_heads: int) -> Tensor:
    """Fuse the weights of three projections, (heads * head_dim, hidden) each, or their biases, into one.

    For every KV head the result holds its query heads, its key head and its value head, head_dim rows each.
    Megatron-Core and Dolomite use this layout for any number of KV heads.

    Example:
        >>> import torch
        >>> from megatron_sb.checkpoints.layouts import fuse_qkv
        >>> q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])  # head_dim 1
        >>> fuse_qkv(*(x[:, None] for x in (q, k, v)), num_kv_heads=2).flatten()
        tensor([ 0,  1, 10, 20,  2,  3, 11, 21])
    """
    parts = [x.unflatten(0, (num_kv_heads, -1)) for x in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


def split_qkv(name: str, fused: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Invert `fuse_qkv`. Raise ValueError with the name of `fused` if the rows do not divide into that many heads."""
    num_fused_heads = num_heads + 2 * num_kv_heads
    head_dim, remaining_rows = divmod(len(fused), num_fused_heads)
    if remaining_rows:
        raise InputError(
            f"The rows of a fused QKV projection, {name}, must be a multiple of num_heads + 2 * num_kv_heads = "
            f"{num_fused_heads}, got {len(fused)}."
        )
    rows = [num_heads // num_kv_heads * head_dim, head_dim, head_dim]
    q, k, v = (part.flatten(0, 1) for part in fused.unflatten(0, (num_kv_heads, -1)).split(rows, 1))
    return q, k, v


def fuse_glu(name: str, weights: dict[str, Tensor], halves: tuple[str, str]) -> Tensor:
    """Fuse the gate and up projections of the gated MLP `name`. halves: "gate" and "up" in the order of their rows."""
    return torch.cat([weights[f"{name}.{half}_proj.weight"] for half in halves])


def split_glu(name: str, fused: Tensor, halves: tuple[str, str]) -> dict[str, Tensor]:
    """Invert `fuse_glu`."""
    return {f"{name}.{half}_proj.weight": rows for half, rows in zip(halves, fused.chunk(2), strict=True)}


def split_experts(name: str, gate_up: Tensor, down: Tensor, halves: tuple[str, str]) -> dict[str, Tensor]:
    """Split the stacked projections of a mixture of experts. Each expert gets the prefix `name`.experts.N.

    gate_up: (experts, 2 * intermediate, hidden). down: (experts, hidden, intermediate).
    """
    weights = {f"{name}.experts.{expert}.down_proj.weight": columns for expert, columns in enumerate(down)}
    for expert, rows in enumerate(gate_up):
        weights |= split_glu(f"{name}.experts.{expert}", rows, halves)
    return weights


def tiled_head_order(num_heads: int, num_kv_heads: int) -> Tensor:
    """Return the permutation from tiled to grouped query heads.

    Tiled: query head n reads KV head n % num_kv_heads. Grouped: query head n reads KV head
    n // (num_heads // num_kv_heads). x[order] is grouped if x is tiled; `order.argsort()` is the inverse.

    Example:
        >>> from megatron_sb.checkpoints.layouts import tiled_head_order
        >>> tiled_head_order(num_heads=4, num_kv_heads=2)  # heads 0 and 2 read KV head 0
        tensor([0, 2, 1, 3])
    """
    return torch.arange(num_heads).view(-1, num_kv_heads).t().flatten()


def reorder_heads(x: Tensor, order: Tensor, dim: int = 0) -> Tensor:
    """Permute the heads of x along dim. The size of dim must be a multiple of the number of heads."""
    return x.unflatten(dim, (len(order), -1)).index_select(dim, order).flatten(dim, dim + 1)
