"""Predict the time of the context-parallel modes from the speed of a block, of memory and of the links.

The model places kernels on the multiprocessors as the Hopper kernels place their work. Memory passes and transfers
follow each other in the order in which csrc/distributed posts and awaits them. The model predicts more ranks than were
measured. It assumes bf16, head_dim 128, nothing skipped, and ranks that start together.
benchmarks/context_parallel_model.py compares it with records, and lists its largest errors.
"""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

MODES = ("p2p", "all_gather", "a2a")
FLOPS = {"forward": 1.0, "backward": 2.5}  # operations, as multiples of the forward's
HOST = {"forward": 1.0, "backward": 3.0}  # host time of a step of p2p, as multiples of the forward's
CALLS = {"forward": ("forward",), "both": ("forward", "backward")}
HEAD_GROUPS, ROWS_TO_SPLIT = 4, 32768  # csrc/distributed/rank_plan.h
TILE, STEP_ROWS = 128, 64  # of the Hopper kernels: rows of a tile of queries or keys; query rows of a backward step


@dataclass(frozen=True)
class Machine:
    """One GPU and its links; times in microseconds. The defaults describe an H200 with NVLink.

    One set of constants serves all modes, sizes, directions and numbers of GPUs. The first estimates of tiles, steps
    and work items come from calls on one GPU. Those of launches, memory, links and multiprocessors of transfers come
    from a timeline of 4 GPUs. Then all were fitted together to the medians on 2 and 4 GPUs of 2026-11-22, starting from
    these estimates, and rounded. Those of tiles, steps, launches and the rest were fitted again to the medians of
    2026-11-28. link_hop is assumed.
    """

    multiprocessors: int = 132
    forward_tile: float = 1.73  # 128 x 128 pairs of head_dim 128 on one multiprocessor, at the power limit
    backward_step: float = 2.85  # 64 x 128 pairs
    work_item: float = 3.5  # between two work items of a multiprocessor
    forward_launch: float = 16.0  # a block's kernel and its preparation
    backward_launch: float = 65.0  # the same for a backward, with its planning and the start of its chains of tiles
    kernel: float = 2.5  # smallest time of any other kernel
    memory_tbytes: float = 2.6  # TB/s that other kernels read and write
    link_gbytes: float = 290.0  # GB/s that a rank sends, and receives at the same time
    link_latency: float = 30.0
    link_hop: float = 1.0  # latency for each further rank of a collective
    link_multiprocessors: int = 12  # multiprocessors that a collective takes from a kernel that runs under it
    ring_multiprocessors: int = 20  # the same for a transfer of p2p between neighbours
    rest_credit: float = 560.0  # time saved by a rest before a call, because power then allows more. 0: back to back
    highest_clock: float = 0.87  # lower bound: the rest leaves at least this part of tiles, steps and work items
    host_step: float = 0.0  # host time to queue a step of a p2p forward. 0: the host is ahead, or a CUDA graph is used

    def at_highest_clock(self) -> Machine:
        """Return the machine at its highest clock, which does not change transfers and memory."""
        clocked = ("forward_tile", "backward_step", "work_item")
        return replace(self, **{name: self.highest_clock * getattr(self, name) for name in clocked})


# The tables assume calls back to back, without a rest. The host limited p2p of 16K rows on 4 GPUs (2026-11-28): back to
# back, a forward of 4 steps took 1.16 ms, forward and backward 4.57 ms.
BACK_TO_BACK = Machine(rest_credit=0.0, host_step=280.0)

# The kernels around the blocks, in the code of 2026-11-29: those measured on 2026-11-22, less what p2p and the backward
# of all_gather no longer do. Each entry has the number of kernels, and how often they read or write the bytes of three
# 16-bit tensors. An fp32 tensor counts twice.
#   q    this rank's queries, or a tensor of their size: outputs and their gradients
#   kv   this rank's keys and values; in a2a repeated if there are fewer KV heads than ranks
#   all  the keys and values of all ranks
# Stages:
#   start, end        once: before the first transfer, after the last
#   send              before a transfer of inputs to the blocks. all_gather: for each group of heads, of its share
#   before, after     before and after the blocks. all_gather: for each group of heads, of its share
#   receive           after the transfer of results. all_gather: for each group of heads, of its share
#   sort, sort back   a2a below ROWS_TO_SPLIT rows: before and after the block
#   own, own back     a2a from ROWS_TO_SPLIT rows on, where ranks send rows to their places: with "send" and "after",
#                     for the part that stays on this rank
#   add               p2p: a block's output is added to the output of its run, by its share of the rows; gradients of
#                     keys are added to those that arrived
PASSES = {  # kernels, q, kv, all
    ("p2p", "forward", "start"): (2, 0, 2, 0),  # keys and values into one tensor
    ("p2p", "forward", "add"): (0, 2, 0, 0),  # read by the block's own kernel
    ("p2p", "forward", "end"): (1, 7, 0, 0),  # fold the runs; keep tensors for the backward
    ("p2p", "backward", "start"): (11, 9, 2, 0),  # zeros for dq; dO . (output of older keys) for two runs
    ("p2p", "backward", "add"): (1, 0, 6, 0),
    ("p2p", "backward", "end"): (5, 3, 7, 0),  # lanes into one tensor; convert to 16 bits
    ("all_gather", "forward", "send"): (1, 0, 2, 0),  # keys and values into one tensor
    ("all_gather", "forward", "before"): (1, 0, 0, 2),  # rows into the order of the stream
    ("all_gather", "forward", "end"): (2, 2, 0, 0),  # groups of heads into one tensor
    ("all_gather", "backward", "send"): (1, 0, 2, 0),
    ("all_gather", "backward", "before"): (1, 0, 0, 2),  # rows into the order of the stream
    ("all_gather", "backward", "after"): (1, 0, 0, 4),  # rows into the order of the ranks
    ("all_gather", "backward", "end"): (4, 3, 7, 0),  # groups of heads into one tensor; convert to 16 bits
    ("a2a", "forward", "send"): (1, 2, 2, 0),  # heads into the order of the ranks
    ("a2a", "forward", "sort"): (1, 2, 2, 0),  # rows into the order of the stream
    ("a2a", "forward", "sort back"): (1, 2, 0, 0),
    ("a2a", "forward", "own"): (2, 2, 2, 0),  # two chunks to their places
    ("a2a", "forward", "own back"): (2, 2, 0, 0),
    ("a2a", "forward", "receive"): (1, 2, 0, 0),  # heads to their places
    ("a2a", "backward", "send"): (1, 2, 0, 0),
    ("a2a", "backward", "sort"): (1, 2, 0, 0),
    ("a2a", "backward", "before"): (1, 0, 0, 0),  # zeros for the prefix
    ("a2a", "backward", "after"): (1, 2, 2, 0),  # gradients into one tensor
    ("a2a", "backward", "sort back"): (1, 2, 2, 0),
    ("a2a", "backward", "own"): (2, 2, 0, 0),
    ("a2a", "backward", "own back"): (2, 2, 2, 0),
    ("a2a", "backward", "receive"): (3, 2, 2, 0),
}


@dataclass(frozen=True)
class Shape:
    """One sequence of bf16."""

    length: int
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 128

    def forward_flops(self) -> float:
        """Count the operations of a forward by the causal model count. Forward and backward have 3.5 times as many."""
        return 2 * self.heads * self.length**2 * self.head_dim


# ---- kernels

# rows, older, causal: `rows` queries attend to `older` keys and, if causal, to the keys before them in their own chunk.
Segment = tuple[int, int, bool]


@functools.lru_cache(maxsize=4096)
def forward_block(machine: Machine, segments: tuple[Segment, ...], heads: int) -> float:
    """Return the time of a block's forward: the free multiprocessor takes the query tile with the most keys."""
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
    """Return the time of a block's backward: key tiles, oldest first, each one step behind the next older tile."""
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
    """Return the segments of a chunk of keys and a rank's two chunks of queries, by kind.

    The kinds: no query attends to the keys; the keys are older than one query chunk; the keys are one query chunk's
    own; the keys are one query chunk's own and older than the other; the keys are older than both.
    """
    square, own = (chunk, chunk, False), (chunk, 0, True)
    return (), (square,), (own,), (own, square), (square, square)


def ring_kinds(ranks: int, direction: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each rank the kinds of its blocks with the low and the high chunk of keys at a step."""
    own = np.arange(ranks)
    moved = step if direction == "forward" else -(step + 1)  # csrc/plan/schedule.h
    low, high = (own - moved) % ranks, (own + moved) % ranks  # the ranks that the chunks belong to
    return np.choose(np.sign(low - own) + 1, [4, 3, 1]), np.choose(np.sign(high - own) + 1, [0, 2, 1])


class Model:
    """The time of a forward or a backward on `ranks` GPUs with the layout zigzag."""

    def __init__(self, machine: Machine, shape: Shape, ranks: int) -> None:
        self.machine, self.shape, self.ranks = machine, shape, ranks
        self.chunk = max(1, round(shape.length / (2 * ranks)))
        head = 2 * shape.head_dim * shape.length / ranks
        self.bytes = {"q": head * shape.heads, "kv": 2 * head * shape.kv_heads}
        self.bytes["all"] = ranks * self.bytes["kv"]

    def possible(self, mode: str) -> bool:
        """Return whether a mode supports this number of ranks: a2a must give each rank a share of the heads."""
        n, kv_heads = self.ranks, self.shape.kv_heads
        return mode != "a2a" or (self.shape.heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0))

    def time(self, mode: str, *directions: str) -> float:
        """Return the microseconds of a call in one or both directions, after a rest."""
        time = self._steady(mode, directions)
        if self.machine.rest_credit:
            fastest = Model(self.machine.at_highest_clock(), self.shape, self.ranks)
            time = max(fastest._steady(mode, directions), time - self.machine.rest_credit)
        host = sum(HOST[direction] for direction in directions) * self.ranks * self.machine.host_step
        return max(time, host) if mode == "p2p" else time

    def _steady(self, mode: str, directions: tuple[str, ...]) -> float:
        """Return the microseconds of such a call at a constant clock."""
        schedule = {"p2p": self._ring, "all_gather": self._gather, "a2a": self._exchange}.get(mode)
        schedule = self._alone if self.ranks == 1 else schedule
        return sum(schedule(direction) for direction in directions)

    def tflops(self, mode: str, *directions: str) -> float:
        """Return TFLOP/s per GPU by the causal model count."""
        flops = sum(FLOPS[d] for d in directions) * self.shape.forward_flops()
        return flops / self.ranks / self.time(mode, *directions) / 1e6

    def gather_bytes(self, direction: str) -> float:
        """Return the most bytes of the whole stream that all_gather holds.

        These are a group of keys and values as received and in order, and the next group; in the backward also the fp32
        gradients in order and as sent.
        """
        return self.bytes["all"] / self._groups(self.shape.kv_heads) * (3 if direction == "forward" else 7)

    # ---- blocks, passes and transfers

    def _alone(self, direction: str) -> float:
        return self._block(direction, ((self.shape.length, 0, True),), self.shape.length)

    def _block(self, direction: str, segments: tuple[Segment, ...], num_keys: int, share: float = 1.0) -> float:
        """Return the time of a block call with a share of the heads."""
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

    def _with_transfer(self, kernel, transfer, taken: int):
        """Return the time of a kernel during a transfer that takes some of the multiprocessors."""
        return kernel + np.minimum(kernel, transfer) * taken / (self.machine.multiprocessors - taken)

    # ---- p2p

    def least_ring_time(self, *directions: str) -> float:
        """Return a lower bound of the microseconds of p2p, without its simulation, which is slow for many ranks.

        Every transfer of keys waits for the one before it.
        """
        return len(directions) * (self.ranks - 1) * self._transfer(self.bytes["kv"]) - self.machine.rest_credit

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
        exchanges = self.ranks - (1 if direction == "forward" else 2)  # the last step of the backward is at home
        for step in range(self.ranks):
            clock = np.maximum(clock, ready)
            low, high = ring_kinds(self.ranks, direction, step)
            lows, highs, blocks = np.choose(low, kinds), np.choose(high, kinds), 1 + (high > 0)
            overlap = np.maximum(link - clock, 0.0)
            if step < exchanges:
                # If another transfer is running, the next one gets no multiprocessor until a kernel ends.
                posted = np.where(link > clock, np.maximum(link, clock + lows), clock)
                ready = link = together(posted) + keys
                overlap = overlap + ready - posted
            clock = clock + self._with_transfer(lows + highs, overlap, self.machine.ring_multiprocessors)
            if direction == "forward":
                rows = np.where(low == 4, 1.0, 0.5 * (step > own + 1) * (low == 1)) + 0.5 * (high == 1)
                clock = clock + np.where(rows > 0, cost("add", rows), 0.0)
                continue
            if step:
                clock = np.maximum(clock, given) + blocks * cost("add", 0.5)
            if step + 1 < self.ranks:
                given = link = together(np.maximum(link, clock)) + gradients
        return float(clock.max()) + cost("end")

    # ---- all_gather and a2a

    def _groups(self, kv_heads: int) -> int:
        """Return the number of equal groups into which all_gather divides the KV heads."""
        few = self.shape.length < ROWS_TO_SPLIT
        return 1 if few else max(groups for groups in range(1, HEAD_GROUPS + 1) if kv_heads % groups == 0)

    def _gather(self, direction: str) -> float:
        """Return the time of all_gather. A group of heads is sent under the previous block, returned under the next."""
        n, c = self.ranks, self.chunk
        groups = self._groups(self.shape.kv_heads)
        segments = [((c, r * c, True), (c, (2 * n - 1 - r) * c, True)) for r in (0, n // 2, n - 1)]
        block = max(self._block(direction, some, 2 * n * c, 1 / groups) for some in segments)
        others = (n - 1) * self.bytes["kv"] / groups
        send = self._transfer(others, n - 1)
        give_back = self._transfer(2 * others, n - 1) if direction == "backward" else 0.0
        cost = functools.partial(self._passes, "all_gather", direction, share=1 / groups)
        clock = self._passes("all_gather", direction, "start") + cost("send")
        arrived = link = clock + send
        for group in range(groups):
            more = group + 1 < groups
            clock = max(clock, arrived) + cost("before") + (cost("send") if more else 0.0)
            overlap, at_once = max(0.0, link - clock), link <= clock
            if more and at_once:
                link, overlap = clock + send, send
            clock += self._with_transfer(block, overlap, self.machine.link_multiprocessors)
            if more and not at_once:
                link = max(link, clock) + send
            arrived = link
            clock += cost("after")
            link = max(link, clock) + give_back
        clock += (groups - 1) * cost("receive")
        return max(clock, link if give_back else 0.0) + cost("receive") + self._passes("all_gather", direction, "end")

    def _exchange(self, direction: str, repeated: bool = False) -> float:
        n, shape, kv = self.ranks, self.shape, self.bytes["kv"]
        if shape.kv_heads < n:  # several ranks get copies of one KV head
            return Model(self.machine, replace(shape, kv_heads=n), n)._exchange(direction, repeated=True)
        if direction == "forward":
            sent, given_back = self.bytes["q"] + kv, self.bytes["q"]
        else:  # gradients of repeated heads are summed and therefore sent in fp32
            sent, given_back = self.bytes["q"], self.bytes["q"] + kv * (2 if repeated else 1)
        rows_in_place = shape.length >= ROWS_TO_SPLIT
        stages = {"start": 1, "send": 1, "before": 1, "after": 1, "receive": 1, "end": 1}
        stages |= {"own": 1 / n, "own back": 1 / n} if rows_in_place else {"sort": 1, "sort back": 1}
        passes = sum(self._passes("a2a", direction, stage, part) for stage, part in stages.items())
        block = self._block(direction, ((shape.length, 0, True),), shape.length, 1 / n)
        return passes + block + sum(self._transfer((n - 1) / n * size, n - 1) for size in (sent, given_back))
