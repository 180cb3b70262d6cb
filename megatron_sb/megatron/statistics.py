"""Observe the stick-breaking layers of a model: their mass, the tiles that they skip, and their inputs.

Example:
    >>> from types import SimpleNamespace
    >>> import torch
    >>> from megatron.core.packed_seq_params import PackedSeqParams
    >>> from megatron.core.transformer import TransformerConfig
    >>> from megatron.core.transformer.enums import AttnMaskType
    >>> from megatron_sb.megatron import StickBreakingCoreAttention
    >>> from megatron_sb.megatron.statistics import captured, observed, skipped_share
    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    >>> one_rank = SimpleNamespace(tp=None, cp=None)
    >>> layer = StickBreakingCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=one_rank)
    >>> q, k, v = (torch.randn(200, 4, 8) for _ in range(3))
    >>> offsets = torch.tensor([0, 100, 200], dtype=torch.int32)  # two documents of two tiles
    >>> packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    >>> with observed(layer, torch.device("cpu")) as counts, captured(layer) as inputs:
    ...     output = layer(q, k, v, None, packed_seq_params=packed)
    >>> counts.rows, counts.tiles  # of the layer: 200 rows x 4 heads, 2 x 3 tiles x 4 heads
    (tensor([800.], dtype=torch.float64), tensor([24.], dtype=torch.float64))
    >>> inputs[0].query.shape
    torch.Size([200, 4, 8])
    >>> skipped_share(layer, q, k, v, packed).shape
    torch.Size([4])
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sb.megatron.core_attention import StickBreakingCoreAttention
from megatron_sb.megatron.packed import document_bounds, is_packed
from megatron_sb.options import reach_and_step

TILE = 64  # rows and keys of the tiles that kernels skip (csrc/core/params.h)


@dataclass(frozen=True)
class AttentionCounts:
    """Sums over rows and heads, by stick-breaking layer: float64 (layers,). Counts of several ranks can be added.

    Under context parallelism skipped and tiles are 0, because no rank has the restart records of all keys.

    Attributes:
        remainder: sum of the mass over the counted rows.
        rows: number of counted rows.
        skipped: number of 64 x 64 tiles on or below the diagonal that the backward skips.
        tiles: number of all 64 x 64 tiles on or below the diagonal.
    """

    remainder: Tensor
    rows: Tensor
    skipped: Tensor
    tiles: Tensor

    @staticmethod
    def zeros(num_layers: int, device: torch.device) -> AttentionCounts:
        """Return counts of no rows."""
        return AttentionCounts(*torch.zeros(4, num_layers, dtype=torch.float64, device=device))

    def stack(self) -> Tensor:
        """Return the four sums, (4, layers)."""
        return torch.stack((self.remainder, self.rows, self.skipped, self.tiles))


def stick_breaking_layers(model: torch.nn.Module) -> list[StickBreakingCoreAttention]:
    """Return the core attentions of the stick-breaking layers of a model, or the model if it is one."""
    return [module for module in model.modules() if isinstance(module, StickBreakingCoreAttention)]


@contextlib.contextmanager
def watched(model: torch.nn.Module, look: Callable[..., None]) -> Iterator[None]:
    """Call `look` before each forward of a stick-breaking layer in the block.

    Args:
        model: a module that contains stick-breaking layers, or is one.
        look: look(core, query, key, value, packed_seq_params), where core is the layer's core attention.
    """

    def before(core: StickBreakingCoreAttention, args: tuple, kwargs: dict) -> None:
        look(core, *args[:3], kwargs.get("packed_seq_params"))

    hooks = [core.register_forward_pre_hook(before, with_kwargs=True) for core in stick_breaking_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def observed(model: torch.nn.Module, device: torch.device) -> Iterator[AttentionCounts]:
    """Count the rows and tiles of every forward in the block. See the example of this module.

    The attention of each layer runs a second time for this, without gradients. All ranks of a context-parallel group
    must observe together.

    Args:
        model: a module that contains stick-breaking layers, or is one.
        device: device of the counts.

    Yields:
        The counts so far, which grow with each forward. Their layers are in the order of `stick_breaking_layers`.
    """
    layers = stick_breaking_layers(model)
    sums = torch.zeros(4, len(layers), dtype=torch.float64, device=device)

    def add(core: StickBreakingCoreAttention, *call) -> None:
        sums[:, layers.index(core)] += count(core, *call)

    with watched(model, add):
        yield AttentionCounts(*sums)  # its fields are rows of the sums, so they grow with them


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of a layer's attention, on the CPU.

    Attributes:
        query: packed (t, h, d).
        key: packed (t, g, d).
        scale: see `megatron_sb.stickbreaking_attention`.
        attend_current: see `megatron_sb.stickbreaking_attention`.
    """

    query: Tensor
    key: Tensor
    scale: float
    attend_current: bool


@contextlib.contextmanager
def captured(model: torch.nn.Module) -> Iterator[list[AttentionInputs]]:
    """Collect the inputs of every stick-breaking layer in the block. See the example of this module.

    Args:
        model: a module that contains stick-breaking layers, or is one. Its sequences must be packed.

    Yields:
        A list of AttentionInputs, which grows with each forward of a layer.

    Raises:
        ValueError: If the model has no stick-breaking layer.
    """
    found: list[AttentionInputs] = []

    def keep(core: StickBreakingCoreAttention, query: Tensor, key: Tensor, *_) -> None:
        query, key = (x.detach().cpu() for x in (query, key))
        found.append(AttentionInputs(query, key, core.scale, core.options.attend_current))

    if not stick_breaking_layers(model):
        raise ValueError("model must have a stick-breaking layer, got none.")
    with watched(model, keep):
        yield found


@torch.no_grad()
def count(core: StickBreakingCoreAttention, query: Tensor, key: Tensor, value: Tensor, packed_seq_params) -> Tensor:
    """Count the rows and tiles of one call of a core attention. The arguments are those of its forward.

    Returns:
        The four sums of `AttentionCounts`, float64 (4,).
    """
    zero = torch.zeros((), dtype=torch.float64, device=query.device)
    if core.cp_group_of(packed_seq_params) is not None:
        _, mass = core.attend(query, key, value, packed_seq_params, return_mass=True)
        return torch.stack((mass.sum(dtype=torch.float64), zero + mass.numel(), zero, zero))
    mass, edge, bounds, older_keys = _mass_and_edges(core, query, key, value, packed_seq_params)
    skipped, tiles = skipped_tiles(edge, bounds, core.options.attend_current, older_keys)
    return torch.stack((mass.sum(dtype=torch.float64), zero + mass.numel(), skipped, tiles))


@torch.no_grad()
def skipped_share(
    core: StickBreakingCoreAttention, query: Tensor, key: Tensor, value: Tensor, packed_seq_params
) -> Tensor:
    """Return the share of tiles that each head skips in one call of a core attention, (h,) float64.

    The arguments are those of its forward. Context parallelism is not supported. See the example of this module.
    """
    _, edge, bounds, older_keys = _mass_and_edges(core, query, key, value, packed_seq_params)
    skipped, tiles = _skipped_by_head(edge, bounds, core.options.attend_current, older_keys)
    return skipped.mean(0) / tiles


def _mass_and_edges(
    core, query: Tensor, key: Tensor, value: Tensor, packed_seq_params
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the mass and the edges of the restart records, (b, h, rows) each, and the offsets of the documents.

    The fourth result is the number of keys before that of the first query, as when decoding with a static cache.
    """
    older_keys = 0
    key, variant = core.variant_of(key)
    if is_packed(packed_seq_params):
        bounds, _ = document_bounds(packed_seq_params)
        batch = [x[None] for x in (query, key, value)]
        gate = None if variant["forget_gate"] is None else variant["forget_gate"][None]
        segments = torch.ops.megatron_sb.segments(bounds, bounds, query.shape[0], key.shape[0])
    else:
        bounds, segments = torch.tensor([0, query.shape[0]], device=query.device), None
        older_keys = key.shape[0] - query.shape[0]
        batch = [x.transpose(0, 1) for x in (query, key, value)]
        gate = None if variant["forget_gate"] is None else variant["forget_gate"].transpose(0, 1)
    euclidean = variant["logits"] == "euclidean"
    batch[0] = torch.ops.megatron_sb.queries_for_blocks(batch[0], euclidean=euclidean)
    batch[1] = torch.ops.megatron_sb.keys_for_blocks(batch[1], forget_gate=gate, euclidean=euclidean)
    options = {**core.attention_options, "forget_gate": gate is not None, "bias_columns": euclidean}
    if (reach := options.pop("reach")) is not None:
        options |= dict(zip(("reach", "reach_step"), reach_and_step(reach, batch[0].shape[2]), strict=True))
    _, mass, edge, _ = torch.ops.megatron_sb.block_forward(*batch, segments, **options)
    return mass, edge, bounds.long(), older_keys


def skipped_tiles(edge: Tensor, bounds: Tensor, attend_current: bool, older_keys: int = 0) -> tuple[Tensor, Tensor]:
    """Count the tiles that the backward skips, and all tiles.

    Args:
        edge: (b, h, rows), edges of the restart records.
        bounds: (documents + 1,), offsets of the documents. Rows after the last document are ignored.
        attend_current: see `megatron_sb.stickbreaking_attention`.
        older_keys: keys before that of the first row, such as those of a cache. Default 0.

    Returns:
        Two float64 scalars.

    Example:
        >>> import torch
        >>> from megatron_sb.megatron.statistics import skipped_tiles
        >>> edge = torch.full((1, 1, 256), 64)  # the backward of every row starts with the oldest tile
        >>> skipped_tiles(edge, torch.tensor([0, 256]), attend_current=False)
        (tensor(0., dtype=torch.float64), tensor(10., dtype=torch.float64))
    """
    skipped, tiles = _skipped_by_head(edge, bounds, attend_current, older_keys)
    return skipped.sum(), tiles * edge.shape[:-1].numel()


def _skipped_by_head(edge: Tensor, bounds: Tensor, attend_current: bool, older_keys: int = 0) -> tuple[Tensor, Tensor]:
    """Return the skipped tiles of each head, (b, h) float64, and the number of tiles of a head."""
    rows = edge.shape[-1]
    row = torch.arange(rows, device=edge.device)
    document = torch.bucketize(row, bounds[1:], right=True)
    inside = document < bounds.numel() - 1
    document = document.clamp(max=bounds.numel() - 2)
    position = row - bounds[document]
    first_tile = torch.nn.functional.pad(-(-bounds.diff() // TILE), (1, 0)).cumsum(0)
    tile = torch.where(
        inside, first_tile[document] + position // TILE, rows
    )  # rows outside all documents go to an extra tile
    by_tile = edge.new_full((*edge.shape[:-1], rows + 1), older_keys + rows)
    by_tile.scatter_reduce_(-1, tile.expand_as(edge), edge, "amin")
    visible = position.new_zeros(rows + 1)
    visible.scatter_reduce_(0, tile, position + older_keys + int(attend_current), "amax")
    tiles = -(-visible[:rows] // TILE)
    older = (-(-by_tile[..., :rows] // TILE) - 1).clamp(min=0)  # tiles older than the one in which the backward starts
    skipped = torch.minimum(older, tiles)
    return skipped.sum(-1, dtype=torch.float64), tiles.sum(dtype=torch.float64)
