"""Documents of Megatron's IndexedDataset (.bin/.idx pairs)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_sb.validation import InputError

# An .idx file: a header, the length (int32) of every sequence, its place (int64) in bytes of the .bin file, and the
# first sequence (int64) of every document, with one more entry for the end.
IDX_HEADER_BYTES = 34
CHUNK_DOCUMENTS = 2**14  # measured at once: the pages that hold their last tokens are mapped together


def write_documents(path_prefix: str, documents: Iterable[np.ndarray], dtype: type[np.integer]) -> int:
    """Write documents as a data set, one after the other. Memory grows by the length of each document only.

    Args:
        path_prefix: path of the data set without .bin and .idx. Existing files are overwritten.
        documents: tokens of each document, integers (n,).
        dtype: type of a token in the file, for example np.uint16.

    Returns:
        The number of tokens.
    """
    builder, num_tokens = IndexedDatasetBuilder(path_prefix + ".bin", dtype=dtype), 0
    for tokens in documents:
        builder.add_document(tokens, [len(tokens)])
        num_tokens += len(tokens)
    builder.finalize(path_prefix + ".idx")
    return num_tokens


class IndexedDocuments:
    """Read the documents of one or more data sets. The end-of-document token is added to a document that lacks it.

    Memory does not grow with the number of documents.

    Args:
        path_prefixes: paths of the data sets without .bin and .idx.
        end_of_document: id of the end-of-document token.
        held_out: paths of further data sets, which follow those. Default none.

    Raises:
        ValueError: if a prefix does not name a data set, its tokens are no integers, or its files are empty or damaged.
            The message names data.paths, or data.validation_paths for `held_out`.
    """

    def __init__(self, path_prefixes: Sequence[str], end_of_document: int, held_out: Sequence[str] = ()) -> None:
        self._end_of_document = end_of_document
        self._datasets = [_DataSet(prefix, "data.paths") for prefix in path_prefixes]
        self._datasets += [_DataSet(prefix, "data.validation_paths") for prefix in held_out]
        self._firsts = np.cumsum([0, *map(len, self._datasets)])  # index of the first document of each data set
        self.files = [Path(prefix + suffix) for prefix in (*path_prefixes, *held_out) for suffix in (".idx", ".bin")]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def first_document(self, index: int) -> int:
        """Return the index of the first document of a data set."""
        return int(self._firsts[index])

    def identity(self) -> list:
        """Return values that change when a file is changed or replaced, without reading it."""
        stats = [(os.path.abspath(path), path.stat()) for path in self.files]
        files = [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in stats]
        return [*files, self._end_of_document]

    def measure(self) -> Iterator[np.ndarray]:
        """Yield the number of tokens of some documents, int64, until all are measured.

        The end-of-document token counts. So this reads the last token of every document.
        """
        for dataset in self._datasets:
            for first in range(0, len(dataset), CHUNK_DOCUMENTS):
                tokens, last = dataset.measure(first, min(CHUNK_DOCUMENTS, len(dataset) - first))
                yield tokens + (last != self._end_of_document)

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens from start to stop of one document, int64 (stop - start,)."""
        dataset, number = self._find(index)
        tokens, end = dataset.read(number, start, stop)
        return np.append(tokens, self._end_of_document) if stop > end else tokens

    def name(self, index: int) -> str:
        """Return which document it is, in words."""
        dataset, number = self._find(index)
        return f"document {number} of {dataset.prefix} in {dataset.field}"

    def _find(self, index: int) -> tuple[_DataSet, int]:
        """Return the data set of a document, and its number there."""
        which = int(np.searchsorted(self._firsts, index, "right")) - 1
        return self._datasets[which], index - int(self._firsts[which])


class _DataSet:
    """A pair of files. They are read where they are needed: the memory of a mapping grows with what was ever read."""

    def __init__(self, prefix: str, field: str) -> None:
        self.prefix, self.field = prefix, field
        if not IndexedDataset.exists(prefix):
            raise InputError(
                f"{field} must be prefixes of an IndexedDataset, got {prefix!r}: "
                f"{prefix}.bin or {prefix}.idx is missing."
            )
        if not os.path.getsize(prefix + ".bin"):  # which cannot be mapped
            raise InputError(f"{field} must be data sets with tokens, got {prefix!r}, whose .bin file is empty.")
        try:
            mapped = IndexedDataset(prefix)
        except (AssertionError, ValueError, struct.error) as error:
            raise InputError(f"{prefix}.idx or {prefix}.bin is damaged: {error}") from error
        self._dtype = np.dtype(mapped.index.dtype)
        if self._dtype.kind not in "iu":
            raise InputError(f"{field} must be data sets of integers, got {prefix!r}, which holds {self._dtype}.")
        self._num_sequences = len(mapped.sequence_lengths)
        self._num_documents = len(mapped.document_indices) - 1
        needed = int(mapped.sequence_lengths[-1:].sum()) * self._dtype.itemsize
        needed += int(mapped.index.sequence_pointers[-1:].sum())
        self._idx, self._bin = (open(prefix + suffix, "rb") for suffix in (".idx", ".bin"))  # noqa: SIM115
        present = os.fstat(self._bin.fileno()).st_size
        if present < needed:
            raise InputError(f"{prefix}.bin must have {needed} bytes or more, as {prefix}.idx says, got {present}.")
        self._end = present // self._dtype.itemsize  # tokens that the .bin file can hold

    def __len__(self) -> int:
        return self._num_documents

    def measure(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of tokens and the last token of `count` documents; -1 for a document without tokens.

        Raises:
            ValueError: A document or a sequence is outside of the files.
        """
        bounds, lengths, places = self._sequences(first, count)
        outside = np.flatnonzero((lengths < 0) | (places < 0) | (places > self._end - lengths))
        if len(outside):
            at = int(outside[0])
            raise InputError(
                f"{self.prefix}.idx is damaged: every sequence must be within the {self._end} tokens of "
                f"{self.prefix}.bin, got one of {lengths[at]} tokens from token {places[at]} on."
            )
        tokens = np.diff(np.concatenate([[0], np.cumsum(lengths)])[bounds])
        sequences = bounds[1:][tokens > 0] - 1  # the last one of each document
        last = np.full(count, -1, dtype=np.int64)
        if len(sequences):
            mapped = np.memmap(self._bin, self._dtype, "r", shape=self._end)  # not the bytes of a token that is cut off
            last[tokens > 0] = mapped[places[sequences] + lengths[sequences] - 1]
        return tokens, last

    def read(self, document: int, start: int, stop: int) -> tuple[np.ndarray, int]:
        """Return the tokens from start to stop of a document, and the number of its tokens."""
        _, lengths, places = self._sequences(document, 1)
        pieces, offset = [np.empty(0, np.int64)], 0
        for length, place in zip(lengths.tolist(), places.tolist(), strict=True):
            begin, end = max(start - offset, 0), min(stop - offset, length)
            if begin < end:
                found = self._read(self._bin, self._dtype, (place + begin) * self._dtype.itemsize, end - begin)
                pieces.append(found.astype(np.int64))
            offset += length
        return np.concatenate(pieces), offset

    def _sequences(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the bounds (count + 1) of documents, and the length and place, in tokens, of their sequences: int64.

        Bounds count from the first of these sequences.
        """
        arrays = IDX_HEADER_BYTES, IDX_HEADER_BYTES + 4 * self._num_sequences
        bounds = self._read(self._idx, np.int64, arrays[1] + 8 * (self._num_sequences + first), count + 1)
        if bounds[0] < 0 or bounds[-1] > self._num_sequences or (np.diff(bounds) < 0).any():
            raise InputError(
                f"{self.prefix}.idx is damaged: every document must begin where the document before it ends, within "
                f"{self._num_sequences} sequences. Documents {first} to {first + count - 1} do not."
            )
        begin, sequences = int(bounds[0]), int(bounds[-1] - bounds[0])
        lengths = self._read(self._idx, np.int32, arrays[0] + 4 * begin, sequences).astype(np.int64)
        places = self._read(self._idx, np.int64, arrays[1] + 8 * begin, sequences) // self._dtype.itemsize
        return bounds - begin, lengths, places

    def _read(self, file: BinaryIO, dtype: Any, offset: int, count: int) -> np.ndarray:
        found = os.pread(file.fileno(), count * np.dtype(dtype).itemsize, offset)  # threads may share the file
        if len(found) != count * np.dtype(dtype).itemsize:
            raise InputError(f"{file.name} was cut off while it was used: {count} values are missing at byte {offset}.")
        return np.frombuffer(found, dtype)
