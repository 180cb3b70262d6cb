"""Documents, their split, and rows of a fixed length packed from them. NumPy only.

A row holds parts of documents, one after the other. A document that does not fit into the rest of a row is cut there.
Its remaining tokens become a separate part in the next row. Attention never crosses parts. Each part is padded to a
multiple, so that context-parallel ranks get equal shards of it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sb.training.config import (
    BYTE_VOCAB_SIZE,
    SITE_PACKAGES,
    STANDARD_LIBRARY,
    TEXT_OF_PYTHON,
    TextDataConfig,
    TrainingConfig,
)
from megatron_sb.validation import InputError

BYTE_END_OF_DOCUMENT = 256
CHECKED_BYTES = 2**19

# Directories of the standard library that hold tables or other packages instead of text, or are missing in some
# installations.
STANDARD_LIBRARY_EXCLUDE = (
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip"),
    *("encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"),
)


class TextDocuments:
    """Files as byte tokens with an end-of-document token. A file is read when its tokens are requested.

    Attributes:
        lengths: Tokens per document, with the end-of-document token: int64.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self.lengths = np.array([path.stat().st_size + 1 for path in paths], dtype=np.int64)

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return tokens start to stop of one document: int64."""
        num_bytes = min(stop, int(self.lengths[index]) - 1) - start
        read = np.fromfile(self._paths[index], dtype=np.uint8, count=num_bytes, offset=start).astype(np.int64)
        return np.append(read, BYTE_END_OF_DOCUMENT) if stop == self.lengths[index] else read


class Subset:
    """Some documents of a collection, in the collection's order.

    Attributes:
        lengths: Tokens per document: int64.
    """

    def __init__(self, documents: Any, indices: np.ndarray, vocab_size: int) -> None:
        self._documents = documents
        self._indices = indices
        self._vocab_size = vocab_size
        self.lengths = documents.lengths[indices]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return tokens start to stop of one document: int64.

        Raises:
            ValueError: A token is not in the vocabulary.
        """
        tokens = self._documents.read(int(self._indices[index]), start, stop)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            at = int(np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))[0])
            raise InputError(
                f"token {start + at} of document {self._indices[index]} of data.paths must be from 0 to "
                f"data.vocab_size - 1 = {self._vocab_size - 1}, got {tokens[at]}"
            )
        return tokens


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation documents. Each document ends with end_of_document.

    Attributes:
        train: Training documents.
        validation: Held-out documents.
        vocab_size: Tokens of the vocabulary, before padding.
        end_of_document: The token that ends a document.
        checksum: See `checksum_of`.
    """

    train: Subset
    validation: Subset
    vocab_size: int
    end_of_document: int
    checksum: int

    def fingerprint(self) -> dict[str, int]:
        """See `task.Task.fingerprint`."""
        return {
            "train_documents": len(self.train),
            "train_tokens": int(self.train.lengths.sum()),
            "validation_documents": len(self.validation),
            "validation_tokens": int(self.validation.lengths.sum()),
            "checksum": self.checksum,
        }


def load_corpus(config: TrainingConfig) -> Corpus:
    """Load the documents that config.data names, and split them at random, document by document, by config.seed.

    Raises:
        ValueError: An entry of data.paths names no file, or no document is left for training or for validation.
    """
    data = config.data
    if data.kind == "text":
        files = find_files(data)
        documents: Any = TextDocuments(files)
        vocab_size, end_of_document = BYTE_VOCAB_SIZE, BYTE_END_OF_DOCUMENT
    else:
        from megatron_sb.megatron.indexed_documents import IndexedDocuments

        vocab_size, end_of_document = data.vocab_size, data.end_of_document
        documents = IndexedDocuments(data.paths, end_of_document)
        files = [Path(prefix + suffix) for prefix in data.paths for suffix in (".idx", ".bin")]
    held_out = np.random.default_rng([config.seed, 0]).random(len(documents.lengths)) < data.validation_fraction
    long_enough = documents.lengths > 1
    train, validation = np.flatnonzero(long_enough & ~held_out), np.flatnonzero(long_enough & held_out)
    if not len(train) or not len(validation):
        raise InputError(
            f"data.paths must hold at least one document for training and one for validation, got {len(train)} and "
            f"{len(validation)} of {len(documents.lengths)} documents in {list(data.paths)}, with "
            f"data.validation_fraction = {data.validation_fraction}"
        )
    checksum = checksum_of(documents.lengths, files)
    sides = (Subset(documents, side, vocab_size) for side in (train, validation))
    return Corpus(*sides, vocab_size, end_of_document, checksum)


def checksum_of(lengths: np.ndarray, files: Sequence[Path]) -> int:
    """Return a checksum of the documents' lengths, and of CHECKED_BYTES at both ends of every file."""
    checksum = zlib.crc32(lengths.tobytes())
    for path in files:
        with path.open("rb") as file:
            checksum = zlib.crc32(file.read(CHECKED_BYTES), checksum)
            file.seek(max(CHECKED_BYTES, path.stat().st_size - CHECKED_BYTES))
            checksum = zlib.crc32(file.read(), checksum)
    return checksum


def find_files(data: TextDataConfig) -> list[Path]:
    """Return the files that data.paths names, in that order, sorted by relative path within each entry.

    Raises:
        ValueError: An entry names no file.
    """
    found: dict[Path, None] = {}
    for entry in data.paths:
        if entry == STANDARD_LIBRARY:
            exclude = (*STANDARD_LIBRARY_EXCLUDE, *data.exclude)
            files = _find_below(Path(sysconfig.get_paths()["stdlib"]), data.include, exclude)
            files = [path for path in files if path.suffix == ".py"]
        elif entry == SITE_PACKAGES:
            files = _find_below(Path(sysconfig.get_paths()["purelib"]), data.include, data.exclude)
        elif Path(entry).is_dir():
            files = _find_below(Path(entry), data.include, data.exclude)
        elif Path(entry).is_file():
            files = [Path(entry)]
        else:
            files = [Path(name) for name in sorted(glob.glob(entry, recursive=True)) if Path(name).is_file()]
        if not files:
            raise InputError(
                f"data.paths must name files, directories, glob patterns or {' or '.join(map(repr, TEXT_OF_PYTHON))}, "
                f"got {entry!r}, which names no file"
            )
        found.update((path, None) for path in files if path.stat().st_size)
    return list(found)


def _find_below(root: Path, include: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    def wanted(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return any(fnmatch.fnmatch(parts[-1], pattern) for pattern in include) and not any(
            fnmatch.fnmatch(part, pattern) for part in parts for pattern in exclude
        )

    return [path for path in sorted(root.rglob("*")) if wanted(path) and path.is_file()]


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
        pad_multiple: Each part is padded to a multiple of it.
        pad_token: The token to pad with. Its labels do not count.
        num_targets: Number of labels at the end of each part that count. None counts all.
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
        num_tokens: Number of labels that count.
        cu_seqlens: As in PackedBatch.
    """

    parts: list[tuple[int, int, int]]
    num_tokens: int
    cu_seqlens: np.ndarray


def _padded(inputs: np.ndarray, multiple: int) -> np.ndarray:
    """Round up to the multiple."""
    return inputs + -inputs % multiple


def require_a_row(documents: Subset, row_length: int, pad_multiple: int) -> None:
    """Raise ValueError if the documents, each padded, do not fill a row."""
    if _padded(documents.lengths - 1, pad_multiple).sum() < row_length:
        raise InputError(
            f"the training documents must fill a row of {row_length} tokens, got {documents.lengths.sum()} tokens"
        )


class RowSampler:
    """Rows cut from shuffled documents, and then shuffled themselves. A `task.Sampler`.

    Both orders are pure functions of (seed, epoch), so a checkpoint stores a position as two integers. The tokens after
    the last complete row of an epoch are dropped.

    Args:
        documents: The documents.
        row_length: Tokens in a row, a multiple of pad_multiple.
        pad_multiple: Each part is padded to a multiple of it.
        pad_token: The token to pad with.
        seed: Any number of integers.
        start: Epoch, and the number of its documents to leave out, as `end` of another sampler returns them.
        num_rows: Number of rows that will be used. They are cut from consecutive documents of the order, so that
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
        used = np.searchsorted(self._starts[:-1], len(self._order) * self._row_length)
        end = self._epoch, self._first + int(used)
        self.load_state_dict(position)
        return end

    def next_rows(self, count: int) -> list[Row]:
        """See `task.Sampler.next_rows`."""
        rows = []
        for _ in range(count):
            while self._taken == len(self._order):
                self._start_next_epoch()
            rows.append(self._row(int(self._order[self._taken]) * self._row_length))
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
        generator = np.random.default_rng([*self._seed, epoch])
        self._epoch, self._first, self._taken = epoch, first, 0
        self._shuffled = generator.permutation(len(self._documents))[first:]
        self._inputs = self._documents.lengths[self._shuffled] - 1
        self._starts = np.concatenate([[0], np.cumsum(_padded(self._inputs, self._pad_multiple))])
        rows = int(self._starts[-1]) // self._row_length
        if self._num_rows is not None and self._num_rows > self._rows_before:
            rows = min(rows, self._num_rows - self._rows_before)
        self._order = generator.permutation(rows)

    def _row(self, begin: int) -> Row:
        """Return the row that starts at position `begin` of the concatenated documents."""
        end = begin + self._row_length
        first, beyond = np.searchsorted(self._starts, begin, "right") - 1, np.searchsorted(self._starts, end)
        starts = np.maximum(begin - self._starts[first:beyond], 0)
        lengths = np.minimum(self._inputs[first:beyond], end - self._starts[first:beyond]) - starts
        parts = [*zip(self._shuffled[first:beyond].tolist(), starts.tolist(), lengths.tolist(), strict=True)]
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
        sampler: A `task.Sampler`. Only that thread uses it.
        count: Rows of a step, over all data-parallel groups.
        steps: Number of steps.
        group: Index of this data-parallel group.
        num_groups: Number of data-parallel groups.
        rows_per_micro_batch: Rows of a micro-batch. None: all rows of the group.
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
