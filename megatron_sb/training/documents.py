"""Documents, their split and their orders. NumPy only.

Documents are measured, split and shuffled through an index (`training.index`). With an index in files, the memory of a
rank does not grow with the number of documents.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_sb.training.config import BYTE_VOCAB_SIZE, TrainingConfig
from megatron_sb.training.index import Entry, FileIndex, MemoryIndex
from megatron_sb.training.text_files import TextFiles, list_files
from megatron_sb.validation import InputError

BYTE_END_OF_DOCUMENT = 256
CHECKED_BYTES = 2**19
CHUNK = 2**16  # documents that are handled at once
FILES_PER_SIGN = 64  # while a process reads files for the index, the others wait for its next append
INDEX_FOLDER = "megatron_sb_index"  # next to the first data set of data.kind: indexed


class Documents(Protocol):
    """A collection of documents.

    Attributes:
        files: the files that hold them.
    """

    files: Sequence[str | Path]

    def __len__(self) -> int:
        """Return the number of documents."""

    def identity(self) -> list:
        """Return numbers and strings that change when a file is changed or replaced. This reads no file."""

    def measure(self) -> Iterator[np.ndarray]:
        """Yield the number of tokens of some documents, with the end-of-document token, until all are measured."""

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return tokens start to stop of one document: int64."""

    def name(self, index: int) -> str:
        """Return which document it is, in words."""


class TextDocuments:
    """Files as byte tokens with an end-of-document token, read when they are requested. See `Documents`.

    Attributes:
        left_out: see `TextFiles`.
    """

    def __init__(self, files: TextFiles) -> None:
        self.files = files.names
        self.left_out = files.left_out
        self._lengths = files.sizes + 1
        self._digest = files.digest

    def __len__(self) -> int:
        return len(self.files)

    def identity(self) -> list:
        """See `Documents.identity`."""
        return [self._digest]

    def measure(self) -> Iterator[np.ndarray]:
        """See `Documents.measure`."""
        yield self._lengths

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return tokens start to stop of one document: int64.

        Raises:
            ValueError: The file is shorter than it was when the job started.
        """
        num_bytes = min(stop, int(self._lengths[index]) - 1) - start
        read = np.fromfile(self.files[index], dtype=np.uint8, count=num_bytes, offset=start).astype(np.int64)
        if len(read) != num_bytes:
            raise InputError(
                f"{self.files[index]} must have {self._lengths[index] - 1} bytes, as when the job started, got "
                f"{os.path.getsize(self.files[index])}. Do not change the files of data.paths while a job runs."
            )
        return np.append(read, BYTE_END_OF_DOCUMENT) if stop == self._lengths[index] else read

    def name(self, index: int) -> str:
        """See `Documents.name`."""
        return self.files[index]


class Subset:
    """Some documents of a collection, in the collection's order.

    Args:
        documents: the collection.
        split: the index entry with the split.
        side: "train" or "validation".
        vocab_size: tokens must be less than this.
        index: keeps the orders that documents are shuffled to.

    Attributes:
        lengths: tokens per document: an array of integers, not to be written to.
        num_tokens: their sum.
    """

    def __init__(
        self, documents: Documents, split: Entry, side: str, vocab_size: int, index: MemoryIndex | None = None
    ) -> None:
        self._documents = documents
        self._indices = split.arrays[side]
        self._vocab_size = vocab_size
        self._index = index or MemoryIndex()
        self._key = f"{split.key} {side}"
        self.lengths = split.arrays[f"{side}_lengths"]
        self.num_tokens = split.facts[f"{side}_tokens"]

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
                f"token {start + at} of {self._documents.name(int(self._indices[index]))} must be from 0 to "
                f"data.vocab_size - 1 = {self._vocab_size - 1}, got {tokens[at]}"
            )
        return tokens

    def shuffle(self, seed: Sequence[int]) -> Entry:
        """Return the index entry of a random order of the documents.

        Its array "order" has the documents; its fact "generator" is the state of the random generator after them.
        """

        def build(new: Any) -> dict[str, Any]:
            generator = np.random.default_rng(seed)
            order = np.arange(len(self), dtype=_dtype_for(len(self)))
            generator.shuffle(order)  # the same as permutation(len(self)), with half the memory
            new("order", order.dtype).append(order)
            return {"generator": generator.bit_generator.state}

        return self._index.entry("order", [self._key, *seed], build)

    def place(self, order: Entry, pad_multiple: int) -> np.ndarray:
        """Return the places of inputs when all documents are concatenated in an order: int64 (documents + 1,).

        A document has one input less than tokens. Its inputs are padded to a multiple at their end.
        """

        def build(new: Any) -> dict[str, Any]:
            starts, end = new("starts", np.int64), np.int64(0)
            starts.append(end[None])
            for chunk in chunks(order.arrays["order"]):
                ends = end + np.cumsum(padded(self.lengths[chunk].astype(np.int64) - 1, pad_multiple))
                starts.append(ends)
                end = ends[-1]
            return {}

        return self._index.entry("starts", [order.key, pad_multiple], build).arrays["starts"]

    def shuffle_rows(self, order: Entry, count: int) -> np.ndarray:
        """Return a random order of `count` rows, by the random generator that has shuffled the documents."""

        def build(new: Any) -> dict[str, Any]:
            generator = np.random.default_rng()
            generator.bit_generator.state = order.facts["generator"]
            rows = np.arange(count, dtype=_dtype_for(count))
            generator.shuffle(rows)
            new("rows", rows.dtype).append(rows)
            return {}

        return self._index.entry("rows", [order.key, count], build).arrays["rows"]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation documents. Each document ends with end_of_document.

    Attributes:
        train: training documents.
        validation: held-out documents.
        vocab_size: tokens of the vocabulary, before padding.
        end_of_document: the token that ends a document.
        checksum: of the documents' lengths, and of CHECKED_BYTES at both ends of every file.
        left_out: number of files or documents that are not used, by reason.
    """

    train: Subset
    validation: Subset
    vocab_size: int
    end_of_document: int
    checksum: int
    left_out: dict[str, int]

    def fingerprint(self) -> dict[str, int]:
        """See `task.Task.fingerprint`."""
        return {
            "train_documents": len(self.train),
            "train_tokens": self.train.num_tokens,
            "validation_documents": len(self.validation),
            "validation_tokens": self.validation.num_tokens,
            "checksum": self.checksum,
        }


def load_corpus(config: TrainingConfig) -> Corpus:
    """Load the documents that config.data names, and split them.

    Documents of data.validation_paths are for validation. Without them, the split is at random, document by document,
    by config.seed.

    Raises:
        ValueError: An entry of data.paths names no file, no document is left for training or for validation, or the
            index cannot be written.
    """
    data, index, left_out = config.data, MemoryIndex(), Counter()
    how, held_out = [config.seed, data.validation_fraction], _at_random(config.seed, data.validation_fraction)
    if data.kind == "text":
        documents: Any = TextDocuments(list_files(data))
        vocab_size, end_of_document = BYTE_VOCAB_SIZE, BYTE_END_OF_DOCUMENT
        left_out.update(documents.left_out)
        folder = data.index_folder
    else:
        from megatron_sb.megatron.indexed_documents import IndexedDocuments

        vocab_size, end_of_document = data.vocab_size, data.end_of_document
        documents = IndexedDocuments(data.paths, end_of_document, data.validation_paths)
        if data.validation_paths:
            first = documents.first_document(len(data.paths))
            how, held_out = [first], _from(first)
        folder = data.index_folder or Path(data.paths[0]).parent / INDEX_FOLDER
    if folder:
        index = FileIndex(Path(folder), config.parallel.timeout_seconds)
    measured = index.entry("documents", documents.identity(), lambda new: _measure(documents, new))
    split = index.entry("split", [measured.key, *how], lambda new: _split(measured, held_out, new))
    left_out["empty"] += split.facts["empty"]
    sides = [Subset(documents, split, side, vocab_size, index) for side in ("train", "validation")]
    if not all(map(len, sides)):
        raise InputError(_why_a_side_is_missing(*map(len, sides), len(documents), data, left_out["empty"]))
    return Corpus(*sides, vocab_size, end_of_document, measured.facts["checksum"], dict(sorted((+left_out).items())))


def _why_a_side_is_missing(train: int, validation: int, total: int, data: Any, empty: int) -> str:
    if held_out := getattr(data, "validation_paths", ()):
        fields, places = "data.paths and data.validation_paths", f"{list(data.paths)} and {list(held_out)}"
        fraction = ""
    else:
        fields, places = "data.paths", f"{list(data.paths)}"
        fraction = f", with data.validation_fraction = {data.validation_fraction}"
    left_out = f"; left out: {empty} empty" if empty else ""
    return (
        f"{fields} must hold at least one document for training and one for validation, got {train} and {validation} "
        f"of {total} documents in {places}{fraction}{left_out}"
    )


def _measure(documents: Documents, new: Any) -> dict[str, Any]:
    """Build the index entry with the documents' lengths and their checksum."""
    lengths, checksum, longest = new("lengths", np.int64), 0, 0
    for some in documents.measure():
        lengths.append(some)
        checksum = zlib.crc32(some.tobytes(), checksum)
        longest = max(longest, int(some.max(initial=0)))
    for number, name in enumerate(documents.files):
        if number % FILES_PER_SIGN == 0:
            lengths.append(np.empty(0, np.int64))
        checksum = checksum_of_ends(name, checksum)
    return {"checksum": checksum, "longest": longest}


def checksum_of_ends(name: str | Path, checksum: int = 0) -> int:
    """Return the CRC-32 of CHECKED_BYTES at both ends of a file, continued from another checksum."""
    with open(name, "rb") as file:
        checksum = zlib.crc32(file.read(CHECKED_BYTES), checksum)
        file.seek(max(CHECKED_BYTES, os.fstat(file.fileno()).st_size - CHECKED_BYTES))
        return zlib.crc32(file.read(), checksum)


# Whether each of `count` documents, from document `first` on, is for validation.
HeldOut = Callable[[int, int], np.ndarray]


def _at_random(seed: int, fraction: float) -> HeldOut:
    """Hold out a share of the documents. Call the result for all documents in order, once."""
    generator = np.random.default_rng([seed, 0])
    return lambda first, count: generator.random(count) < fraction


def _from(begin: int) -> HeldOut:
    """Hold out the documents from `begin` on."""
    return lambda first, count: np.arange(first, first + count) >= begin


def _split(measured: Entry, held_out_of: HeldOut, new: Any) -> dict[str, Any]:
    """Build the index entry with the documents of both sides, and their lengths."""
    lengths = measured.arrays["lengths"]
    dtypes = _dtype_for(len(lengths)), _dtype_for(measured.facts["longest"])
    sides = {side: (new(side, dtypes[0]), new(f"{side}_lengths", dtypes[1])) for side in ("train", "validation")}
    facts: Counter[str] = Counter(empty=0, train_tokens=0, validation_tokens=0)
    first = 0
    for some in chunks(lengths):
        held_out, long_enough = held_out_of(first, len(some)), some > 1
        for side, chosen in (("train", long_enough & ~held_out), ("validation", long_enough & held_out)):
            indices, of_side = sides[side]
            indices.append(first + np.flatnonzero(chosen))
            of_side.append(some[chosen])
            facts[f"{side}_tokens"] += int(some[chosen].sum())
        facts["empty"] += int((~long_enough).sum())
        first += len(some)
    return dict(facts)


def chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield consecutive parts of an array, of at most CHUNK elements."""
    for start in range(0, len(array), CHUNK):
        yield array[start : start + CHUNK]


def _dtype_for(largest: int) -> type:
    return np.int32 if largest < 2**31 else np.int64


def padded(inputs: np.ndarray, multiple: int) -> np.ndarray:
    """Round up to the multiple."""
    return inputs + -inputs % multiple
