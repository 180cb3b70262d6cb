"""Checks of the bytes that a plan predicts. Every rank calls each with the group."""

import contextlib
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from context_parallel_accuracy import EXCHANGING, LAYOUTS, ROWS, groups_for
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_sb as sb

# Name: offsets of the documents, packing, rows of the stream.
STREAMS = {
    "dense": (None, "per_document", ROWS),
    "dense of any length": (None, "per_document", ROWS + 5),
    "one row": (None, "per_document", 1),
    "each document": ((0, 5, 52, 52, 143, 190), "per_document", ROWS + 3),
    "short documents": ((0, 30, 31, 31, 60, 90, 97, 130, 160), "whole_stream", ROWS),
    "whole stream": ((0, 5, 5, 100, 101, 180), "whole_stream", ROWS + 1),
    "tail": ((0, 9, 21), "whole_stream", ROWS),
}
# KV heads, d, d_v, dtype. Two KV heads go to several ranks if there are more ranks.
SIZES = ((2, 16, 24, torch.bfloat16), (8, 8, 8, torch.float32), (4, 16, 8, torch.float64))
HEADS, BATCH = 8, 2


class _Counter(TorchDispatchMode):
    """Count what this rank receives from other ranks in the collectives of c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name.startswith("c10d::"):
            self.num_bytes += getattr(self, name.removeprefix("c10d::"))(*args)
        return function(*args, **(kwargs or {}))

    def send(self, *args) -> int:
        return 0

    def recv_(self, tensors, *args) -> int:
        return sum(x.nbytes for x in tensors)

    def _allgather_base_(self, output, shard, *args) -> int:
        return output.nbytes - shard.nbytes

    def _reduce_scatter_base_(self, output, whole, *args) -> int:
        return whole.nbytes - output.nbytes

    def alltoall_base_(self, output, whole, group, output_rows, *args) -> int:
        group = dist.ProcessGroup.unbox(group)
        own = output_rows[group.rank()] if output_rows else output.shape[0] // group.size()
        return output.nbytes - own * output[0, ...].nbytes if own else output.nbytes


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Append the number of bytes that this rank receives in the `with` block to a list."""
    found: list[int] = []
    with _Counter() as counter:
        yield found
    found.append(counter.num_bytes)


def a_plan_counts_received_bytes(group) -> None:
    """The plan's numbers are those of the transport, in the forward and in the backward."""
    size = dist.get_world_size()
    comms = (
        ["p2p", "all_gather"]
        + ["a2a"] * (HEADS % size == 0)
        + ["a2a+p2p"] * (size > EXCHANGING and size % EXCHANGING == 0)
    )
    needed, failures = 0, []
    for (name, (offsets, packing, rows)), layout in itertools.product(STREAMS.items(), LAYOUTS):
        cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
        plan = sb.ContextParallelPlan(group, rows, cu_seqlens, layout, packing)
        needed += plan.key_rows < rows
        for comm, (kv_heads, d, d_v, dtype) in itertools.product(comms, SIZES):
            batch = () if plan.packed else (BATCH,)
            q, k, v, do = (
                torch.randn(*batch, plan.local_len, heads, width, dtype=dtype)
                for heads, width in ((HEADS, d), (kv_heads, d), (kv_heads, d_v), (HEADS, d_v))
            )
            leaves = [x.requires_grad_() for x in (q, k, v)]
            with counted() as forward:
                o = sb.context_parallel_attention(*leaves, plan=plan, comm=comm, **groups_for(comm))
            with counted() as backward:
                torch.autograd.grad(o, leaves, do)
            a2a_size = EXCHANGING if comm == "a2a+p2p" else None
            batch_size = BATCH if batch else 1
            expected = plan.received_bytes(comm, HEADS, kv_heads, d, d_v, dtype, batch_size, a2a_size)
            if (*forward, *backward) != expected:  # the ranks stay in step, so the error is raised at the end
                failures.append(f"{name}, {layout}, {comm}, {kv_heads} KV heads, {dtype}: {forward}, {backward}")
    assert not failures, "\n".join(failures)
    assert needed > 3, "some plans must send only the keys that a rank needs"
