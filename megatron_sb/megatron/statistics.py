"""How a model's stick-breaking attention uses its sticks: what is left of them, how much work that saves, and what it
attends with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sb.megatron.core_attention import StickBreakingCoreAttention, document_bounds, is_packed

TILE = 64  # the grid on which kernels begin to skip (csrc/core/params.h)


@dataclass(frozen=True)
class AttentionCounts:
    """Sums over rows, heads and layers; sums over ranks add up.

    remainder: of the mass that is left, and rows: how many rows gave it. skipped, tiles: 64 x 64 tiles on or below the
    diagonal that the backward leaves out, of all; 0 of 0 under context parallelism, where a rank does not see them.
    """

    remainder: Tensor
    rows: Tensor
    skipped: Tensor
    tiles: Tensor

    @staticmethod
    def zeros(device: torch.device) -> AttentionCounts:
        """No rows."""
        return AttentionCounts(*torch.zeros(4, dtype=torch.float64, device=device))

    def __add__(self, other: AttentionCounts) -> AttentionCounts:
        """Of both."""
        return AttentionCounts(*(self.stack() + other.stack()))

    def stack(self) -> Tensor:
        """The four sums, (4,) float64."""
        return torch.stack((self.remainder, self.rows, self.skipped, self.tiles))


@contextlib.contextmanager
def watched(model: torch.nn.Module, look: Callable[..., None]) -> Iterator[None]:
    """Before every call of a stick-breaking layer inside: look(core, query, key, value, packed_seq_params)."""

    def before(core: StickBreakingCoreAttention, args: tuple, kwargs: dict) -> None:
        look(core, *args[:3], kwargs.get("packed_seq_params"))

    cores = [module for module in model.modules() if isinstance(module, StickBreakingCoreAttention)]
    hooks = [core.register_forward_pre_hook(before, with_kwargs=True) for core in cores]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def observed(model: torch.nn.Module, device: torch.device) -> Iterator[list[AttentionCounts]]:
    """Count in every forward inside; yields a list that ends as one AttentionCounts.

    Each layer's attention runs a second time for it, without gradients; all ranks of a context-parallel group must
    observe together.
    """
    counts = [AttentionCounts.zeros(device)]

    def add(*call) -> None:
        counts[0] += count(*call)

    with watched(model, add):
        yield counts


@dataclass(frozen=True)
class AttentionInputs:
    """What a layer attended with, on the CPU. query: (t, h, d), key: (t, g, d), packed; scale, attend_current: as in
    `functional.stickbreaking_attention`.
    """

    query: Tensor
    key: Tensor
    scale: float
    attend_current: bool


@contextlib.contextmanager
def captured(model: torch.nn.Module) -> Iterator[list[AttentionInputs]]:
    """Keep what every stick-breaking layer attends with in a forward of packed sequences; yields the list that grows.

    Raises ValueError for a model without such layers.
    """
    found: list[AttentionInputs] = []

    def keep(core: StickBreakingCoreAttention, query: Tensor, key: Tensor, *_) -> None:
        query, key = (x.detach().cpu() for x in (query, key))
        found.append(AttentionInputs(query, key, core.scale, core.options.attend_current))

    if not any(isinstance(module, StickBreakingCoreAttention) for module in model.modules()):
        raise ValueError("the model has no stick-breaking layer to look into")
    with watched(model, keep):
        yield found


@torch.no_grad()
def count(
    core: StickBreakingCoreAttention, query: Tensor, key: Tensor, value: Tensor, packed_seq_params
) -> AttentionCounts:
    """What one call of a layer's core attention gives; arguments as in its forward."""
    none = torch.zeros((), dtype=torch.float64, device=query.device)
    if core.cp_group_of(packed_seq_params) is not None:
        _, mass = core.attend(query, key, value, packed_seq_params, return_mass=True)
        return AttentionCounts(mass.sum(dtype=torch.float64), none + mass.numel(), none, none)
    mass, edge, bounds = _sticks(core, query, key, value, packed_seq_params)
    skipped, tiles = skipped_tiles(edge, bounds, core.options.attend_current)
    return AttentionCounts(mass.sum(dtype=torch.float64), none + mass.numel(), skipped, tiles)


@torch.no_grad()
def skipped_share(
    core: StickBreakingCoreAttention, query: Tensor, key: Tensor, value: Tensor, packed_seq_params
) -> Tensor:
    """The share of tiles that each head skips in one call of a layer's core attention, without context parallelism:
    (h,) float64; arguments as in its forward.
    """
    _, edge, bounds = _sticks(core, query, key, value, packed_seq_params)
    skipped, tiles = _skipped_by_head(edge, bounds, core.options.attend_current)
    return skipped.mean(0) / tiles


def _sticks(core, query: Tensor, key: Tensor, value: Tensor, packed_seq_params) -> tuple[Tensor, Tensor, Tensor]:
    """The mass that is left and the restarts' edges, (b, h, rows), and the documents' offsets."""
    key, variant = core.variant_of(key)
    if is_packed(packed_seq_params):
        bounds, _ = document_bounds(packed_seq_params)
        batch = [x[None] for x in (query, key, value)]
        gate = None if variant["forget_gate"] is None else variant["forget_gate"][None]
        segments = torch.ops.megatron_sb.segments(bounds, bounds, query.shape[0], key.shape[0])
    else:
        bounds, segments = torch.tensor([0, query.shape[0]], device=query.device), None
        batch = [x.transpose(0, 1) for x in (query, key, value)]
        gate = None if variant["forget_gate"] is None else variant["forget_gate"].transpose(0, 1)
    batch[:2] = torch.ops.megatron_sb.with_variants(*batch[:2], gate, variant["logits"] == "euclidean")
    options = {**core.attention_options, "forget_gate": gate is not None}
    _, mass, edge, _ = torch.ops.megatron_sb.block_forward(*batch, segments, **options)
    return mass, edge, bounds.long()


def skipped_tiles(edge: Tensor, bounds: Tensor, attend_current: bool) -> tuple[Tensor, Tensor]:
    """How many tiles the backward skips and how many there are, float64 scalars.

    edge: (b, h, rows), the restarts' edges. bounds: (n + 1,), the documents' offsets; rows beyond the last count not.
    """
    skipped, tiles = _skipped_by_head(edge, bounds, attend_current)
    return skipped.sum(), tiles * edge[..., 0].numel()


def _skipped_by_head(edge: Tensor, bounds: Tensor, attend_current: bool) -> tuple[Tensor, Tensor]:
    """(b, h) float64, and how many tiles each head has."""
    rows = edge.shape[-1]
    row = torch.arange(rows, device=edge.device)
    document = torch.bucketize(row, bounds[1:], right=True)
    inside = document < bounds.numel() - 1
    document = document.clamp(max=bounds.numel() - 2)
    position = row - bounds[document]
    first_tile = torch.nn.functional.pad(-(-bounds.diff() // TILE), (1, 0)).cumsum(0)
    tile = torch.where(inside, first_tile[document] + position // TILE, rows)  # rows: where what counts not goes
    by_tile = edge.new_full((*edge.shape[:-1], rows + 1), rows)
    by_tile.scatter_reduce_(-1, tile.expand_as(edge), edge, "amin")
    visible = position.new_zeros(rows + 1)
    visible.scatter_reduce_(0, tile, position + int(attend_current), "amax")
    tiles = -(-visible[:rows] // TILE)
    older = (-(-by_tile[..., :rows] // TILE) - 1).clamp(min=0)  # than the tile in which the backward starts
    skipped = torch.minimum(older, tiles)
    return skipped.sum(-1, dtype=torch.float64), tiles.sum(dtype=torch.float64)
