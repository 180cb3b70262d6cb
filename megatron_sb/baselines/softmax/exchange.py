"""Transfers of keys, values and heads between ranks, over gloo and NCCL. Waits end with the timeout of the group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_sb.baselines.softmax.shards import Block, Shards

# Gets keys and values (2, b, h_kv, n, d), their gradients, which it adds to, and the blocks to compute.
AddGradients = Callable[[Tensor, Tensor, tuple[Block, ...]], None]


@contextlib.contextmanager
def _naming(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Name the rank and the transfer in an error of torch.distributed, in the words of stick-breaking attention."""
    try:
        yield
    except RuntimeError as error:
        where = f"context parallelism, rank {group.rank()} of {group.size()}"
        raise RuntimeError(f"{where}: {what} failed: {error}") from error


class _AllToAll(torch.autograd.Function):
    """Send sent[i] rows of x (rows, ...) to rank i of a group, and receive received[i] rows from it."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(x, group, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


def _all_to_all(x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    with _naming(group, "all_to_all"):
        dist.all_to_all_single(output, x.contiguous(), received, sent, group=group)
    return output


def exchange_heads(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, shards: Shards
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange heads for rows: this rank gets the rows of all ranks of the group for its share of the heads.

    Args:
        q: (b, s, h, d), h a multiple of the ranks.
        k: (b, s, h_kv, d), h_kv a multiple or a divisor of the ranks. With fewer KV heads than ranks, each KV head goes
            to several ranks.
        v: (b, s, h_kv, d).
        group: the ranks that exchange heads.
        shards: the rows of these ranks.

    Returns:
        q (b, rows of these ranks, h / ranks, d), and k and v with at least one head, in the order of the stream.
        Collective.
    """
    size = dist.get_world_size(group)
    copies = max(1, size // k.shape[2])
    k, v = (x if copies == 1 else x.repeat_interleave(copies, dim=2) for x in (k, v))
    shares = [x.unflatten(2, (size, -1)) for x in (q, k, v)]  # (b, s, ranks, heads, d)
    by_rank = torch.cat(shares, dim=3).permute(2, 1, 0, 3, 4).flatten(0, 1)
    received = _AllToAll.apply(by_rank, group, [q.shape[1]] * size, list(shards.exchanged_rows))
    whole = received.index_select(0, shards.indices(q.device).exchanged).movedim(0, 1)
    return whole.split([x.shape[3] for x in shares], dim=2)


def exchange_rows(o: Tensor, group: dist.ProcessGroup, shards: Shards) -> Tensor:
    """Exchange rows for heads, the reverse of `exchange_heads`: (b, rows, h / ranks, d) to (b, s, h, d)."""
    size, rows = dist.get_world_size(group), shards.exchanged_rows
    by_rank = o.movedim(1, 0).index_select(0, shards.indices(o.device).unexchanged)
    received = _AllToAll.apply(by_rank, group, list(rows), [rows[dist.get_rank(group)]] * size)
    return received.unflatten(0, (size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)


class Gathered:
    """Gather the keys and values of all members; reduce-scatter their gradients.

    Args:
        group: the members.
        shards: the rows of the members.
        window: number of newest keys that a row sees, or None for all.
    """

    def __init__(self, group: dist.ProcessGroup, shards: Shards, window: int | None) -> None:
        self.group, self.shards_of_members, self.blocks = group, shards, shards.blocks_of_stream(window)
        self.size, self.rows = dist.get_world_size(group), max(shards.member_rows)

    def shards(self, kv: Tensor) -> Iterator[tuple[Tensor, tuple[Block, ...]]]:
        """Yield keys and values (2, b, h_kv, n, d), and their blocks, from those of this member. Collective."""
        by_row = kv.movedim(3, 0)
        if len(by_row) < self.rows:  # collectives need equal buffers
            by_row = torch.cat((by_row, by_row.new_zeros(self.rows - len(by_row), *by_row.shape[1:])))
        gathered = by_row.new_empty(self.size * self.rows, *by_row.shape[1:])
        with _naming(self.group, "all_gather"):
            dist.all_gather_into_tensor(gathered, by_row.contiguous(), group=self.group)
        order = self.shards_of_members.indices(kv.device).gathered
        yield gathered.index_select(0, order).movedim(0, 3), self.blocks

    def gradients(self, kv: Tensor, add: AddGradients) -> Tensor:
        """Return the gradients of this member's keys and values, in fp32 (fp64 for fp64). Collective."""
        ((whole, blocks),) = self.shards(kv)
        by_row = _zeros(whole.movedim(3, 0))
        add(whole, by_row.movedim(0, 3), blocks)
        by_member = by_row.index_select(0, self.shards_of_members.indices(kv.device).ungathered)
        mine = by_row.new_empty(self.rows, *by_row.shape[1:])
        with _naming(self.group, "reduce_scatter"):
            dist.reduce_scatter_tensor(mine, by_member, group=self.group)
        return mine[: kv.shape[3]].movedim(0, 3)


class Ring:
    """Pass the keys and values of all members around a ring; their gradients follow one step later.

    Args:
        group: the members.
        shards: the rows of the members.
        window: number of newest keys that a row sees, or None for all.
    """

    def __init__(self, group: dist.ProcessGroup, shards: Shards, window: int | None) -> None:
        self.group, self.rows, self.blocks = group, shards.member_rows, shards.blocks_by_member(window)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def member(self, step: int) -> int:
        """Return the member whose keys and values this one has at a step."""
        return (self.rank - step) % self.size

    def shards(self, kv: Tensor) -> Iterator[tuple[Tensor, tuple[Block, ...]]]:
        """Yield keys and values (2, b, h_kv, n, d), and their blocks, from those of this member. Collective.

        The next keys and values are on their way while the caller computes.
        """
        for step in range(self.size):
            arriving = _Shift(kv, self, step + 1) if step + 1 < self.size else None
            yield kv, self.blocks[self.member(step)]
            kv = kv if arriving is None else arriving.wait()

    def gradients(self, kv: Tensor, add: AddGradients) -> Tensor:
        """Return the gradients of this member's keys and values, in fp32 (fp64 for fp64). Collective."""
        arriving = None
        for step, (kv_here, blocks) in enumerate(self.shards(kv)):
            gradients = _zeros(kv_here)
            add(kv_here, gradients, blocks)
            if arriving is not None:  # the gradients of these keys by the members that had them before
                gradients += arriving.wait()
            arriving = _Shift(gradients, self, step + 1)
        return arriving.wait()


class _Shift:
    """Send a tensor to the next member and receive one from the previous member, in the background.

    The received tensor has the rows (the dimension 3) of the member whose keys this one has at `step`. A tensor without
    rows is not sent.
    """

    def __init__(self, sent: Tensor, ring: Ring, step: int) -> None:
        self.sent = sent.contiguous()  # stays alive until `wait`
        self.received = sent.new_empty(*sent.shape[:3], ring.rows[ring.member(step)], sent.shape[4])
        peers = [(ring.rank + offset) % ring.size for offset in (1, -1)]
        self.group, self.what = ring.group, "exchange, sending to {}, receiving from {}".format(*peers)
        after, before = (dist.get_global_rank(ring.group, peer) for peer in peers)
        send = dist.P2POp(dist.isend, self.sent, after, group=ring.group)
        receive = dist.P2POp(dist.irecv, self.received, before, group=ring.group)
        transfers = [transfer for transfer in (send, receive) if transfer.tensor.numel()]
        with _naming(self.group, self.what):
            self.transfers = dist.batch_isend_irecv(transfers) if transfers else []

    def wait(self) -> Tensor:
        """Wait for both transfers and return what was received."""
        with _naming(self.group, self.what):
            for transfer in self.transfers:
                transfer.wait()
        return self.received


def _zeros(x: Tensor) -> Tensor:
    """Return contiguous zeros of x's shape in fp32 (fp64 for fp64)."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
