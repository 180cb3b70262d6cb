"""Transfers of keys, values and heads between ranks, over gloo and NCCL. Waits end with the timeout of the group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_sb.baselines.softmax.shards import Block, Indices

# Gets keys and values (2, b, h_kv, n, d), their gradients, which it adds to, and the blocks to compute.
AddGradients = Callable[[Tensor, Tensor, tuple[Block, ...]], None]


class _AllToAll(torch.autograd.Function):
    """Send entry i of x (ranks, ...) to rank i, and receive one entry from each rank."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def exchange_heads(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, indices: Indices
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange heads for rows: this rank gets the rows of all ranks of the group for its share of the heads.

    Args:
        q: (b, s, h, d), h a multiple of the ranks.
        k: (b, s, h_kv, d), h_kv a multiple or a divisor of the ranks. With fewer KV heads than ranks, each KV head goes
            to several ranks.
        v: (b, s, h_kv, d).
        group: the ranks that exchange heads.
        indices: the orders of rows.

    Returns:
        q (b, ranks * s, h / ranks, d), and k and v with at least one head, in the order of the stream. Collective.
    """
    size = dist.get_world_size(group)
    copies = max(1, size // k.shape[2])
    k, v = (x if copies == 1 else x.repeat_interleave(copies, dim=2) for x in (k, v))
    shares = [x.unflatten(2, (size, -1)) for x in (q, k, v)]
    received = _AllToAll.apply(torch.cat(shares, dim=3).movedim(2, 0), group)
    whole = received.movedim(0, 1).flatten(1, 2).index_select(1, indices.exchanged)
    return whole.split([x.shape[3] for x in shares], dim=2)


def exchange_rows(o: Tensor, group: dist.ProcessGroup, indices: Indices) -> Tensor:
    """Exchange rows for heads, the reverse of `exchange_heads`: (b, ranks * s, h / ranks, d) to (b, s, h, d)."""
    shares = o.index_select(1, indices.unexchanged).unflatten(1, (dist.get_world_size(group), -1))
    return _AllToAll.apply(shares.movedim(1, 0), group).movedim(0, 2).flatten(2, 3)


class Gathered:
    """Gather the keys and values of all members; reduce-scatter their gradients.

    Args:
        group: the members.
        blocks: blocks of this member's queries and the keys of the whole stream.
        indices: the orders of rows.
    """

    def __init__(self, group: dist.ProcessGroup, blocks: tuple[Block, ...], indices: Indices) -> None:
        self.group, self.blocks, self.indices = group, blocks, indices
        self.size = dist.get_world_size(group)

    def shards(self, kv: Tensor) -> Iterator[tuple[Tensor, tuple[Block, ...]]]:
        """Yield keys and values (2, b, h_kv, n, d), and their blocks, from those of this member. Collective."""
        by_row = kv.movedim(3, 0).contiguous()
        gathered = by_row.new_empty(self.size * len(by_row), *by_row.shape[1:])
        dist.all_gather_into_tensor(gathered, by_row, group=self.group)
        yield gathered.index_select(0, self.indices.gathered).movedim(0, 3), self.blocks

    def gradients(self, kv: Tensor, add: AddGradients) -> Tensor:
        """Return the gradients of this member's keys and values, in fp32 (fp64 for fp64). Collective."""
        ((whole, blocks),) = self.shards(kv)
        by_row = _zeros(whole.movedim(3, 0))
        add(whole, by_row.movedim(0, 3), blocks)
        by_member = by_row.index_select(0, self.indices.ungathered)
        mine = by_row.new_empty(kv.shape[3], *by_row.shape[1:])
        dist.reduce_scatter_tensor(mine, by_member, group=self.group)
        return mine.movedim(0, 3)


class Ring:
    """Pass the keys and values of all members around a ring; their gradients follow one step later.

    Args:
        group: the members.
        blocks: blocks of this member's queries and the keys of each member.
    """

    def __init__(self, group: dist.ProcessGroup, blocks: list[tuple[Block, ...]]) -> None:
        self.group, self.blocks = group, blocks
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def shards(self, kv: Tensor) -> Iterator[tuple[Tensor, tuple[Block, ...]]]:
        """Yield keys and values (2, b, h_kv, n, d), and their blocks, from those of this member. Collective.

        The next keys and values are on their way while the caller computes.
        """
        for step in range(self.size):
            arriving = _Shift(kv, self) if step + 1 < self.size else None
            yield kv, self.blocks[(self.rank - step) % self.size]
            kv = kv if arriving is None else arriving.wait()

    def gradients(self, kv: Tensor, add: AddGradients) -> Tensor:
        """Return the gradients of this member's keys and values, in fp32 (fp64 for fp64). Collective."""
        arriving = None
        for kv_here, blocks in self.shards(kv):
            gradients = _zeros(kv_here)
            add(kv_here, gradients, blocks)
            if arriving is not None:  # the gradients of these keys by the members that had them before
                gradients += arriving.wait()
            arriving = _Shift(gradients, self)
        return arriving.wait()


class _Shift:
    """Send a tensor to the next member and receive one from the previous member, in the background."""

    def __init__(self, sent: Tensor, ring: Ring) -> None:
        self.sent = sent.contiguous()  # stays alive until `wait`
        self.received = torch.empty_like(self.sent)
        after, before = (dist.get_global_rank(ring.group, (ring.rank + step) % ring.size) for step in (1, -1))
        send = dist.P2POp(dist.isend, self.sent, after, group=ring.group)
        receive = dist.P2POp(dist.irecv, self.received, before, group=ring.group)
        self.transfers = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Wait for both transfers and return what was received."""
        for transfer in self.transfers:
            transfer.wait()
        return self.received


def _zeros(x: Tensor) -> Tensor:
    """Return contiguous zeros of x's shape in fp32 (fp64 for fp64)."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
