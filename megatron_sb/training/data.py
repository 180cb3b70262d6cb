"""Rows of a fixed length, packed from documents. NumPy only.

A row holds parts of documents, one after the other. A document that does not fit into the rest of a row is cut there.
Its remaining tokens become a separate part in the next row. Attention never crosses parts. Each part is padded to a
multiple, so that context-parallel ranks get equal shards of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from megatron_sb.training.documents import Subset, chunks, padded
from megatron_sb.validation import InputError


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Packed sequences, before context-parallel ranks shard them.

    Attributes:
        tokens: int64 (t,).
        labels: int64 (t,).
        counted: bool (t,), true where the label's loss counts.
        cu_seqlens: int32 (n + 1,), from 0 to t.
    """

    tokens: np.ndarray
    labels: np.ndarray
    counted: np.ndarray
    cu_seqlens: np.ndarray

    @staticmethod
    def concatenate(batches: Sequence[PackedBatch]) -> PackedBatch:
        """Return one batch with the sequences of all batches, in order."""
        starts = np.cumsum([0, *(len(batch.tokens) for batch in batches)])
        bounds = [batch.cu_seqlens[1:] + start for batch, start in zip(batches, starts, strict=False)]
        return PackedBatch(
            np.concatenate([batch.tokens for batch in batches]),
            np.concatenate([batch.labels for batch in batches]),
            np.concatenate([batch.counted for batch in batches]),
            np.concatenate([[0], *bounds]).astype(np.int32),
        )


def pack(parts: Sequence[np.ndarray], pad_multiple: int, pad_token: int, num_targets: int | None = None) -> PackedBatch:
    """Pack parts of documents into one batch.

    Args:
        parts: (n_i + 1,) tokens each, which give n_i inputs and labels.
        pad_multiple: each part is padded to a multiple of it.
        pad_token: the token to pad with. Its labels do not count.
        num_targets: number of labels at the end of each part that count. None counts all.
    """
    rows = []
    for part in parts:
        length = len(part) - 1
        padding = -length % pad_multiple
        counted = np.zeros(length + padding, dtype=bool)
        counted[0 if num_targets is None else length - num_targets : length] = True
        rows.append(
            PackedBatch(
                np.pad(part[:-1], (0, padding), constant_values=pad_token),
                np.pad(part[1:], (0, padding), constant_values=pad_token),
                counted,
                np.array([0, length + padding], dtype=np.int32),
            )
        )
    return PackedBatch.concatenate(rows)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row before its tokens are read.

    Attributes:
        parts: (document, start, number of inputs) of each part.
        num_tokens: number of labels that count.
        cu_seqlens: as in PackedBatch.
    """

    parts: list[tuple[int, int, int]]
    num_tokens: int
    cu_seqlens: np.ndarray


def require_a_row(documents: Subset, row_length: int, pad_multiple: int) -> None:
    """Raise ValueError if the documents, each padded, do not fill a row."""
    inputs = 0
    for lengths in chunks(documents.lengths):
        inputs += int(padded(lengths.astype(np.int64) - 1, pad_multiple).sum())
        if inputs >= row_length:
            return
    raise InputError(
        f"the training documents must fill a row of {row_length} tokens, got {documents.num_tokens} tokens"
    )


class RowSampler:
    """Rows cut from shuffled documents, and then shuffled themselves. A `task.Sampler`.

    Both orders are pure functions of (seed, epoch), so a checkpoint stores a position as two integers. The tokens after
    the last complete row of an epoch are dropped.

    Args:
        documents: the documents.
        row_length: tokens in a row, a multiple of pad_multiple.
        pad_multiple: each part is padded to a multiple of it.
        pad_token: the token to pad with.
        seed: any number of integers.
        start: epoch, and the number of its documents to leave out, as `end` of another sampler returns them.
        num_rows: number of rows that will be used. They are cut from consecutive documents of the order, so that
            another sampler can continue after them. Default: the rows of an epoch are cut from all documents.

    Raises:
        ValueError: The documents do not fill a row.
    """

    def __init__(
        self,
        documents: Subset,
        row_length: int,
        pad_multiple: int,
        pad_token: int,
        seed: Sequence[int],
        start: tuple[int, int] = (0, 0),
        num_rows: int | None = None,
    ) -> None:
        if row_length % pad_multiple:
            raise InputError(f"row_length must be a multiple of pad_multiple = {pad_multiple}, got {row_length}")
        self._documents = documents
        self._row_length = row_length
        self._pad_multiple = pad_multiple
        self._pad_token = pad_token
        self._seed = list(seed)
        self._start = start
        self._num_rows = num_rows
        require_a_row(documents, row_length, pad_multiple)
        self._restart()

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the number of its documents that are left out, and the number of rows taken from it."""
        return {"epoch": self._epoch, "first": self._first, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """See `task.Sampler.load_state_dict`.

        Raises:
            ValueError: The state is of version 0.1.0, which had another order of rows.
        """
        if "first" not in state:
            raise InputError(
                "the position in the data must have epoch, first and taken, as in this version's checkpoints, got "
                f"{state} of version 0.1.0, whose rows had another order. Start a new run with initial_checkpoint."
            )
        self._restart()
        while self._epoch < state["epoch"]:
            self._start_next_epoch()
        self._taken = state["taken"]

    def end(self) -> tuple[int, int]:
        """Return the epoch and the first document of its order that none of the `num_rows` rows uses."""
        assert self._num_rows is not None, "only a sampler with a number of rows has an end"
        position = self.state_dict()
        self._restart()
        while self._rows_before + len(self._order) < self._num_rows:
            self._start_next_epoch()
        used = np.searchsorted(self._starts[:-1], self._starts[0] + len(self._order) * self._row_length)
        end = self._epoch, self._first + int(used)
        self.load_state_dict(position)
        return end

    def next_rows(self, count: int) -> list[Row]:
        """See `task.Sampler.next_rows`."""
        rows = []
        for _ in range(count):
            while self._taken == len(self._order):
                self._start_next_epoch()
            rows.append(self._row(int(self._starts[0]) + int(self._order[self._taken]) * self._row_length))
            self._taken += 1
        return rows

    def read(self, row: Row) -> PackedBatch:
        """See `task.Sampler.read`."""
        # One token more than inputs: the label of the last input.
        tokens = [self._documents.read(document, start, start + length + 1) for document, start, length in row.parts]
        return pack(tokens, self._pad_multiple, self._pad_token)

    def _restart(self) -> None:
        self._rows_before = 0
        self._start_epoch(*self._start)

    def _start_next_epoch(self) -> None:
        self._rows_before += len(self._order)
        self._start_epoch(self._epoch + 1, 0)

    def _start_epoch(self, epoch: int, first: int) -> None:
        """Concatenate the documents in a shuffled order, each padded at its end. Shuffle the rows of the result.

        `first` documents are left out. Only as many rows are shuffled as are needed. Rows start at multiples of
        pad_multiple, so a document that is cut between rows needs no more padding.
        """
        self._epoch, self._first, self._taken = epoch, first, 0
        order = self._documents.shuffle([*self._seed, epoch])
        self._shuffled = order.arrays["order"][first:]
        self._starts = self._documents.place(order, self._pad_multiple)[first:]
        rows = int(self._starts[-1] - self._starts[0]) // self._row_length
        if self._num_rows is not None and self._num_rows > self._rows_before:
            rows = min(rows, self._num_rows - self._rows_before)
        self._order = self._documents.shuffle_rows(order, rows)

    def _row(self, begin: int) -> Row:
        """Return the row that starts at position `begin` of the concatenated documents."""
        end = begin + self._row_length
        first, beyond = np.searchsorted(self._starts, begin, "right") - 1, np.searchsorted(self._starts, end)
        starts = np.maximum(begin - self._starts[first:beyond], 0)
        documents = self._shuffled[first:beyond]
        inputs = self._documents.lengths[documents] - 1
        lengths = np.minimum(inputs, end - self._starts[first:beyond]) - starts
        parts = [*zip(documents.tolist(), starts.tolist(), lengths.tolist(), strict=True)]
        bounds = np.clip(self._starts[first : beyond + 1] - begin, 0, self._row_length)
        return Row(parts, int(lengths.sum()), bounds.astype(np.int32))


@dataclasses.dataclass(frozen=True)
class StepRows:
    """All rows of a step, the micro-batches of one data-parallel group, and the sampler's state after the step."""

    rows: list[Row]
    micro_batches: list[PackedBatch]
    sampler: dict[str, int]


def rows_ahead(
    sampler: Any, count: int, steps: int, group: int, num_groups: int, rows_per_micro_batch: int | None
) -> Iterator[StepRows]:
    """Yield the rows of each step. During a step, a thread reads the rows of the next step.

    Args:
        sampler: a `task.Sampler`. Only that thread uses it.
        count: rows of a step, over all data-parallel groups.
        steps: number of steps.
        group: index of this data-parallel group.
        num_groups: number of data-parallel groups.
        rows_per_micro_batch: rows of a micro-batch. None: all rows of the group.
    """

    def read() -> StepRows:
        rows = sampler.next_rows(count)
        shares = split_rows(rows, group, num_groups, rows_per_micro_batch)
        batches = [PackedBatch.concatenate([sampler.read(row) for row in share]) for share in shares]
        return StepRows(rows, batches, sampler.state_dict())

    if not steps:
        return
    with ThreadPoolExecutor(max_workers=1) as reader:
        next_step = reader.submit(read)
        for steps_left in reversed(range(steps)):
            rows = next_step.result()
            if steps_left:
                next_step = reader.submit(read)
            yield rows


def split_rows(rows: Sequence[Any], group: int, num_groups: int, rows_per_micro_batch: int | None) -> list[list[Any]]:
    """Return the rows of each micro-batch of one data-parallel group, from the rows of a whole step."""
    per_group = len(rows) // num_groups
    mine = rows[group * per_group : (group + 1) * per_group]
    size = rows_per_micro_batch or per_group
    return [mine[start : start + size] for start in range(0, per_group, size)]
