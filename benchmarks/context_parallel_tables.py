"""Time the kernels on the segment tables of a rank of context parallelism, beside as many pairs of a dense sequence.

One GPU computes what one of several ranks would. Nothing is sent, so this is the bound that transfers and hosts leave.
"all keys" is one call with the keys of the whole stream, as after a gather. "ring" is one call for each rank's keys.
A line has the speed of both, and their ratio: 1 means that the table costs nothing. The inputs are the "full" ones of
attention.py, where nothing can be skipped. Packed documents are as short and as long as those of context_parallel.py.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from attention import draw_inputs, draw_lengths
from context_parallel import LONGEST, SHORTEST
from context_parallel_balance import Split, pieces_of
from table import table_main
from timing import DRY_RUN_FACTOR, FACTORS, on_gpu, take_turns

RANKS = (4, 8, 64)
HEADS, HEAD_DIM = 12, 128
MEAN = 2400  # tokens of a packed document


def table(rows: np.ndarray, keys: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """Return the segments of a call, (segments, 5) as in the block contract.

    Args:
        rows: position in the stream of each query row, increasing.
        keys: position of each key, increasing. A piece of rows is among the keys as a whole, or not at all.
        cu_seqlens: where documents begin, and the end of the stream.
    """
    document, begins = pieces_of(rows, cu_seqlens)
    segments = []
    for begin, end in pairwise([*begins, len(rows)]):
        first = rows[begin]
        oldest, older, seen = np.searchsorted(keys, (cu_seqlens[document[begin]], first, first + end - begin))
        if seen > oldest:
            segments.append((begin, end - begin, oldest, seen - oldest, (older if seen > older else seen) - oldest))
    return np.array(segments, dtype=np.int32).reshape(-1, 5)


def pairs_of(segments: np.ndarray) -> int:
    """Return how many pairs of a query and an older key a table has."""
    _, q_len, _, k_len, offset = segments.astype(np.int64).T
    # Row r sees the first `offset + r` keys, at most all of them.
    rising = np.minimum(q_len, k_len - offset)
    return int((rising * offset + rising * (rising - 1) // 2 + (q_len - rising) * k_len).sum())


class Blocks:
    """Calls of the block operators with tables, with inputs of their own.

    Args:
        tables: (segments, number of keys) of each call.
        num_rows: number of query rows.
    """

    def __init__(self, tables: list[tuple[np.ndarray, int]], num_rows: int) -> None:
        self.pairs = sum(pairs_of(segments) for segments, _ in tables)
        self._q, _, _, self._do = draw_inputs("full", 1, num_rows, HEADS, HEAD_DIM)
        _, self._k, self._v, _ = draw_inputs("full", 1, max(keys for _, keys in tables), HEADS, HEAD_DIM)
        self._calls = [(torch.from_numpy(segments).to(self._q.device), keys) for segments, keys in tables]
        self._options = {"scale": HEAD_DIM**-0.5}
        self._records = [records for _, _, *records in self.forward()]

    def forward(self) -> list[tuple[torch.Tensor, ...]]:
        """Call block_forward with every table."""
        forward = torch.ops.megatron_sb.block_forward
        return [
            forward(self._q, self._k[:, :keys], self._v[:, :keys], segments, **self._options)
            for segments, keys in self._calls
        ]

    def backward(self) -> None:
        """Call block_backward with every table."""
        for (segments, keys), records in zip(self._calls, self._records, strict=True):
            torch.ops.megatron_sb.block_backward(
                self._do, self._q, self._k[:, :keys], self._v[:, :keys], segments, *records, **self._options
            )


def dense(pairs: int) -> Blocks:
    """Return a causal sequence with about as many pairs."""
    length = max(1, round((2 * pairs) ** 0.5 / 128)) * 128
    return Blocks([(np.array([[0, length, 0, length, 0]], dtype=np.int32), length)], length)


def streams(ranks: int, rows_per_rank: int) -> Iterator[tuple[str, Split]]:
    """Yield the name of each stream, and how it is split."""
    length = ranks * rows_per_rank
    yield "one sequence, zigzag", Split.of(ranks, np.array([length]), "zigzag", "whole_stream")
    lengths = draw_lengths(length, max(1, length // MEAN), SHORTEST, LONGEST, seed=0)
    yield "packed, balanced", Split.of(ranks, np.array(lengths), "balanced", "per_document")


def measure(name: str, tables: list[tuple[np.ndarray, int]], num_rows: int, seconds: float) -> Iterator[dict]:
    """Measure the tables and a dense sequence in both directions: milliseconds and TFLOP/s."""
    of_rank = Blocks(tables, num_rows)
    contenders = {"rank": of_rank, "dense": dense(of_rank.pairs)}
    for direction in ("forward", "backward"):
        ms = take_turns({key: getattr(blocks, direction) for key, blocks in contenders.items()}, seconds=seconds)
        flops = 4 * HEADS * HEAD_DIM * FACTORS[direction]  # of a pair
        tflops = {key: flops * blocks.pairs / ms[key] / 1e9 for key, blocks in contenders.items()}
        yield {"case": name, "direction": direction, "calls": len(tables), "ms": ms, "tflops": tflops}


def rows(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the lines of every number of ranks."""
    rows_per_rank = options.rows_per_rank if on_gpu() else max(16, options.rows_per_rank // DRY_RUN_FACTOR)
    for ranks in options.ranks:
        for name, split in streams(ranks, rows_per_rank):
            offsets = split.cu_seqlens
            own = [np.sort(of_rank[of_rank < offsets[-1]]) for of_rank in split.rows]  # without the padding of a stream
            rank, stream = own[ranks // 2], np.arange(offsets[-1])
            about = f"{ranks} ranks, {name}"
            yield from measure(
                f"{about}, all keys", [(table(rank, stream, offsets), len(stream))], len(rank), options.seconds
            )
            ring = [(table(rank, keys, offsets), len(keys)) for keys in own]
            ring = [(segments, keys) for segments, keys in ring if len(segments)]
            yield from measure(f"{about}, ring", ring, len(rank), options.seconds)


def line(row: dict) -> str:
    """Format a row of the table."""
    rank, whole = row["tflops"]["rank"], row["tflops"]["dense"]
    cells = [row["case"], row["direction"], str(row["calls"]), f"{row['ms']['rank']:.2f}"]
    return f"| {' | '.join([*cells, f'{rank:.0f}', f'{whole:.0f}', f'{rank / whole:.2f}'])} |"


def main(args: list[str] | None = None) -> None:
    """Measure every case and print the table."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default: 4 8 64)")
        parser.add_argument(
            "--rows-per-rank", type=int, default=8192, help="rows of a rank; a multiple of 2 (default: %(default)s)"
        )

    heads = ["case", "direction", "calls", "ms", "TFLOP/s", "dense TFLOP/s", "ratio"]
    table_main(__doc__, args, heads, rows, line, add_arguments=add_arguments)


if __name__ == "__main__":
    sys.exit(main())
