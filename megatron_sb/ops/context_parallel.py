"""Stick-breaking attention with the sequence spread over a process group.

A stream of ``seq_len`` rows, one document or several packed ones, is cut over the ranks of a group. ``zigzag`` cuts it
into 2 * ranks chunks, of which rank r holds chunks r and 2 * ranks - 1 - r; ``contiguous`` gives rank r chunk r. With
``cu_seqlens``, ``packing="per_document"`` cuts every document so (Megatron's and Transformer Engine's packed layout)
and ``"whole_stream"`` cuts the stream whatever the documents. Rows beyond the last document belong to no document; they
are cut as one more document would be.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sb.options import DEFAULT_MASS_THRESHOLD, LOGITS, check_option_types
from megatron_sb.validation import check_choice, check_tensor


def _group_name(group: object, argument: str = "cp_group") -> str:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{argument} needs torch.distributed. Call torch.distributed.init_process_group first.")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{argument} must contain this rank, got a group without rank {dist.get_rank()}.")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{argument} must be a torch.distributed.ProcessGroup, got {type(group).__name__}.")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{argument} must contain this rank, got a group without rank {dist.get_rank()}.")
    return group.group_name


def group_size(group: object) -> int:
    _group_name(group)
    return dist.get_world_size(group)


def _offsets(cu_seqlens: object) -> tuple[list[int] | None, str]:
    """Return cu_seqlens as a list, and an error message or "". A GPU tensor is copied to the host here."""
    if cu_seqlens is None:
        return None, ""
    if not isinstance(cu_seqlens, Tensor):
        return None, f"cu_seqlens must be an int32 torch.Tensor, got {type(cu_seqlens).__name__}."
    if cu_seqlens.dtype != torch.int32:
        return None, f"cu_seqlens must have dtype torch.int32, got {cu_seqlens.dtype}."
    if cu_seqlens.dim() != 1:
        return None, f"cu_seqlens must have shape (documents + 1,), got {cu_seqlens.dim()} dimensions."
    return cu_seqlens.tolist(), ""


def _text(name: str, value: object) -> str:
    """Return value if it is a string. Operators take strings only; they name any other value in their error."""
    return value if isinstance(value, str) else f"{name}={value!r}"


class ContextParallelPlan:
    """All that context-parallel attention needs of the host, made once a batch and shared by its layers.

    Making one is a collective over the group: lengths are checked and the ranks agree on all arguments. Calls that
    share it neither synchronise with the host nor talk about shapes again.

    Args:
        cp_group: the process group; every member makes the plan, at the same point of its program.
        seq_len: rows of the whole stream; needed without cu_seqlens, default cu_seqlens[-1].
        cu_seqlens: int32 (documents + 1,), global and the same on all ranks, starts at 0; None: one document. With
            padded offsets these are the documents' bounds. Read back from a GPU here, once.
        layout: "zigzag" | "contiguous".
        packing: "per_document" | "whole_stream"; of no meaning without cu_seqlens.

    Raises:
        ValueError: on every rank, with the words of the rank that found it: a length that does not divide (2 * ranks
            for zigzag, ranks for contiguous; each document, or the stream), offsets that do not start at 0, decrease or
            end beyond seq_len, arguments on which the ranks disagree. On this rank alone: it is not in the group.
        TypeError: cp_group is no process group.
        RuntimeError: a rank is lost or does not come, within the group's time-out.
    """

    def __init__(
        self,
        cp_group: dist.ProcessGroup,
        seq_len: int | None = None,
        cu_seqlens: Tensor | None = None,
        layout: str = "zigzag",
        packing: str = "per_document",
    ) -> None:
        offsets, error = _offsets(cu_seqlens)
        if seq_len is not None and (not isinstance(seq_len, int) or isinstance(seq_len, bool)):
            seq_len, error = None, error or f"seq_len must be an int, got {seq_len!r}."
        self.state = torch.classes.megatron_sb.ContextParallelPlan(
            _group_name(cp_group), seq_len, offsets, _text("layout", layout), _text("packing", packing), error
        )
        self.cp_group = cp_group
        self.rank: int = self.state.rank()
        self.size: int = self.state.size()
        self.seq_len: int = self.state.seq_len()
        self.local_len: int = self.state.local_len()
        self.packed: bool = self.state.packed()
        self.layout: str = self.state.layout()
        self.packing: str = self.state.packing()

    def __repr__(self) -> str:
        packing = f", packing={self.packing!r}" if self.packed else ""
        return (
            f"ContextParallelPlan(rank {self.rank} of {self.size}, seq_len={self.seq_len}, "
            f"layout={self.layout!r}{packing})"
        )


def _make_plan(
    q: object, cp_group: dist.ProcessGroup | None, layout: str, cu_seqlens: Tensor | None, packing: str
) -> ContextParallelPlan:
    if cp_group is None:
        raise ValueError("cp_group or plan must be given, got neither.")
    check_tensor("q", q)
    rank = 4 if cu_seqlens is None else 3
    if q.dim() != rank:
        shape = "(b, s_local, h, d)" if cu_seqlens is None else "(t_local, h, d) with cu_seqlens"
        raise ValueError(f"q must have {rank} dimensions, {shape}, got {q.dim()}.")
    return ContextParallelPlan(cp_group, q.shape[rank - 3] * group_size(cp_group), cu_seqlens, layout, packing)


def _check_plan(
    plan: object, cp_group: dist.ProcessGroup | None, layout: str, cu_seqlens: Tensor | None, packing: str
) -> None:
    if not isinstance(plan, ContextParallelPlan):
        raise TypeError(f"plan must be a ContextParallelPlan, got {type(plan).__name__}.")
    if cp_group is not None and _group_name(cp_group) != plan.state.group_name():
        raise ValueError(
            f"plan must be made for cp_group, got {plan!r} of another group. Pass the plan without cp_group."
        )
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must be None with a plan, which holds cu_seqlens.")
    for name, value, default, planned in (
        ("layout", layout, "zigzag", plan.layout),
        ("packing", packing, "per_document", plan.packing),
    ):
        if value not in (default, planned):
            raise ValueError(f"{name} must be the plan's, {planned!r}, got {value!r}.")


def _hierarchy(groups: object, comm: object) -> tuple[str, str]:
    """Return the names of this rank's a2a group and p2p group, or "" without groups."""
    if groups is None:
        return "", ""
    if comm != "a2a+p2p":
        raise ValueError(f"hierarchical_groups must be None unless comm is 'a2a+p2p', got comm {comm!r}.")
    if not isinstance(groups, (tuple, list)) or len(groups) != 2:
        raise ValueError(f"hierarchical_groups must be two groups, (a2a group, p2p group), got {groups!r}.")
    return _group_name(groups[0], "hierarchical_groups[0]"), _group_name(groups[1], "hierarchical_groups[1]")


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp_group: dist.ProcessGroup | None = None,
    *,
    plan: ContextParallelPlan | None = None,
    comm: str = "auto",
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    packing: str = "per_document",
    hierarchical_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    return_mass: bool = False,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = DEFAULT_MASS_THRESHOLD,
    logits: str = "dot",
    forget_gate: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a sequence of which this rank holds a part; the answer is that of one rank with the whole of it.

    Every rank of the group calls the function with its local rows. A call without a plan makes one, which is a
    collective and copies cu_seqlens to the host. In a plan's first call with new shapes or options, the ranks check
    that they agree on them. Later, ranks that disagree wait for each other until the group's timeout. Partial outputs,
    masses and gradients are sent in fp32 (fp64 for fp64). The function can be differentiated once; its backward is a
    collective too.

    Memory in addition to the local tensors:

    - "p2p" keeps about 8 * ranks bytes for each local row and head, and for zigzag two fp32 partial outputs of half of
      the rows (of nearly all rows if many documents are packed per_document). It holds two chunks of keys for each of
      two lanes, and in the backward three chunks of fp32 gradients for each lane.
    - "all_gather" holds the keys and values of the whole sequence for up to two groups of heads, in the backward with
      their fp32 gradients. A group is a quarter of the KV heads and at least one; below 32768 rows it is all heads.
    - "a2a" keeps the exchanged queries, keys and values instead of the local ones. They take the same memory.

    In "p2p" zigzag, a rank's newer chunk meets older chunks before the mass of newer keys is known. There, the forward
    skips keys by the mass of that part alone.

    Args:
        q: (b, s_local, h, d), or (t_local, h, d) with cu_seqlens.
        k: (b, s_local, h_kv, d) or (t_local, h_kv, d).
        v: (b, s_local, h_kv, d_v) or (t_local, h_kv, d_v).
        cp_group: the process group; not needed with a plan.
        plan: a plan for this batch; layout, cu_seqlens and packing are the plan's then.
        comm: "p2p": keys move around the ring; "all_gather": keys are gathered, a group of heads at a time; "a2a":
            ranks exchange heads for rows, so that each has all rows of its share of the heads; "a2a+p2p": that within
            the a2a group, and a ring over the p2p group; "auto": a2a where the heads can be exchanged and a rank's
            share of them has 32768 rows or more (heads times rows); else all_gather while the gathered keys and values
            that are alive at a time stay within 1 GiB; else p2p. To exchange heads between n ranks, h must be a
            multiple of n and h_kv a multiple or a divisor: fewer KV heads than ranks go to several of them.
        layout, cu_seqlens, packing: as for `ContextParallelPlan`.
        hierarchical_groups: (a2a group, p2p group) of this rank, for "a2a+p2p", as Megatron makes them: rank of the
            context-parallel group = rank in the p2p group * size of the a2a group + rank in the a2a group.
        return_mass: return the mass too.
        scale, attend_current, mass_threshold, logits: as in `stickbreaking_attention`.
        forget_gate: as there, of the local keys: (b, s_local, h_kv) or (t_local, h_kv).

    Returns:
        o (b, s_local, h, d_v) or (t_local, h, d_v) in q's dtype; with return_mass also mass (b, h, s_local) or
        (h, t_local), fp32 (fp64 for fp64). Rows of no document: o = 0, mass = 1, gradients 0.

    Raises:
        ValueError: a bad argument, a length that does not divide, or ranks that disagree: found by any rank and raised
            on every rank, in making a plan and in its first call. Once a call of the plan has been agreed on, a bad
            argument is raised on the rank that has it. On that rank alone, at any call: a q of the wrong rank where
            there is no plan, a plan that contradicts other arguments, unknown logits, hierarchical_groups of the wrong
            form.
        TypeError: of the wrong type, on the rank that has it.
        RuntimeError: a rank is lost, does not come or has raised alone, within the group's time-out.
    """
    if plan is None:
        plan = _make_plan(q, cp_group, layout, cu_seqlens, packing)
    else:
        _check_plan(plan, cp_group, layout, cu_seqlens, packing)
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
    # The operator checks the values of scale and mass_threshold: it raises on every rank, not on the wrong one alone.
    check_option_types(scale, attend_current, mass_threshold)
    check_choice("logits", logits, LOGITS)
    if forget_gate is not None:
        check_tensor("forget_gate", forget_gate)
    heads_group, keys_group = _hierarchy(hierarchical_groups, comm)
    o, mass = torch.ops.megatron_sb.context_parallel_attention(
        q,
        k,
        v,
        plan.state,
        _text("comm", comm),
        heads_group,
        keys_group,
        scale,
        attend_current,
        mass_threshold,
        return_mass,
        forget_gate=forget_gate,
        euclidean=logits == "euclidean",
    )
    return (o, mass) if return_mass else o


def _check_sequence(x: object, cu_seqlens: Tensor | None) -> list[int] | None:
    check_tensor("x", x)
    offsets, error = _offsets(cu_seqlens)
    if error:
        raise ValueError(error)
    return offsets


def shard_sequence(
    x: Tensor,
    cp_group: dist.ProcessGroup,
    dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    packing: str = "per_document",
) -> Tensor:
    """Return the rows of a whole sequence that this rank holds.

    Not a collective. Its backward is one: it gathers the ranks' gradients, so that every rank has that of the sum of
    all ranks' losses with respect to the one x that all of them hold (as Megatron's scatter to a sequence-parallel
    region).

    Args:
        x: any tensor, the same on all ranks; dimension dim is the sequence.
        cp_group: the process group.
        dim: the sequence dimension.
        layout, cu_seqlens, packing: as for `ContextParallelPlan`.

    Returns:
        x's local rows, in the order that `context_parallel_attention` expects.

    Raises:
        ValueError: a length that does not divide, bad offsets, a dim out of range, a rank outside of the group.
        TypeError: cp_group is no process group, x no tensor.
    """
    offsets = _check_sequence(x, cu_seqlens)
    return torch.ops.megatron_sb.shard_sequence(
        x, _group_name(cp_group), dim, _text("layout", layout), offsets, _text("packing", packing)
    )


def unshard_sequence(
    x: Tensor,
    cp_group: dist.ProcessGroup,
    dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    packing: str = "per_document",
) -> Tensor:
    """Return the whole sequence of which each rank holds its rows: the inverse of `shard_sequence`.

    A collective. Its backward is the adjoint: the ranks' gradients of the whole are summed in fp32 (fp64 for fp64) and
    each rank gets its rows (a reduce-scatter). A loss that every rank computes from the whole thus counts once for each
    rank; divide it by the number of ranks, or let only one rank's count.

    Args:
        x: this rank's rows, as `shard_sequence` returns them.
        cp_group: the process group.
        dim: the sequence dimension.
        layout, cu_seqlens, packing: as for `ContextParallelPlan`.

    Returns:
        The whole sequence, on every rank.

    Raises:
        ValueError: on every rank where a length does not divide, or the ranks disagree on shape, dtype, layout or
            cu_seqlens; cu_seqlens of the wrong dtype or shape on the rank that has it.
        TypeError: cp_group is no process group, x no tensor.
        RuntimeError: a rank is lost or does not come, within the group's time-out.
    """
    offsets = _check_sequence(x, cu_seqlens)
    return torch.ops.megatron_sb.unshard_sequence(
        x, _group_name(cp_group), dim, _text("layout", layout), offsets, _text("packing", packing)
    )
