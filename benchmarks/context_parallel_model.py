"""A model of the context-parallel schedules: what a call takes, from the speed of a block, of memory and of the links.

Kernels are laid onto the multiprocessors as the Hopper kernels lay out their work; passes over memory and transfers
follow from each other as csrc/distributed posts and awaits them. Used to predict more ranks than there are at hand:
what it prints is predicted, not measured. bf16, head_dim 128, nothing skipped, all ranks start together.

Beside the medians on 2 and on 4 GPUs of 2026-11-22 no dense row is off by more than 9%. Furthest: p2p of 16K rows on 2,
forward and backward, took 9% longer than predicted; all_gather and a2a of 16K rows on 4 up to 7% less, as did
all_gather's forward and backward of 64K. Back to back it is within 8% from 64K rows on; with 16K it says up to 14% too
few TFLOP/s: there power hardly held several GPUs back, and the model takes it that it did.

python benchmarks/context_parallel_model.py compare benchmarks/results/2026-11-22-4xh200-context-parallel.json
python benchmarks/context_parallel_model.py compare benchmarks/results/2026-11-22-2xh200-context-parallel.json
python benchmarks/context_parallel_model.py table
"""

import argparse
import functools
import heapq
import json
import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

MODES = ("p2p", "all_gather", "a2a")
FLOPS = {"forward": 1.0, "backward": 2.5}  # of a forward's
HOST = {"forward": 1.0, "backward": 3.2}  # what the host takes for a step of p2p, of what it takes in the forward
CALLS = {"forward": ("forward",), "both": ("forward", "backward")}
HEAD_GROUPS, ROWS_TO_SPLIT = 4, 32768  # csrc/distributed/rank_plan.h
TILE, STEP_ROWS = 128, 64  # of the Hopper kernels: rows of a tile of queries or keys; query rows of a backward's step


@dataclass(frozen=True)
class Machine:
    """One GPU and its links; times in microseconds. The defaults are an H200's, on NVLink.

    One set for all modes, sizes, directions and numbers of GPUs. Tiles, steps and work items come from calls on one
    GPU, launches, memory, links and what transfers take from kernels beside them from the kernels of a timeline on 4;
    then all were fitted together, near those, to the medians on 2 and 4 GPUs of 2026-11-22, and rounded. link_hop is
    assumed.
    """

    multiprocessors: int = 132
    forward_tile: float = 1.75  # 128 x 128 pairs of head_dim 128 on one multiprocessor, at the power limit
    backward_step: float = 3.07  # 64 x 128 pairs
    work_item: float = 3.5  # between two work items of a multiprocessor
    forward_launch: float = 8.0  # a block's kernel and its preparation
    backward_launch: float = 60.0  # ... and its planning, and what its chains of tiles take to get going
    kernel: float = 2.5  # any other kernel, however small
    memory_tbytes: float = 2.6  # a second, read and written by those kernels
    link_gbytes: float = 290.0  # a second, that a rank sends and receives
    link_latency: float = 30.0
    link_hop: float = 1.0  # more latency for each further rank of a collective
    link_multiprocessors: int = 12  # that a collective takes from kernels beside it
    ring_multiprocessors: int = 20  # ... and a transfer of p2p, between neighbours
    rest_credit: float = 550.0  # what a rest before a call saves it: power allows more until then. 0: back to back
    highest_clock: float = 0.87  # least part of the time of tiles, steps and work items that this can leave
    host_step: float = 0.0  # that the host takes to queue a step of a p2p forward. 0: keeps ahead, or a graph

    def at_highest_clock(self) -> "Machine":
        """The same while power does not hold it back, which transfers and memory do not notice."""
        clocked = ("forward_tile", "backward_step", "work_item")
        return replace(self, **{name: self.highest_clock * getattr(self, name) for name in clocked})


# Back to back, as in the tables: no rest. On 4 GPUs p2p of 16K rows took 3.47 ms so, and the host needed 3.49 to queue
# it; of that the forward, of 4 steps, is taken to be the 0.83 ms that it took alone.
BACK_TO_BACK = Machine(rest_credit=0.0, host_step=205.0)

# The kernels around the blocks, of the code measured on 2026-11-22: how many, and how often they read or write bytes of
#   q    this rank's queries, or as much: outputs and their gradients, 16 bits a number
#   kv   this rank's keys and values, 16 bits; with a2a repeated where there are fewer heads than ranks
#   all  the keys and values of all ranks, 16 bits
# so that a tensor in fp32 counts twice. Stages:
#   start, end     once, before the first transfer and after the last
#   come           for each group of heads of all_gather, of its share: before its transfer to the blocks
#   before, after  ... the blocks of the group
#   home           ... once it is back
#   sort           a2a, fewer than ROWS_TO_SPLIT rows: before the block; "sort back" after it
#   own            a2a, from there on, rows being sent to their places: with "come" and "after", but only of the part
#                  that stays on this rank
#   block          for each block of p2p, of its lane's half
#   again          p2p: a block's output is added to its run's, by its share of the rows; gradients to those that came
PASSES = {  # kernels, q, kv, all
    ("p2p", "forward", "start"): (2, 0, 2, 0),  # keys beside values
    ("p2p", "forward", "again"): (1, 6, 0, 0),
    ("p2p", "forward", "end"): (18, 18, 0, 0),  # runs are joined; what the backward keeps
    ("p2p", "backward", "start"): (11, 9, 2, 0),  # zeros for dq; dO . (output of older keys) for two runs
    ("p2p", "backward", "block"): (1, 0, 2, 0),  # zeros for dk and dv
    ("p2p", "backward", "again"): (1, 0, 6, 0),
    ("p2p", "backward", "end"): (5, 3, 7, 0),  # lanes into one tensor; 16 bits
    ("all_gather", "forward", "come"): (1, 0, 2, 0),  # keys beside values
    ("all_gather", "forward", "before"): (1, 0, 0, 2),  # rows into the stream's order
    ("all_gather", "forward", "end"): (2, 2, 0, 0),  # groups side by side
    ("all_gather", "backward", "start"): (2, 2, 0, 0),  # zeros for dq
    ("all_gather", "backward", "come"): (1, 0, 2, 0),
    ("all_gather", "backward", "before"): (2, 0, 0, 4),  # rows into order; zeros for dk and dv
    ("all_gather", "backward", "after"): (1, 0, 0, 4),  # rows back
    ("all_gather", "backward", "end"): (4, 3, 7, 0),  # groups side by side; 16 bits
    ("a2a", "forward", "come"): (1, 2, 2, 0),  # heads by rank
    ("a2a", "forward", "sort"): (1, 2, 2, 0),  # rows into the stream's order
    ("a2a", "forward", "sort back"): (1, 2, 0, 0),
    ("a2a", "forward", "own"): (2, 2, 2, 0),  # two chunks to their places
    ("a2a", "forward", "own back"): (2, 2, 0, 0),
    ("a2a", "forward", "home"): (1, 2, 0, 0),  # heads into their places
    ("a2a", "backward", "come"): (1, 2, 0, 0),
    ("a2a", "backward", "sort"): (1, 2, 0, 0),
    ("a2a", "backward", "before"): (1, 0, 0, 0),  # zeros for the prefix
    ("a2a", "backward", "after"): (1, 2, 2, 0),  # gradients side by side
    ("a2a", "backward", "sort back"): (1, 2, 2, 0),
    ("a2a", "backward", "own"): (2, 2, 0, 0),
    ("a2a", "backward", "own back"): (2, 2, 2, 0),
    ("a2a", "backward", "home"): (3, 2, 2, 0),
}


@dataclass(frozen=True)
class Shape:
    """One sequence of bf16."""

    length: int
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 128

    def forward_flops(self) -> float:
        """By the causal model count; forward and backward take 3.5 times as many."""
        return 2 * self.heads * self.length**2 * self.head_dim


# ---- kernels

Segment = tuple[int, int, bool]  # rows, older, causal: queries that see `older` keys, and those up to their own place


@functools.lru_cache(maxsize=4096)
def forward_block(machine: Machine, segments: tuple[Segment, ...], heads: int) -> float:
    """A block's forward: tiles of queries, those with the most keys first, each to the multiprocessor that is free."""
    keys = [
        math.ceil(older / TILE) + (i + 1 if causal else 0)
        for rows, older, causal in segments
        for i in range(math.ceil(rows / TILE))
    ]
    free = [0.0] * machine.multiprocessors
    for tiles in sorted(keys, reverse=True):
        for _ in range(heads):
            heapq.heapreplace(free, free[0] + machine.work_item + tiles * machine.forward_tile)
    return machine.forward_launch + max(free)


@functools.lru_cache(maxsize=4096)
def backward_block(machine: Machine, segments: tuple[Segment, ...], num_keys: int, kv_heads: int, shared: int) -> float:
    """A block's backward: tiles of keys, oldest first; each runs a step behind the next older one of its head."""
    free = [0.0] * machine.multiprocessors
    started = [-math.inf] * kv_heads
    for key in range(0, num_keys, TILE):
        seen = sum(max(0, rows - max(0, key - older)) if causal else rows for rows, older, causal in segments)
        steps = math.ceil(seen / STEP_ROWS) * shared
        if not steps:
            break
        for head in range(kv_heads):
            started[head] = max(free[0] + machine.work_item, started[head] + machine.backward_step)
            heapq.heapreplace(free, started[head] + steps * machine.backward_step)
    return machine.backward_launch + max(free)


def ring_segments(chunk: int) -> tuple[tuple[Segment, ...], ...]:
    """Blocks of a chunk of keys with a rank's two chunks of queries, by kind: none; all keys older than one of the two;
    as old as one; ... and older than the other; older than both."""
    square, own = (chunk, chunk, False), (chunk, 0, True)
    return (), (square,), (own,), (own, square), (square, square)


def ring_kinds(ranks: int, direction: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each rank: the kinds of its blocks with the low and with the high chunk of keys that it has at a step."""
    own = np.arange(ranks)
    moved = step if direction == "forward" else -(step + 1)  # csrc/plan/schedule.h
    low, high = (own - moved) % ranks, (own + moved) % ranks  # whose
    return np.choose(np.sign(low - own) + 1, [4, 3, 1]), np.choose(np.sign(high - own) + 1, [0, 2, 1])


class Model:
    """Microseconds of a forward or a backward on `ranks` GPUs, zigzag."""

    def __init__(self, machine: Machine, shape: Shape, ranks: int) -> None:
        self.machine, self.shape, self.ranks = machine, shape, ranks
        self.chunk = max(1, round(shape.length / (2 * ranks)))
        head = 2 * shape.head_dim * shape.length / ranks
        self.bytes = {"q": head * shape.heads, "kv": 2 * head * shape.kv_heads}
        self.bytes["all"] = ranks * self.bytes["kv"]

    def possible(self, mode: str) -> bool:
        """Whether a mode can have so many ranks: a2a gives each of them some of the heads."""
        n, kv_heads = self.ranks, self.shape.kv_heads
        return mode != "a2a" or (self.shape.heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0))

    def time(self, mode: str, *directions: str) -> float:
        """Microseconds that a call takes which goes in one or both directions, after a rest."""
        time = self._steady(mode, directions)
        if self.machine.rest_credit:
            fastest = Model(self.machine.at_highest_clock(), self.shape, self.ranks)
            time = max(fastest._steady(mode, directions), time - self.machine.rest_credit)
        host = sum(HOST[direction] for direction in directions) * self.ranks * self.machine.host_step
        return max(time, host) if mode == "p2p" else time

    def _steady(self, mode: str, directions: tuple[str, ...]) -> float:
        """... at one clock."""
        schedule = {"p2p": self._ring, "all_gather": self._gather, "a2a": self._exchange}.get(mode)
        schedule = self._alone if self.ranks == 1 else schedule
        return sum(schedule(direction) for direction in directions)

    def tflops(self, mode: str, *directions: str) -> float:
        """Per GPU, by the causal model count."""
        flops = sum(FLOPS[d] for d in directions) * self.shape.forward_flops()
        return flops / self.ranks / self.time(mode, *directions) / 1e6

    def gather_bytes(self, direction: str) -> float:
        """Most that all_gather holds of the stream: groups of keys and values as they came and in order and the next
        ones; in the backward also gradients in fp32, in order and as they go."""
        return self.bytes["all"] / self._groups(self.shape.kv_heads) * (3 if direction == "forward" else 7)

    # ---- what takes time

    def _alone(self, direction: str) -> float:
        return self._block(direction, ((self.shape.length, 0, True),), self.shape.length)

    def _block(self, direction: str, segments: tuple[Segment, ...], num_keys: int, share: float = 1.0) -> float:
        """A block call with a share of the heads."""
        kv_heads = max(1, round(self.shape.kv_heads * share))
        heads = max(1, round(self.shape.heads * share))
        if direction == "forward":
            return forward_block(self.machine, segments, heads)
        return backward_block(self.machine, segments, num_keys, kv_heads, heads // kv_heads)

    def _passes(self, mode: str, direction: str, stage: str, share: float = 1.0) -> float:
        kernels, *times = PASSES.get((mode, direction, stage), (0, 0, 0, 0))
        moved = sum(n * self.bytes[tensor] for n, tensor in zip(times, ("q", "kv", "all"), strict=True))
        return kernels * self.machine.kernel + share * moved / self.machine.memory_tbytes / 1e6

    def _transfer(self, num_bytes: float, peers: int = 1) -> float:
        m = self.machine
        return m.link_latency + m.link_hop * (peers - 1) + num_bytes / m.link_gbytes / 1e3

    def _beside(self, kernel, transfer, taken: int):
        """A kernel that shares the multiprocessors with a transfer, which takes some of them, while both last."""
        return kernel + np.minimum(kernel, transfer) * taken / (self.machine.multiprocessors - taken)

    # ---- p2p

    def _ring(self, direction: str) -> float:
        keys, gradients = self._transfer(self.bytes["kv"]), self._transfer(2 * self.bytes["kv"])

        def cost(stage: str, share=1.0):
            return self._passes("p2p", direction, stage, share)

        def together(posted: np.ndarray) -> np.ndarray:
            return np.maximum(posted, np.maximum(np.roll(posted, 1), np.roll(posted, -1)))

        clock = np.full(self.ranks, cost("start"))
        ready = link = given = clock
        if direction == "backward":
            ready = link = together(clock) + keys
        kinds = [self._block(direction, kind, self.chunk) if kind else 0.0 for kind in ring_segments(self.chunk)]
        own = np.arange(self.ranks)
        for step in range(self.ranks):
            clock = np.maximum(clock, ready)
            low, high = ring_kinds(self.ranks, direction, step)
            lows, highs, blocks = np.choose(low, kinds), np.choose(high, kinds), 1 + (high > 0)
            beside = np.maximum(link - clock, 0.0)
            if step + 1 < self.ranks:
                # A transfer that finds another one under way finds no multiprocessor either until a kernel ends.
                posted = np.where(link > clock, np.maximum(link, clock + lows), clock)
                ready = link = together(posted) + keys
                beside = beside + ready - posted
            clock = (
                clock
                + self._beside(lows + highs, beside, self.machine.ring_multiprocessors)
                + blocks * cost("block", 0.5)
            )
            if direction == "forward":
                rows = np.where(low == 4, 1.0, 0.5 * (step > own + 1) * (low == 1)) + 0.5 * (high == 1)
                clock = clock + np.where(rows > 0, cost("again", rows), 0.0)
                continue
            if step:
                clock = np.maximum(clock, given) + blocks * cost("again", 0.5)
            if step + 1 < self.ranks:
                given = link = together(np.maximum(link, clock)) + gradients
        return float(clock.max()) + cost("end")

    # ---- all_gather and a2a

    def _groups(self, kv_heads: int) -> int:
        """Into how many groups of one size these heads are cut."""
        few = self.shape.length < ROWS_TO_SPLIT
        return 1 if few else max(groups for groups in range(1, HEAD_GROUPS + 1) if kv_heads % groups == 0)

    def _gather(self, direction: str) -> float:
        """Groups of heads: each comes under the block of the one before and goes under that of the one after."""
        n, c = self.ranks, self.chunk
        groups = self._groups(self.shape.kv_heads)
        segments = [((c, r * c, True), (c, (2 * n - 1 - r) * c, True)) for r in (0, n // 2, n - 1)]
        block = max(self._block(direction, some, 2 * n * c, 1 / groups) for some in segments)
        others = (n - 1) * self.bytes["kv"] / groups
        come, go = self._transfer(others, n - 1), self._transfer(2 * others, n - 1) if direction == "backward" else 0.0
        cost = functools.partial(self._passes, "all_gather", direction, share=1 / groups)
        clock = self._passes("all_gather", direction, "start") + cost("come")
        arrived = link = clock + come
        for group in range(groups):
            more = group + 1 < groups
            clock = max(clock, arrived) + cost("before") + (cost("come") if more else 0.0)
            beside, at_once = max(0.0, link - clock), link <= clock
            if more and at_once:
                link, beside = clock + come, come
            clock += self._beside(block, beside, self.machine.link_multiprocessors)
            if more and not at_once:
                link = max(link, clock) + come
            arrived = link
            clock += cost("after")
            link = max(link, clock) + go
        clock += (groups - 1) * cost("home")
        return max(clock, link if go else 0.0) + cost("home") + self._passes("all_gather", direction, "end")

    def _exchange(self, direction: str, repeated: bool = False) -> float:
        n, shape, kv = self.ranks, self.shape, self.bytes["kv"]
        if shape.kv_heads < n:  # each rank gets a copy of a head that several want
            return Model(self.machine, replace(shape, kv_heads=n), n)._exchange(direction, repeated=True)
        if direction == "forward":
            come, go = self.bytes["q"] + kv, self.bytes["q"]
        else:  # gradients of repeated heads are summed, so they go in fp32
            come, go = self.bytes["q"], self.bytes["q"] + kv * (2 if repeated else 1)
        placed = shape.length >= ROWS_TO_SPLIT
        stages = {"start": 1, "come": 1, "before": 1, "after": 1, "home": 1, "end": 1}
        stages |= {"own": 1 / n, "own back": 1 / n} if placed else {"sort": 1, "sort back": 1}
        passes = sum(self._passes("a2a", direction, stage, part) for stage, part in stages.items())
        block = self._block(direction, ((shape.length, 0, True),), shape.length, 1 / n)
        return passes + block + sum(self._transfer((n - 1) / n * some, n - 1) for some in (come, go))


# ---- commands

LENGTHS, RANKS = [2**16, 2**18, 2**20, 2**22], [8, 16, 32, 64, 128, 256, 512]
LINKS = {"NVLink": Machine.link_gbytes, "slower links": 50.0}
SHAPE, MOST_GATHERED = Shape(0, heads=32, kv_heads=8), 20e9  # bytes


def measured_rows(path: Path) -> list[tuple[Shape, int, dict]]:
    """The dense rows of context_parallel.py's JSON: shape, ranks, row."""
    found = []
    for row in json.loads(path.read_text())["rows"]:
        sizes = re.fullmatch(r"L=(\d+) h=(\d+)(?::(\d+))? d=(\d+)", row["what"])
        if not sizes or "error" in row or row["name"] not in (*MODES, "one GPU"):
            continue
        length, heads, kv_heads, head_dim = (int(n or 0) for n in sizes.groups())
        shape = Shape(length, heads, kv_heads or heads, head_dim)
        found.append((shape, round(shape.forward_flops() / row["forward"]["ms"] / row["forward"]["tflops"] / 1e9), row))
    return found


def compare(path: Path, within: float) -> bool:
    """Print what is predicted beside what was measured; whether there are dense rows and none is off by more."""
    rows = measured_rows(path)
    good = bool(rows)
    print("| | | GPUs | forward ms | measured | ratio | forward and backward ms | measured | ratio | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for shape, ranks, row in rows:
        cells, off = [], False
        for call, directions in CALLS.items():
            predicted = Model(Machine(), shape, ranks).time(row["name"], *directions) / 1e3
            measured = row[call]["ms"]
            off |= abs(predicted / measured - 1) > within
            cells += [f"{predicted:.3f}", f"{measured:.3f}", f"{predicted / measured:.2f}"]
        good &= not off
        print(f"| {row['what']} | {row['name']} | {ranks} | {' | '.join(cells)} | {'off' if off else ''} |")
    return good


def best(shape: Shape, ranks: int, link_gbytes: float, call: str) -> str:
    """The fastest mode that can be had, and its TFLOP/s per GPU."""
    model = Model(replace(BACK_TO_BACK, link_gbytes=link_gbytes), shape, ranks)
    rates = {mode: model.tflops(mode, *CALLS[call]) for mode in MODES if model.possible(mode)}
    if max(model.gather_bytes(direction) for direction in CALLS[call]) > MOST_GATHERED:
        del rates["all_gather"]
    mode = max(rates, key=rates.get)
    return f"{rates[mode]:.0f} {mode}"


def tables() -> None:
    """Print the predicted tables, by length and ranks, and what is left out of them."""
    for link, gbytes in LINKS.items():
        for call, directions in CALLS.items():
            title = f"{' and '.join(directions)}, {link} of {gbytes:.0f} GB/s a GPU and direction"
            print(f"**Predicted**, {title}: TFLOP/s per GPU and the best mode\n")
            print(f"| tokens | {' | '.join(f'{n} GPUs' for n in RANKS)} |\n| ---: |{' ---: |' * len(RANKS)}")
            for length in LENGTHS:
                cells = [best(replace(SHAPE, length=length), n, gbytes, call) for n in RANKS]
                print(f"| {length // 1024}K | {' | '.join(cells)} |")
            print()
    print(f"{SHAPE.heads}:{SHAPE.kv_heads} heads of {SHAPE.head_dim}, bf16, calls back to back, nothing skipped.\n")
    without = [str(n) for n in RANKS if not Model(Machine(), SHAPE, n).possible("a2a")]
    print(f"- a2a: not with {', '.join(without)} GPUs, which do not divide the heads.")
    print(f"- all_gather: left out where it would hold more than {MOST_GATHERED / 1e9:.0f} GB of the stream. It holds")
    for length in LENGTHS:
        model = Model(Machine(), replace(SHAPE, length=length), RANKS[0])
        held = [f"{model.gather_bytes(direction) / 1e9:.1f} GB ({direction})" for direction in FLOPS]
        print(f"  {' and '.join(held)} at {length // 1024}K;")


def main() -> None:
    """Print predicted beside measured, or the predicted tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="Markdown tables of more ranks than were measured")
    beside = commands.add_parser("compare", help="predicted beside measured; fails where a row is too far off")
    beside.add_argument("measured", type=Path, help="JSON of context_parallel.py")
    beside.add_argument("--within", type=float, default=10.0, help="percent that a row may be off")
    options = parser.parse_args()
    if options.command == "table":
        tables()
    elif not compare(options.measured, options.within / 100):
        sys.exit(1)


if __name__ == "__main__":
    main()
