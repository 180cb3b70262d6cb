"""Which rows of a stream the ranks of a plan hold, as pieces of documents, and the blocks that a rank computes.

A piece is a range of neighbouring rows of one document. A block is a range of queries of one piece and a range of keys
of another piece of the same document. The queries see all keys of the block, or the block is the diagonal: queries and
keys are the same rows. So no block needs a mask other than the causal one, unless there is a window.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sb.ops.context_parallel import ContextParallelPlan, shard_positions


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of one document that a member of a group holds.

    Attributes:
        row: first row, counted in the rows of the member.
        position: position of the first row in its document.
        length: number of rows.
        document: index of the document.
    """

    row: int
    position: int
    length: int
    document: int

    @property
    def end(self) -> int:
        """Return the position after the last row."""
        return self.position + self.length


@dataclass(frozen=True)
class Block:
    """Queries and keys of one document that are computed together.

    Attributes:
        rows: range of the queries, in the rows of the member that computes the block.
        keys: range of the keys, in the rows of the member that holds them.
        first_row: position of the first query in the document.
        first_key: position of the first key in the document.
    """

    rows: slice
    keys: slice
    first_row: int
    first_key: int

    @property
    def is_diagonal(self) -> bool:
        """Whether queries and keys are the same rows. Otherwise all keys are older than the queries."""
        return self.first_row == self.first_key


@dataclass(frozen=True)
class Indices:
    """Orders of rows, int64 on one device.

    Attributes:
        local: (local rows,), rows of the stream that this rank holds.
        member: (rows of a member,), rows of the stream that this rank's member holds, ascending.
        exchanged: (rows of a member,), sorts rows that are concatenated by rank of the a2a group as in the stream.
        unexchanged: the inverse of `exchanged`.
        gathered: (seq_len,), sorts rows that are concatenated by member as in the stream. Each member's rows are padded
            to those of the member with the most.
        ungathered: (members * rows of the member with the most,), the inverse of `gathered`, and 0 for the padding.
    """

    local: Tensor
    member: Tensor
    exchanged: Tensor
    unexchanged: Tensor
    gathered: Tensor
    ungathered: Tensor

    def to(self, device: torch.device) -> Indices:
        """Return the orders on a device."""
        return Indices(*(index.to(device) for index in vars(self).values()))


class Shards:
    """The rows of the members of a group. A member is a rank, or several neighbouring ranks that exchange heads.

    Args:
        plan: the plan of the batch.
        exchanging: number of neighbouring ranks that exchange heads. They hold the rows of one member.

    Attributes:
        lengths: lengths of the documents that are not empty.
        all_lengths: the same, followed by the number of rows after the last document if there are any.
        num_rows: rows of all documents.
        member: index of the member that this rank belongs to.
        member_rows: numbers of rows of all members.
        exchanged_rows: numbers of rows of the ranks of this rank's member.
    """

    def __init__(self, plan: ContextParallelPlan, exchanging: int) -> None:
        offsets = [0, plan.seq_len] if plan.cu_seqlens is None else plan.cu_seqlens.tolist()
        lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
        self.lengths = tuple(length for length in lengths if length)
        self.num_rows = offsets[-1]
        num_others = plan.seq_len - self.num_rows
        self.all_lengths = (*self.lengths, *([num_others] if num_others else []))
        self.member = plan.rank // exchanging
        table = shard_positions(plan.size, plan.seq_len, plan.layout, plan.cu_seqlens, plan.packing)
        ranks = [rows[rows >= 0] for rows in table]  # a rank with one row less has -1 in its place
        members = [torch.cat(ranks[i : i + exchanging]) for i in range(0, plan.size, exchanging)]
        self._rows = [rows.sort().values for rows in members]
        self.member_rows = tuple(map(len, members))
        self.exchanged_rows = tuple(map(len, ranks[self.member * exchanging :][:exchanging]))
        exchanged = members[self.member].argsort()
        padded = torch.nn.utils.rnn.pad_sequence(self._rows, batch_first=True, padding_value=plan.seq_len).flatten()
        gathered = padded.argsort()[: plan.seq_len]
        ungathered = padded.where(padded < plan.seq_len, 0)
        member = self._rows[self.member]
        self._indices = Indices(ranks[plan.rank], member, exchanged, exchanged.argsort(), gathered, ungathered)
        self._on_device: dict[torch.device, Indices] = {}
        self._starts = torch.tensor([0, *itertools.accumulate(self.lengths)], device=table.device)
        self._blocks: dict[tuple, tuple[Block, ...]] = {}

    @torch.inference_mode(False)
    def indices(self, device: torch.device) -> Indices:
        """Return the orders of rows on a device. The first call copies them."""
        if device not in self._on_device:
            self._on_device[device] = self._indices.to(device)
        return self._on_device[device]

    def pieces(self, rows: Tensor) -> list[Piece]:
        """Return the pieces of ascending rows of the stream. Rows after the last document belong to no piece."""
        rows = rows[rows < self.num_rows]
        if not len(rows):
            return []
        document = torch.searchsorted(self._starts, rows, right=True) - 1
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = (rows.diff() != 1) | (document.diff() != 0)
        first = is_first.nonzero().flatten()
        position = (rows - self._starts[document])[first].tolist()
        bounds = [*first.tolist(), len(rows)]
        lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
        return [Piece(*fields) for fields in zip(bounds[:-1], position, lengths, document[first].tolist(), strict=True)]

    def blocks_by_member(self, window: int | None) -> list[tuple[Block, ...]]:
        """Return the blocks of this member's queries and the keys of each member. Keys outside the window are left out.

        window: number of newest keys that a row sees, including its own. None for all.
        """
        return [self._blocks_of(self.pieces(rows), (window, member)) for member, rows in enumerate(self._rows)]

    def blocks_of_stream(self, window: int | None) -> tuple[Block, ...]:
        """Return the blocks of this member's queries and the keys of the whole stream."""
        return self._blocks_of(self.pieces(torch.arange(self.num_rows, device=self._starts.device)), (window, None))

    def _blocks_of(self, sources: list[Piece], key: tuple) -> tuple[Block, ...]:
        if key not in self._blocks:
            by_document: dict[int, list[Piece]] = {}
            for piece in sources:
                by_document.setdefault(piece.document, []).append(piece)
            queries = self.pieces(self._rows[self.member])
            pairs = ((piece, source) for piece in queries for source in by_document.get(piece.document, ()))
            self._blocks[key] = tuple(block for pair in pairs for block in blocks_between(*pair, window=key[0]))
        return self._blocks[key]


def blocks_between(queries: Piece, keys: Piece, window: int | None) -> list[Block]:
    """Return the blocks of two pieces of one document: the older keys, and the diagonal if `keys` holds the queries."""
    blocks = []
    oldest = keys.position if window is None else max(keys.position, queries.position + 1 - window)
    newest = min(keys.end, queries.position)
    last_row = queries.end if window is None else min(queries.end, newest - 1 + window)
    if oldest < newest and queries.position < last_row:
        blocks.append(_block(queries, queries.position, last_row, keys, oldest, newest))
    if keys.position <= queries.position and queries.end <= keys.end:
        blocks.append(_block(queries, queries.position, queries.end, keys, queries.position, queries.end))
    return blocks


def _block(queries: Piece, begin: int, end: int, keys: Piece, first_key: int, last_key: int) -> Block:
    """Make a block of the queries at positions from `begin` to `end`, and the keys from `first_key` to `last_key`."""
    row, key = queries.row - queries.position, keys.row - keys.position
    return Block(slice(row + begin, row + end), slice(key + first_key, key + last_key), begin, first_key)


_shards: weakref.WeakKeyDictionary[ContextParallelPlan, dict[int, Shards]] = weakref.WeakKeyDictionary()


@torch.inference_mode(False)
def shards_of(plan: ContextParallelPlan, exchanging: int) -> Shards:
    """Return the shards of a plan. The first layer of a batch computes them; the other layers reuse them.

    Inference mode is off here and in `Shards.indices`: autograd could not save a tensor from inference mode.
    """
    found = _shards.setdefault(plan, {})
    if exchanging not in found:
        found[exchanging] = Shards(plan, exchanging)
    return found[exchanging]
