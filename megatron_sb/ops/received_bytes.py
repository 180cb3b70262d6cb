"""How many bytes a rank of a context-parallel group receives in one layer.

The counts repeat what csrc/distributed sends: ring_keys.cpp, gathered_keys.cpp, needed_keys.cpp and head_exchange.cpp.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sb.ops.groups import exchange_problem
from megatron_sb.options import COMMS
from megatron_sb.validation import check_choice, check_counts

MODES = tuple(comm for comm in COMMS if comm != "auto")


class ReceivedBytes(NamedTuple):
    """Bytes that a rank receives from other ranks in one layer.

    Attributes:
        forward: in the forward.
        backward: in the backward.
    """

    forward: int
    backward: int


class KeyRows(NamedTuple):
    """Rows of keys and of gradients that a rank receives.

    Attributes:
        keys: rows of k and v, in the forward.
        gradients: rows of dk and dv, in the backward.
        are_kept: whether the backward still has the rows of k and v, and does not receive them again.
    """

    keys: int
    gradients: int
    are_kept: bool = False


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of a layer.

    Attributes:
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: channels of q and k.
        head_dim_v: channels of v and o.
        dtype: of q, k and v.
        batch_size: b.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    batch_size: int

    @property
    def element_size(self) -> int:
        """Return the bytes of an element of q, k and v."""
        return self.dtype.itemsize

    @property
    def wide_size(self) -> int:
        """Return the bytes of an element of the accumulation type: fp64 for fp64, else fp32."""
        return max(4, self.element_size)

    def share(self, num_ranks: int) -> "Sizes":
        """Return the sizes of one of the ranks that exchange heads. Several ranks have a KV head if there are fewer."""
        kv_heads = max(1, self.num_kv_heads // num_ranks)
        return replace(self, num_heads=self.num_heads // num_ranks, num_kv_heads=kv_heads)

    @property
    def queries(self) -> int:
        """Return the elements of a row of q."""
        return self.batch_size * self.num_heads * self.head_dim

    @property
    def outputs(self) -> int:
        """Return the elements of a row of o."""
        return self.batch_size * self.num_heads * self.head_dim_v

    @property
    def keys_and_values(self) -> int:
        """Return the elements of a row of k and v."""
        return self.batch_size * self.num_kv_heads * (self.head_dim + self.head_dim_v)


def received_bytes(plan, comm: str, sizes: Sizes, a2a_size: int | None) -> ReceivedBytes:
    """Return what `ContextParallelPlan.received_bytes` does. Raise ValueError for invalid arguments."""
    check_choice("comm", comm, MODES)
    check_counts({name: value for name, value in vars(sizes).items() if name != "dtype"})
    if not (isinstance(sizes.dtype, torch.dtype) and sizes.dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {sizes.dtype!r}.")
    if plan.cu_seqlens is not None and sizes.batch_size > 1:
        raise ValueError(f"batch_size must be 1 if the plan is packed, got {sizes.batch_size}.")
    exchanging = _exchanging_ranks(plan.size, comm, a2a_size)
    _check_heads(sizes, exchanging, comm)
    positions = torch.ops.megatron_sb.shard_positions(
        plan.size,
        plan.seq_len,
        plan.layout,
        None if plan.cu_seqlens is None else plan.cu_seqlens.tolist(),
        plan.packing,
    )
    # Ranks that exchange heads act as one joint rank, which has all their rows.
    joint = [rows[rows >= 0].sort().values for rows in positions.reshape(plan.size // exchanging, -1)]
    forward, backward = _head_bytes(plan, sizes, exchanging, joint[plan.rank // exchanging].numel())
    if exchanging < plan.size:
        rows = _key_rows(plan, joint, exchanging, "p2p" if comm == "a2a+p2p" else comm)
        share = sizes.share(exchanging)
        keys = rows.keys * share.keys_and_values * share.element_size
        forward += keys
        backward += (0 if rows.are_kept else keys) + rows.gradients * share.keys_and_values * share.wide_size
    return ReceivedBytes(forward, backward)


def _exchanging_ranks(num_ranks: int, comm: str, a2a_size: int | None) -> int:
    if comm != "a2a+p2p":
        if a2a_size is not None:
            raise ValueError(f"a2a_size must be None unless comm is 'a2a+p2p', got {a2a_size!r} with comm {comm!r}.")
        return num_ranks if comm == "a2a" else 1
    check_counts({"a2a_size": a2a_size})
    if num_ranks % a2a_size:
        raise ValueError(f"a2a_size must divide the {num_ranks} ranks of the plan, got {a2a_size}.")
    return a2a_size


def _check_heads(sizes: Sizes, num_ranks: int, comm: str) -> None:
    if sizes.num_heads % sizes.num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads {sizes.num_kv_heads}, got {sizes.num_heads}.")
    names = "num_heads", "num_kv_heads"
    if problem := exchange_problem(sizes.num_heads, sizes.num_kv_heads, num_ranks, names):
        raise ValueError(f"comm {comm!r} exchanges heads between {num_ranks} ranks: {problem}.")


def _head_bytes(plan, sizes: Sizes, num_ranks: int, num_joint_rows: int) -> tuple[int, int]:
    """Return the bytes of the exchange of heads in the forward and in the backward."""
    share = sizes.share(num_ranks)
    their_rows = num_joint_rows - plan.local_len  # of this rank's heads
    own_rows = (num_ranks - 1) * plan.local_len  # of the heads of the others
    # The gradients of a KV head that several ranks have are summed, so they are sent in the accumulation type.
    gradient_size = sizes.wide_size if sizes.num_kv_heads % num_ranks else sizes.element_size
    inputs = (share.queries + share.keys_and_values) * sizes.element_size
    gradients = share.queries * sizes.element_size + share.keys_and_values * gradient_size
    outputs = share.outputs * sizes.element_size
    return their_rows * inputs + own_rows * outputs, their_rows * outputs + own_rows * gradients


def _key_rows(plan, joint: list[Tensor], exchanging: int, comm: str) -> KeyRows:
    """Return the rows that travel to a joint rank. joint: the rows of each in the stream, increasing."""
    rank, num_ranks = plan.rank // exchanging, len(joint)
    longest = max(rows.numel() for rows in joint)
    if needed := _needed_rows(plan, joint, rank):
        fits_in_ring = needed.most <= 2 * longest  # a rank of a ring has two chunks of each lane at a time
        if comm == "all_gather" or plan.layout == "balanced" or fits_in_ring:
            return needed.rows._replace(are_kept=fits_in_ring)
    if comm == "p2p" and plan.layout != "balanced":
        others = plan.seq_len - joint[rank].numel()
        return KeyRows(others, plan.seq_len - _first_rows_of_ring(plan, exchanging, num_ranks, rank))
    return KeyRows(*(2 * [(num_ranks - 1) * longest]))


def _first_rows_of_ring(plan, exchanging: int, num_ranks: int, rank: int) -> int:
    """Return the rows of the chunks of keys in the first step of the backward.

    A rank receives the gradients of all other chunks, among them its own. This is the schedule of csrc/plan/schedule.h.
    """
    is_zigzag = plan.layout == "zigzag"
    chunks = [(rank + 1) % num_ranks] + [2 * num_ranks - 1 - (rank - 1) % num_ranks] * is_zigzag
    whole, longer = divmod(plan.seq_len, plan.size * (1 + is_zigzag))  # the first parts have one row more
    return sum(whole * exchanging + min(max(longer - chunk * exchanging, 0), exchanging) for chunk in chunks)


class NeededRows(NamedTuple):
    """What a rank receives if each rank receives only the keys that its queries see.

    Attributes:
        rows: of keys and gradients.
        most: rows of the key buffer of the rank with the most. It has the documents that several ranks have.
    """

    rows: KeyRows
    most: int


def _needed_rows(plan, joint: list[Tensor], rank: int) -> NeededRows | None:
    """Return the needed rows, or None if the ranks together need at least half of what they receive of whole streams.

    A rank needs the keys of the documents of its queries, up to its last query of each. See csrc/plan/key_rows.h.
    """
    whole = torch.tensor([0, plan.seq_len], device="cpu")
    offsets = whole if plan.cu_seqlens is None else plan.cu_seqlens.long()
    begins, num_ranks = offsets[:-1], len(joint)
    # Row r of each table is of rank r, and column i of document i.
    first = torch.stack([torch.searchsorted(rows, offsets) for rows in joint])  # the rank's first row in the document
    held = first.diff(dim=1)
    last = [
        rows[(of_rank[1:] - 1).clamp(min=0)] if rows.numel() else begins
        for rows, of_rank in zip(joint, first, strict=True)
    ]
    ends = torch.where(held > 0, torch.stack(last) + 1, begins)  # of the needed rows, in the stream
    received = (ends - begins - held).sum(1)
    if num_ranks == 1 or 2 * int(received.sum()) >= (num_ranks - 1) * plan.seq_len:
        return None
    # The rank sends to another rank its rows before the end of what that rank needs, and receives their gradients.
    sent = (torch.searchsorted(joint[rank], ends) - first[rank, :-1]).clamp(min=0).sum(1)
    returned = int(sent.sum() - sent[rank])
    is_shared = (held > 0).sum(0) > 1
    most = int(((ends - begins) * is_shared).sum(1).max())
    return NeededRows(KeyRows(int(received[rank]), returned), most)
