"""Documents, their split, and rows of a fixed length packed from them. NumPy only.

A row holds parts of documents, one after the other. A document that does not fit into what is left of a row is cut
there and goes on in the next row as a part of its own (attention never crosses parts). Each part is padded to a
multiple, so that it can be cut evenly between context-parallel ranks.
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

BYTE_END_OF_DOCUMENT = 256
CHECKED_BYTES = 2**19

# Directories of the standard library that some installations leave out, or that hold tables and other people's
# packages and not text.
STANDARD_LIBRARY_EXCLUDE = (
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip"),
    *("encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"),
)


class TextDocuments:
    """Files as byte tokens with an end-of-document token; read when asked for.

    lengths: int64 tokens per document, the end-of-document token counted.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self.lengths = np.array([path.stat().st_size + 1 for path in paths], dtype=np.int64)

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop of one document, int64."""
        num_bytes = min(stop, int(self.lengths[index]) - 1) - start
        read = np.fromfile(self._paths[index], dtype=np.uint8, count=num_bytes, offset=start).astype(np.int64)
        return np.append(read, BYTE_END_OF_DOCUMENT) if stop == self.lengths[index] else read


class Subset:
    """Some documents of a collection, in the collection's order."""

    def __init__(self, documents: Any, indices: np.ndarray, vocab_size: int) -> None:
        self._documents = documents
        self._indices = indices
        self._vocab_size = vocab_size
        self.lengths = documents.lengths[indices]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop of one document, int64. Raises ValueError for one that the vocabulary does not have."""
        tokens = self._documents.read(int(self._indices[index]), start, stop)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            at = int(np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))[0])
            raise ValueError(
                f"document {self._indices[index]} of data.paths has the token {tokens[at]} at {start + at}; 0 to "
                f"data.vocab_size - 1 = {self._vocab_size - 1} are allowed"
            )
        return tokens


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation documents; each ends with end_of_document. checksum: `checksum_of` their files."""

    train: Subset
    validation: Subset
    vocab_size: int
    end_of_document: int
    checksum: int

    def fingerprint(self) -> dict[str, int]:
        """Tells whether a resumed run sees the documents it started with."""
        return {
            "train_documents": len(self.train),
            "train_tokens": int(self.train.lengths.sum()),
            "validation_documents": len(self.validation),
            "validation_tokens": int(self.validation.lengths.sum()),
            "checksum": self.checksum,
        }


def load_corpus(config: TrainingConfig) -> Corpus:
    """The documents that config.data names, split at random (by config.seed) document by document.

    Raises ValueError when a path names nothing or a side of the split is left empty.
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
        raise ValueError(
            f"data.paths = {list(data.paths)} hold {len(documents.lengths)} documents: {len(train)} for training and "
            f"{len(validation)} for validation "
            f"(data.validation_fraction = {data.validation_fraction}); at least one of each is needed"
        )
    checksum = checksum_of(documents.lengths, files)
    sides = (Subset(documents, side, vocab_size) for side in (train, validation))
    return Corpus(*sides, vocab_size, end_of_document, checksum)


def checksum_of(lengths: np.ndarray, files: Sequence[Path]) -> int:
    """Of the documents' lengths and of CHECKED_BYTES at either end of every file, which is all of most."""
    checksum = zlib.crc32(lengths.tobytes())
    for path in files:
        with path.open("rb") as file:
            checksum = zlib.crc32(file.read(CHECKED_BYTES), checksum)
            file.seek(max(CHECKED_BYTES, path.stat().st_size - CHECKED_BYTES))
            checksum = zlib.crc32(file.read(), checksum)
    return checksum


def find_files(data: TextDataConfig) -> list[Path]:
    """Files in a fixed order: the order of data.paths, sorted by relative path within each."""
    found: dict[Path, None] = {}
    for entry in data.paths:
        if entry == STANDARD_LIBRARY:
            exclude = (*STANDARD_LIBRARY_EXCLUDE, *data.exclude)
            files = _walk(Path(sysconfig.get_paths()["stdlib"]), data.include, exclude)
            files = [path for path in files if path.suffix == ".py"]
        elif entry == SITE_PACKAGES:
            files = _walk(Path(sysconfig.get_paths()["purelib"]), data.include, data.exclude)
        elif Path(entry).is_dir():
            files = _walk(Path(entry), data.include, data.exclude)
        elif Path(entry).is_file():
            files = [Path(entry)]
        else:
            files = [Path(name) for name in sorted(glob.glob(entry, recursive=True)) if Path(name).is_file()]
        if not files:
            raise ValueError(
                f"data.paths: {entry!r} names no file; allowed are files, directories, glob patterns and "
                f"{' and '.join(map(repr, TEXT_OF_PYTHON))}"
            )
        found.update((path, None) for path in files if path.stat().st_size)
    return list(found)


def _walk(root: Path, include: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    def wanted(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return any(fnmatch.fnmatch(parts[-1], pattern) for pattern in include) and not any(
            fnmatch.fnmatch(part, pattern) for part in parts for pattern in exclude
        )

    return [path for path in sorted(root.rglob("*")) if wanted(path) and path.is_file()]


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Packed sequences, before they are cut between context-parallel ranks.

    tokens, labels: int64 (t,). counted: bool (t,), true where the label's loss counts. cu_seqlens: int32 (n + 1,),
    from 0 to t.
    """

    tokens: np.ndarray
    labels: np.ndarray
    counted: np.ndarray
    cu_seqlens: np.ndarray

    @staticmethod
    def concatenate(batches: Sequence[PackedBatch]) -> PackedBatch:
        """One stream of all of them."""
        starts = np.cumsum([0, *(len(batch.tokens) for batch in batches)])
        bounds = [batch.cu_seqlens[1:] + start for batch, start in zip(batches, starts, strict=False)]
        return PackedBatch(
            np.concatenate([batch.tokens for batch in batches]),
            np.concatenate([batch.labels for batch in batches]),
            np.concatenate([batch.counted for batch in batches]),
            np.concatenate([[0], *bounds]).astype(np.int32),
        )


def pack(parts: Sequence[np.ndarray], pad_multiple: int, pad_token: int, num_targets: int | None = None) -> PackedBatch:
    """Parts of documents, (n_i + 1,) tokens each, as one packed batch of n_i inputs and labels each, padded to the
    multiple.

    num_targets: count the loss of each part's last num_targets labels alone (None: of all).
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
    """A row before it is read.

    parts: document, start, and number of inputs of each. num_tokens: labels that count. cu_seqlens: as in PackedBatch.
    """

    parts: list[tuple[int, int, int]]
    num_tokens: int
    cu_seqlens: np.ndarray


def _padded(inputs: np.ndarray, multiple: int) -> np.ndarray:
    """The next multiple of each number of inputs."""
    return inputs + -inputs % multiple


def require_a_row(documents: Subset, row_length: int, pad_multiple: int) -> None:
    """Raise ValueError where documents, each padded, fill no row."""
    if _padded(documents.lengths - 1, pad_multiple).sum() < row_length:
        raise ValueError(
            f"the training documents hold {documents.lengths.sum()} tokens, less than a row of {row_length}"
        )


class RowSampler:
    """Rows of `row_length` tokens, cut from documents in a shuffled order and then shuffled themselves.

    Both orders are pure functions of (seed, epoch), so that a position is two integers, which a checkpoint can hold.
    What is left over at the end of an epoch, less than a row, is dropped. row_length must be a multiple of
    pad_multiple. Raises ValueError where the documents fill no row.
    """

    def __init__(
        self, documents: Subset, row_length: int, pad_multiple: int, pad_token: int, seed: Sequence[int]
    ) -> None:
        if row_length % pad_multiple:
            raise ValueError(f"row_length = {row_length} must be a multiple of pad_multiple = {pad_multiple}")
        self._documents = documents
        self._row_length = row_length
        self._pad_multiple = pad_multiple
        self._pad_token = pad_token
        self._seed = list(seed)
        require_a_row(documents, row_length, pad_multiple)
        self._start_epoch(0)

    def state_dict(self) -> dict[str, int]:
        """The epoch and how many of its rows have been taken."""
        return {"epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self._start_epoch(state["epoch"])
        self._taken = state["taken"]

    def next_rows(self, count: int) -> list[Row]:
        """The next `count` rows."""
        rows = []
        for _ in range(count):
            if self._taken == len(self._order):
                self._start_epoch(self._epoch + 1)
            rows.append(self._row(int(self._order[self._taken]) * self._row_length))
            self._taken += 1
        return rows

    def read(self, row: Row) -> PackedBatch:
        """A row's tokens."""
        # One token more than a part has inputs: the label of its last.
        tokens = [self._documents.read(document, start, start + length + 1) for document, start, length in row.parts]
        return pack(tokens, self._pad_multiple, self._pad_token)

    def _start_epoch(self, epoch: int) -> None:
        """Lay the documents out one after the other, each padded at its end. Rows are equal stretches of that, and as
        they begin at multiples of pad_multiple, a document that is cut between rows is padded no more for it.
        """
        generator = np.random.default_rng([*self._seed, epoch])
        self._epoch = epoch
        self._taken = 0
        self._shuffled = generator.permutation(len(self._documents))
        self._inputs = self._documents.lengths[self._shuffled] - 1
        self._starts = np.concatenate([[0], np.cumsum(_padded(self._inputs, self._pad_multiple))])
        self._order = generator.permutation(int(self._starts[-1]) // self._row_length)

    def _row(self, begin: int) -> Row:
        """What lies from `begin` on, for a row's length."""
        end = begin + self._row_length
        first, beyond = np.searchsorted(self._starts, begin, "right") - 1, np.searchsorted(self._starts, end)
        starts = np.maximum(begin - self._starts[first:beyond], 0)
        lengths = np.minimum(self._inputs[first:beyond], end - self._starts[first:beyond]) - starts
        parts = [*zip(self._shuffled[first:beyond].tolist(), starts.tolist(), lengths.tolist(), strict=True)]
        bounds = np.clip(self._starts[first : beyond + 1] - begin, 0, self._row_length)
        return Row(parts, int(lengths.sum()), bounds.astype(np.int32))


@dataclasses.dataclass(frozen=True)
class StepRows:
    """All rows of a step; the micro-batches of one data-parallel group; the sampler's state after them."""

    rows: list[Row]
    micro_batches: list[PackedBatch]
    sampler: dict[str, int]


def rows_ahead(
    sampler: Any, count: int, steps: int, group: int, num_groups: int, rows_per_micro_batch: int | None
) -> Iterator[StepRows]:
    """`count` rows for each of `steps` steps. The next step's are read while one is computed, by a thread that alone
    uses the sampler, a `task.Sampler`.
    """

    def read() -> StepRows:
        rows = sampler.next_rows(count)
        shares = split_rows(rows, group, num_groups, rows_per_micro_batch)
        batches = [PackedBatch.concatenate([sampler.read(row) for row in share]) for share in shares]
        return StepRows(rows, batches, sampler.state_dict())

    if not steps:
        return
    with ThreadPoolExecutor(max_workers=1) as reader:
        ahead = reader.submit(read)
        for left in reversed(range(steps)):
            rows = ahead.result()
            if left:
                ahead = reader.submit(read)
            yield rows


def split_rows(rows: Sequence[Any], group: int, num_groups: int, rows_per_micro_batch: int | None) -> list[list[Any]]:
    """The rows of each micro-batch of one data-parallel group out of those of a whole step."""
    per_group = len(rows) // num_groups
    mine = rows[group * per_group : (group + 1) * per_group]
    size = rows_per_micro_batch or per_group
    return [mine[start : start + size] for start in range(0, per_group, size)]
