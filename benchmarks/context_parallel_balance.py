"""Compare how the layouts of context parallelism divide the work of packed documents among ranks, and what they send.

Work is counted in tiles of 128 keys by 64 rows, as the Hopper backward computes them, and by 128 rows, as its forward
does at head_dim 128. Nothing is timed, so the script runs on any machine.

python benchmarks/context_parallel_balance.py --rows-per-rank 8192 --streams 5
python benchmarks/context_parallel_balance.py --rows-per-rank 8192 --streams 5 --keys
"""

import argparse
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from arguments import whole_number

from megatron_sb.ops.context_parallel import shard_positions

KEYS = 128  # in a tile
# Medians and standard deviations of the logarithm of document lengths in tokens: most web pages and source files are
# short, and few long ones have most of the tokens.
DOCUMENTS = {"web": (600, 1.2), "code": (800, 2.0), "books": (60000, 0.7)}
RANKS = (4, 16, 64, 256)


def pieces_of(rows: np.ndarray, cu_seqlens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the document of each row, and where pieces begin: neighbouring rows of one document. rows: increasing."""
    document = np.searchsorted(cu_seqlens, rows, side="right") - 1
    return document, np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (np.diff(document, prepend=-1) != 0))


def needed_keys(rows: np.ndarray, cu_seqlens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the keys that rows need begin and end: in each document, up to its last row. rows: increasing."""
    document = np.searchsorted(cu_seqlens, rows, side="right") - 1
    is_last = np.diff(document, append=-1) != 0
    return cu_seqlens[document[is_last]], rows[is_last] + 1


@dataclass(frozen=True)
class Split:
    """A packed stream, split over ranks."""

    rows: np.ndarray  # (ranks, rows of a rank): rows of the stream
    cu_seqlens: np.ndarray

    @classmethod
    def of(cls, ranks: int, lengths: np.ndarray, layout: str, packing: str, multiple: int = 1) -> "Split":
        """Split documents, each padded to a multiple, and the stream padded to what the layout needs."""
        padded = -(-lengths // multiple) * multiple
        cu_seqlens = np.concatenate([[0], padded.cumsum()])
        total = -(-int(cu_seqlens[-1]) // (2 * ranks)) * 2 * ranks
        offsets = torch.from_numpy(cu_seqlens.astype(np.int32))
        return cls(shard_positions(ranks, total, layout, offsets, packing).numpy(), cu_seqlens)

    def tiles(self, tile_rows: int) -> np.ndarray:
        """Return the tiles of each rank. Tiles of rows begin with each piece, tiles of keys with each document."""
        return np.array([self._tiles(rows, tile_rows) for rows in self.rows])

    def _tiles(self, rows: np.ndarray, tile_rows: int) -> int:
        rows = np.sort(rows[rows < self.cu_seqlens[-1]])
        if rows.size == 0:
            return 0
        document, begins = pieces_of(rows, self.cu_seqlens)
        lengths = np.diff(begins, append=rows.size)
        positions = (rows - self.cu_seqlens[document])[begins]
        tiles_of_piece = -(-lengths // tile_rows)
        in_piece = np.arange(tiles_of_piece.sum()) - np.repeat(tiles_of_piece.cumsum() - tiles_of_piece, tiles_of_piece)
        ends = np.minimum((in_piece + 1) * tile_rows, np.repeat(lengths, tiles_of_piece))
        keys = np.repeat(positions, tiles_of_piece) + ends - 1  # that the last row of the tile sees
        return int(np.maximum(1, -(-keys // KEYS)).sum())

    def received_rows(self) -> np.ndarray:
        """Return how many rows of keys each rank receives with "all_gather".

        A rank needs the keys of the documents of its queries, up to its last query of each. If the ranks together need
        more than half of the stream each, they gather the whole stream.
        """
        needed = np.array([self._needed_rows(rows) for rows in self.rows])
        if 2 * needed.sum() > self.rows.shape[0] * self.rows.size:
            needed[:] = self.rows.size
        return needed - np.minimum(needed, (self.rows < self.cu_seqlens[-1]).sum(axis=1))

    def _needed_rows(self, rows: np.ndarray) -> int:
        begins, ends = needed_keys(np.sort(rows[rows < self.cu_seqlens[-1]]), self.cu_seqlens)
        return int((ends - begins).sum())

    def cuts(self) -> int:
        """Return the number of places inside documents where neighbouring rows are on different ranks."""
        rank = np.empty(self.rows.size, np.int64)
        for number, rows in enumerate(self.rows):
            rank[rows] = number
        inside = np.ones(rank.size - 1, bool)
        bounds = self.cu_seqlens[(self.cu_seqlens > 0) & (self.cu_seqlens < rank.size)]
        inside[bounds - 1] = False
        inside[self.cu_seqlens[-1] :] = False
        return int(((np.diff(rank) != 0) & inside).sum())


def document_lengths(kind: str, total: int, seed: int) -> np.ndarray:
    """Return lengths of documents that fill a stream of `total` rows. The last document is cut."""
    median, deviation = DOCUMENTS[kind]
    random = np.random.default_rng(seed)
    lengths = []
    while total > 0:
        lengths.append(min(total, int(random.lognormal(np.log(median), deviation)) + 1))
        total -= lengths[-1]
    return np.array(lengths)


def splits(ranks: int, lengths: np.ndarray) -> dict[str, Split]:
    """Return the splits to compare, by name."""
    return {
        "balanced": Split.of(ranks, lengths, "balanced", "whole_stream"),
        "zigzag, each document": Split.of(ranks, lengths, "zigzag", "per_document", 2 * ranks),
        "zigzag, whole stream": Split.of(ranks, lengths, "zigzag", "whole_stream"),
    }


def measure(kind: str, ranks: int, rows_per_rank: int, streams: int) -> dict[str, dict[str, float]]:
    """Return the means over streams, and the worst balance, of each split."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(streams):
        lengths = document_lengths(kind, ranks * rows_per_rank, seed)
        unsplit = Split.of(1, lengths, "contiguous", "whole_stream").tiles(64)[0]
        for name, split in splits(ranks, lengths).items():
            tiles, large = split.tiles(64), split.tiles(128)
            row = (tiles.max() / tiles.mean(), large.max() / large.mean(), tiles.max() * ranks / unsplit)
            found.setdefault(name, []).append((*row, split.cuts(), split.rows.size / lengths.sum() - 1))
    return {
        name: {
            "balance": max(row[0] for row in rows),
            "balance of 128 rows": max(row[1] for row in rows),
            "slowest": float(np.mean([row[2] for row in rows])),
            "cuts": float(np.mean([row[3] for row in rows])),
            "padding": float(np.mean([row[4] for row in rows])),
        }
        for name, rows in found.items()
    }


def print_keys(rows_per_rank: int, streams: int) -> None:
    """Print a table in Markdown: rows of keys that the rank with the most receives, as multiples of its own rows."""
    names = tuple(splits(1, np.array([2])))
    print("| documents | ranks |", " | ".join(names), "| balanced, mean of the ranks |")
    print("| --- |" + " ---: |" * (len(names) + 2))
    for kind, ranks in itertools.product(DOCUMENTS, RANKS):
        received: dict[str, list[np.ndarray]] = {}
        for seed in range(streams):
            for name, split in splits(ranks, document_lengths(kind, ranks * rows_per_rank, seed)).items():
                received.setdefault(name, []).append(split.received_rows() / split.rows.shape[1])
        cells = [f"{np.mean([each.max() for each in received[name]]):.2f}" for name in names]
        print("|", " | ".join([kind, str(ranks), *cells, f"{np.mean(received['balanced']):.2f}"]), "|", flush=True)


def main() -> None:
    """Print a table in Markdown; with --keys the one of `print_keys`.

    For each layout: the work of the rank with the most, relative to the mean and to 1 / ranks of the unsplit stream, in
    tiles of 64 rows; and the number of cuts. For "balanced" also the first of these in tiles of 128 rows.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows-per-rank", type=whole_number(1), default=8192)
    parser.add_argument("--streams", type=whole_number(1), default=5, help="streams for each row of the table")
    parser.add_argument("--keys", action="store_true", help="the keys that ranks receive, in place of their work")
    options = parser.parse_args()
    if options.keys:
        print_keys(options.rows_per_rank, options.streams)
        return
    print(
        "| documents | ranks | balanced: max / mean | of 128 rows | max / ideal | cuts "
        "| zigzag, each document: max / mean | max / ideal | cuts | padding "
        "| zigzag, whole stream: max / mean | max / ideal | cuts |"
    )
    print("| --- |" + " ---: |" * 12)
    for kind, ranks in itertools.product(DOCUMENTS, RANKS):
        cells = [kind, str(ranks)]
        for name, row in measure(kind, ranks, options.rows_per_rank, options.streams).items():
            cells += [f"{row['balance']:.3f}"] + [f"{row['balance of 128 rows']:.3f}"] * (name == "balanced")
            cells += [f"{row['slowest']:.2f}", f"{row['cuts']:.0f}"]
            cells += [f"{row['padding']:.1%}"] * (name == "zigzag, each document")
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
