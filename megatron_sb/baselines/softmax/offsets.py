"""Packed documents: their lengths (from `cu_seqlens`), positions, batches of equal length, and FlexAttention masks."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn.attention.flex_attention import BlockMask

from megatron_sb.ops.snapshot import Snapshot

FLEX_BLOCK = 128


def shared_by_layers(function):
    """Cache a function of sizes: the first layer of a batch calls it, the other layers reuse its result.

    The function runs with inference mode off, because autograd could not save a cached tensor from inference mode in a
    later training call. There is no cache while a graph is traced or tensors are fake: fake tensors must not reach
    other calls, and cannot be combined with real ones.
    """
    uncached = torch.inference_mode(False)(function)
    cached = functools.lru_cache(maxsize=4)(uncached)

    @functools.wraps(function)
    def call(*args, **kwargs):
        is_traced = torch.compiler.is_compiling() or detect_fake_mode() is not None
        return (uncached if is_traced else cached)(*args, **kwargs)

    return call


class LastOffsets:
    """Read document lengths from `cu_seqlens`, and keep the last result for tensors on a GPU.

    The first layer of a batch copies the offsets from the GPU; the other layers do not wait for the device. After a
    write that torch does not count, the device stops with an error (`megatron_sb.ops.snapshot`). Torch counts no writes
    to inference tensors, so they are read at every call.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Snapshot, list[int]] | None = None

    def lengths(self, cu_seqlens: Tensor, num_tokens: int) -> tuple[int, ...]:
        """Return the lengths of the documents that are not empty.

        Raises:
            ValueError: if the offsets decrease, or do not run from 0 to num_tokens.
        """
        last = self._last  # read once: another thread may replace it
        if last is None or last[0] is not cu_seqlens or not last[1].is_current(cu_seqlens):
            snapshot = Snapshot("cu_seqlens", cu_seqlens)
            self._last = last = (cu_seqlens, snapshot, snapshot.values.tolist())
        bounds = last[2]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] != num_tokens or min(lengths) < 0:
            raise ValueError(f"cu_seqlens must be non-decreasing offsets from 0 to {num_tokens}, got {bounds}.")
        return tuple(length for length in lengths if length)


last_offsets = LastOffsets()


def row_positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the position of each row in its document, int64 (s,)."""
    # Computed on `device`: for 10,000 rows or more torch starts threads on the CPU, which would delay a GPU by
    # milliseconds.
    length = torch.tensor(lengths, device=device)
    start = length.cumsum(0) - length
    return torch.arange(sum(lengths), device=device) - start.repeat_interleave(length, output_size=sum(lengths))


@shared_by_layers
def make_cu_seqlens(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the offsets of the documents, int32 (documents + 1,)."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


@shared_by_layers
def batches_by_length(lengths: tuple[int, ...], padded: bool, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Group documents into batches of one length.

    Args:
        lengths: lengths of the documents, which together have s rows.
        padded: pad each document to the next power of two, at most to the longest document, for fewer batches.
        device: device of the results.

    Returns:
        A list and a tensor. The list has the rows of the documents of each batch, int64 (documents, length); row s
        stands for padding. The tensor has the place of each of the s rows in the concatenation of all batches, int64
        (s,).
    """
    starts, longest = [0, *itertools.accumulate(lengths)], max(lengths)
    members: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        size = min(1 << (length - 1).bit_length(), longest) if padded else length
        members.setdefault(size, []).append(index)
    batches, num_before, places = [], 0, torch.empty(starts[-1] + 1, dtype=torch.int64, device=device)
    for size, indices in members.items():
        start, end = (torch.tensor([starts[i + side] for i in indices], device=device) for side in (0, 1))
        rows = start[:, None] + torch.arange(size, device=device)
        rows = rows.where(rows < end[:, None], starts[-1])
        places[rows.flatten()] = torch.arange(num_before, num_before + rows.numel(), device=device)
        num_before += rows.numel()
        batches.append(rows)
    return batches, places[:-1]


@shared_by_layers
def document_block_mask(lengths: tuple[int, ...], window: int | None, device: torch.device) -> BlockMask:
    """Build FlexAttention's mask of the keys that each row sees: causal, within the document and the window.

    The first visible key never decreases from row to row. The corners of a block of 128 x 128 therefore decide whether
    it is empty, full or mixed, in O((s / 128)^2) work. torch's `create_block_mask` evaluates all s^2 pairs instead;
    docs/design/baselines.md compares the two. In both, a last block with fewer than 128 rows is never full.
    """
    position = row_positions(lengths, device)
    reach = position if window is None else position.clamp(max=window - 1)
    first_key = (torch.arange(len(position), device=device) - reach).int()
    block = torch.arange(-(-len(position) // FLEX_BLOCK), device=device)
    top = block * FLEX_BLOCK
    end = top + FLEX_BLOCK
    bottom = (end - 1).clamp(max=len(position) - 1)
    visible = (block <= block[:, None]) & (end > first_key[top][:, None])
    full = (block < block[:, None]) & (top >= first_key[bottom][:, None]) & (end <= len(position))[:, None]

    def counts_and_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
        columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]

    return BlockMask.from_kv_blocks(
        *counts_and_indices(visible & ~full),
        *counts_and_indices(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda _, head, query, key: (key <= query) & (key >= first_key[query]),
        seq_lengths=(len(position), len(position)),
    )
