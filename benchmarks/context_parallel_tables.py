"""Time the kernels on the segment tables of a rank of context parallelism, beside as many pairs of a dense sequence.

One GPU computes what one of several ranks would. Only the kernels of this library are timed: nothing is sent, copied or
cleared, so this is the bound that these leave. A line has the speed of both, and their ratio: 1 means that the table
costs nothing. The calls are those of the modes: "gather" is one call with the keys of the whole stream. "ring" is one
call for each chunk of keys, and the two chunks of a step are computed side by side. "needed keys" is one call for the
documents that only this rank has, and one for the others, with the keys that they need. The inputs are the "full" ones
of attention.py, where nothing can be skipped. Packed documents are as short and as long as those of
context_parallel.py.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from arguments import whole_number
from attention import draw_inputs, draw_lengths
from context_parallel import LONGEST, SHORTEST
from context_parallel_balance import Split, needed_keys, pieces_of
from table import table_main
from timing import DRY_RUN_FACTOR, FACTORS, on_gpu, take_turns

RANKS = (4, 8, 64)
HEADS, HEAD_DIM = 12, 128
MEAN = 2400  # tokens of a packed document
LEAST_ROWS = 128  # of a rank: a document fits, also with one rank
LEAST_ROUNDS, MOST_ROUNDS = 3, 20  # of each contender, by turns


@dataclass(frozen=True)
class Block:
    """A call of the block operators: its segments, (segments, 5) as in the block contract, and its numbers of rows."""

    segments: np.ndarray
    num_queries: int
    num_keys: int

    @classmethod
    def of(cls, rows: np.ndarray, keys: np.ndarray, cu_seqlens: np.ndarray) -> "Block":
        """Pair query rows with the keys that they see.

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
                visible = (older if seen > older else seen) - oldest
                segments.append((begin, end - begin, oldest, seen - oldest, visible))
        return cls(np.array(segments, dtype=np.int32).reshape(-1, 5), len(rows), len(keys))

    @property
    def pairs(self) -> int:
        """How many pairs of a query and an older key there are."""
        _, q_len, _, k_len, offset = self.segments.astype(np.int64).T
        # Row r sees the first `offset + r` keys, at most all of them.
        rising = np.minimum(q_len, k_len - offset)
        return int((rising * offset + rising * (rising - 1) // 2 + (q_len - rising) * k_len).sum())


def side_by_side(calls: list[Callable[[], object]]) -> None:
    """Make one or two calls. On a GPU, the second one has a stream of its own, as in csrc/ops/side_stream.h."""
    if len(calls) == 1 or not on_gpu():
        for call in calls:
            call()
        return
    first, second = calls
    main, side = torch.cuda.current_stream(), side_stream()
    begin = main.record_event()
    first()
    side.wait_event(begin)
    with torch.cuda.stream(side):
        second()
    main.wait_stream(side)


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """Return the stream of second calls."""
    return torch.cuda.Stream()


class Blocks:
    """Steps of one or two calls of the block operators, with inputs of their own."""

    def __init__(self, steps: list[list[Block]]) -> None:
        blocks = [block for step in steps for block in step]
        self.num_calls = len(blocks)
        self.pairs = sum(block.pairs for block in blocks)
        self._q, _, _, self._do = draw_inputs("full", 1, max(b.num_queries for b in blocks), HEADS, HEAD_DIM)
        _, self._k, self._v, _ = draw_inputs("full", 1, max(b.num_keys for b in blocks), HEADS, HEAD_DIM)
        device = self._q.device
        self._steps = [[(torch.from_numpy(b.segments).to(device), b.num_queries, b.num_keys) for b in s] for s in steps]
        self._records = [[self._forward(*call)[2:] for call in step] for step in self._steps]

    def _forward(self, segments: torch.Tensor, rows: int, keys: int) -> tuple[torch.Tensor, ...]:
        """Call block_forward."""
        inputs = (self._q[:, :rows], self._k[:, :keys], self._v[:, :keys])
        return torch.ops.megatron_sb.block_forward(*inputs, segments, scale=HEAD_DIM**-0.5)

    def _backward(self, call: tuple[torch.Tensor, int, int], records: tuple[torch.Tensor, ...]) -> None:
        """Call block_backward with the records of the forward."""
        segments, rows, keys = call
        inputs = (self._do[:, :rows], self._q[:, :rows], self._k[:, :keys], self._v[:, :keys])
        torch.ops.megatron_sb.block_backward(*inputs, segments, *records, scale=HEAD_DIM**-0.5)

    def forward(self) -> None:
        """Call block_forward for every block."""
        for step in self._steps:
            side_by_side([functools.partial(self._forward, *call) for call in step])

    def backward(self) -> None:
        """Call block_backward for every block."""
        for step, records in zip(self._steps, self._records, strict=True):
            side_by_side([functools.partial(self._backward, *each) for each in zip(step, records, strict=True)])


def kernel_ms(call: Callable[[], object]) -> float:
    """Return the milliseconds in which kernels of this library run during a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    times = [event.time_range for event in profile.events() if "megatron_sb" in event.name]
    total, end = 0.0, 0.0
    for time in sorted(times, key=lambda time: time.start):  # some overlap
        total += max(time.end, end) - max(time.start, end)
        end = max(time.end, end)
    return total / 1e3


def median_ms(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median time of the kernels of each call, or of the whole call without a GPU."""
    if not on_gpu():
        return take_turns(calls, seconds=seconds)
    first = {name: (call(), kernel_ms(call))[1] for name, call in calls.items()}
    number = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds * 1e3 / sum(first.values()))))
    rounds = [{name: kernel_ms(call) for name, call in calls.items()} for _ in range(number)]
    return {name: statistics.median(times[name] for times in rounds) for name in calls}


def dense(pairs: int) -> Blocks:
    """Return a causal sequence with about as many pairs."""
    length = max(1, round((2 * pairs) ** 0.5 / 128)) * 128
    return Blocks([[Block(np.array([[0, length, 0, length, 0]], dtype=np.int32), length, length)]])


def sequence_steps(ranks: int, rank: int, rows_per_rank: int) -> Iterator[tuple[str, list[list[Block]]]]:
    """Yield the calls of a rank for one sequence in zigzag, by steps."""
    length = ranks * rows_per_rank
    split = Split.of(ranks, np.array([length]), "zigzag", "whole_stream")
    rows, stream = np.sort(split.rows[rank]), np.arange(length)
    yield "one sequence, zigzag, gather", [[Block.of(rows, stream, split.cu_seqlens)]]
    chunks, ring = np.split(stream, 2 * ranks), []
    for step in range(ranks):  # csrc/plan/schedule.h
        low, high = (rank - step) % ranks, 2 * ranks - 1 - (rank + step) % ranks
        seen = [(rows[rows >= chunks[chunk][0]], chunks[chunk]) for chunk in (low, high)]
        ring.append([Block.of(seeing, keys, split.cu_seqlens) for seeing, keys in seen if len(seeing)])
    yield "one sequence, zigzag, ring", ring


def packed_steps(ranks: int, rank: int, rows_per_rank: int) -> tuple[str, list[list[Block]]]:
    """Return the calls of a rank for packed documents in the layout balanced, by steps."""
    length = ranks * rows_per_rank
    lengths = draw_lengths(length, max(1, length // MEAN), SHORTEST, LONGEST, seed=0)
    split = Split.of(ranks, np.array(lengths), "balanced", "per_document")
    offsets = split.cu_seqlens
    rows = np.sort(split.rows[rank])
    rows = rows[rows < offsets[-1]]
    document = np.searchsorted(offsets, rows, side="right") - 1
    rows_of = np.bincount(document, minlength=len(lengths))
    is_own = (rows_of == np.diff(offsets))[document]
    blocks = [Block.of(rows[is_own], rows[is_own], offsets)] if is_own.any() else []
    shared = rows[~is_own]
    if len(shared):
        needed = [np.arange(begin, end) for begin, end in zip(*needed_keys(shared, offsets), strict=True)]
        blocks.append(Block.of(shared, np.concatenate(needed), offsets))
    return "packed, balanced, needed keys", [[block] for block in blocks]


def measure(name: str, steps: list[list[Block]], seconds: float) -> Iterator[dict]:
    """Measure the calls and a dense sequence in both directions: milliseconds and TFLOP/s."""
    of_rank = Blocks(steps)
    contenders = {"rank": of_rank, "dense": dense(of_rank.pairs)}
    for direction in ("forward", "backward"):
        ms = median_ms({key: getattr(contender, direction) for key, contender in contenders.items()}, seconds)
        flops = 4 * HEADS * HEAD_DIM * FACTORS[direction]  # of a pair
        tflops = {key: flops * contender.pairs / ms[key] / 1e9 for key, contender in contenders.items()}
        yield {"case": name, "direction": direction, "calls": of_rank.num_calls, "ms": ms, "tflops": tflops}


def rows(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the lines of every number of ranks."""
    rows_per_rank = (
        options.rows_per_rank if on_gpu() else max(LEAST_ROWS, options.rows_per_rank // DRY_RUN_FACTOR // 2 * 2)
    )
    for ranks in options.ranks:
        middle = ranks // 2, rows_per_rank
        for name, steps in (*sequence_steps(ranks, *middle), packed_steps(ranks, *middle)):
            yield from measure(f"{ranks} ranks, {name}", steps, options.seconds)


def line(row: dict) -> str:
    """Format a row of the table."""
    rank, whole = row["tflops"]["rank"], row["tflops"]["dense"]
    cells = [row["case"], row["direction"], str(row["calls"]), f"{row['ms']['rank']:.2f}"]
    return f"| {' | '.join([*cells, f'{rank:.0f}', f'{whole:.0f}', f'{rank / whole:.2f}'])} |"


def main(args: list[str] | None = None) -> None:
    """Measure every case and print the table."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--ranks", type=whole_number(1), nargs="+", default=RANKS, help="numbers of ranks (default: 4 8 64)"
        )
        parser.add_argument(
            "--rows-per-rank",
            type=whole_number(LEAST_ROWS, multiple=2),
            default=8192,
            help="rows of a rank; a multiple of 2 (default: %(default)s)",
        )

    heads = ["case", "direction", "calls", "ms", "TFLOP/s", "dense TFLOP/s", "ratio"]
    table_main(__doc__, args, heads, rows, line, add_arguments=add_arguments)


if __name__ == "__main__":
    sys.exit(main())
