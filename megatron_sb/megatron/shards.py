"""Join the weights of a job on CPUs, in which each tensor-parallel rank saves its own shard under its own name."""

from __future__ import annotations

import re

import torch
from torch import Tensor

SHARD = "model_"  # starts the names of several ranks
PREFIXES = ("model.", SHARD)
_ENTRY = re.compile(r"model(?:_tensor(\d+)of\d+_expert\d+of\d+)?\.(.+)")
_GATE_UP = "linear_fc1.weight"
_SPLIT_BY_ROWS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "gate_proj.weight",
    "gate_proj.bias",
)
_SPLIT_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_OF_HEADS = ".core_attention."  # vectors of the heads of a rank


def join_shards(shards: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole weights by Megatron-Core's names. Jobs on CPUs train no experts.

    Args:
        shards: weights by their names in the checkpoint, which start with one of PREFIXES.

    Example:
        >>> import torch
        >>> from megatron_sb.megatron.shards import join_shards
        >>> name = "decoder.layers.0.self_attention.linear_proj.weight"
        >>> shards = {f"model_tensor{rank}of2_expert0of1.{name}": torch.full((1, 2), rank) for rank in (0, 1)}
        >>> join_shards(shards)[name]
        tensor([[0, 0, 1, 1]])
    """
    by_name: dict[str, dict[int, Tensor]] = {}
    for entry, tensor in shards.items():
        rank, name = _ENTRY.fullmatch(entry).groups("0")
        by_name.setdefault(name, {})[int(rank)] = tensor
    return {name: _joined(name, [by_rank[rank] for rank in sorted(by_rank)]) for name, by_rank in by_name.items()}


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if name.endswith(_GATE_UP):  # every shard holds rows of the gate, then rows of the up projection
        return torch.cat([half for halves in zip(*(part.chunk(2) for part in parts), strict=True) for half in halves])
    if name.endswith(_SPLIT_BY_ROWS) or _OF_HEADS in name:
        return torch.cat(parts)
    return torch.cat(parts, 1) if name.endswith(_SPLIT_BY_COLUMNS) else parts[0]
