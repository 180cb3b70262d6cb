"""Documents of Megatron's IndexedDataset (.bin/.idx pairs)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_sb.validation import InputError


class IndexedDocuments:
    """Read the documents of one or more data sets. The end-of-document token is added to a document that lacks it.

    The attribute `lengths` is int64 (documents,): the tokens of each document, including the end-of-document token.

    Args:
        path_prefixes: paths of the data sets without .bin and .idx.
        end_of_document: id of the end-of-document token.

    Raises:
        ValueError: if a prefix does not name a data set.
    """

    def __init__(self, path_prefixes: Sequence[str], end_of_document: int) -> None:
        for prefix in path_prefixes:
            if not IndexedDataset.exists(prefix):
                raise InputError(
                    f"data.paths must be prefixes of an IndexedDataset, got {prefix!r}: "
                    f"{prefix}.bin or {prefix}.idx is missing."
                )
        self._end_of_document = end_of_document
        self._datasets = [IndexedDataset(prefix) for prefix in path_prefixes]
        self._places = [
            (dataset, int(first), int(last))
            for dataset in self._datasets
            for first, last in zip(dataset.document_indices, dataset.document_indices[1:], strict=False)
        ]
        self.lengths = np.array([self._length(*place) for place in self._places], dtype=np.int64)

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens from start to stop of one document, int64 (stop - start,)."""
        dataset, first, last = self._places[index]
        pieces, offset = [], 0
        for sequence in range(first, last):
            length = int(dataset.sequence_lengths[sequence])
            begin, end = max(start - offset, 0), min(stop - offset, length)
            if begin < end:
                pieces.append(dataset.get(sequence, begin, end - begin).astype(np.int64))
            offset += length
        if stop > offset:
            pieces.append(np.array([self._end_of_document]))
        return np.concatenate(pieces)

    def _length(self, dataset: IndexedDataset, first: int, last: int) -> int:
        tokens = int(dataset.sequence_lengths[first:last].sum())
        ends = last > first and tokens > 0 and dataset[last - 1][-1] == self._end_of_document
        return tokens + (not ends)
