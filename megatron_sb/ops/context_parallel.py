"""Stick-breaking attention over a sequence that the ranks of a process group share.

A stream of ``seq_len`` rows is split over the ranks of a group. It is one document, or several packed documents.

- ``layout="zigzag"`` splits the stream into 2 * ranks chunks. Rank r holds chunks r and 2 * ranks - 1 - r.
- ``layout="contiguous"`` splits the stream into as many chunks as ranks. Rank r holds chunk r.
- ``layout="balanced"`` splits the stream at any row, so that ranks have nearly equal work. Rank r holds several ranges
  of rows, in the order of the stream.
- With ``cu_seqlens``, ``packing="per_document"`` splits every document in this way, as Megatron and Transformer Engine
  do. ``packing="whole_stream"`` splits the stream as a whole, at places that do not depend on the documents. A balanced
  layout does not use the packing.

The stream and its documents can have any length. If a length cannot be divided equally, some chunks get one row more.
The next document continues with the next chunk, so the numbers of rows of two ranks differ by at most one. Rows after
the last document belong to no document. They are split like one more document.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megatron_sb.ops import attention
from megatron_sb.ops.graph_breaks import outside_graphs
from megatron_sb.ops.groups import Group, hierarchical_pair, process_group
from megatron_sb.ops.received_bytes import ReceivedBytes, Sizes, received_bytes
from megatron_sb.options import DEFAULT_MASS_THRESHOLD, LOGITS, check_option_types
from megatron_sb.validation import check_choice, check_flag, check_integer, check_optional_tensors, check_tensor


def _offsets(cu_seqlens: object) -> tuple[list[int] | None, str]:
    """Return cu_seqlens as a list, and an error message or "". A GPU tensor is copied to the host."""
    if cu_seqlens is None:
        return None, ""
    if not isinstance(cu_seqlens, Tensor):
        return None, f"cu_seqlens must be an int32 torch.Tensor, got {type(cu_seqlens).__name__}."
    if cu_seqlens.dtype != torch.int32:
        return None, f"cu_seqlens must have dtype torch.int32, got {cu_seqlens.dtype}."
    if cu_seqlens.dim() != 1:
        return None, f"cu_seqlens must have shape (documents + 1,), got {cu_seqlens.dim()} dimensions."
    if cu_seqlens.layout is not torch.strided or cu_seqlens.is_meta or is_fake(cu_seqlens):
        got = f"{type(cu_seqlens).__name__} on {cu_seqlens.device} with layout {cu_seqlens.layout}"
        return None, f"cu_seqlens must be a dense tensor that holds its values, got {got}."
    return cu_seqlens.tolist(), ""


def _length_error(name: str, value: object, smallest: int) -> str:
    """Return an error message if a length has a wrong type or is out of range, or ""."""
    if value is None:
        return ""
    if not isinstance(value, int) or isinstance(value, bool):
        return f"{name} must be an int, got {value!r}."
    return "" if smallest <= value < 2**31 else f"{name} must be from {smallest} to 2^31 - 1, got {value}."


def _lengths_error(seq_len: object, local_len: object, offsets: list[int] | None) -> str:
    """Return an error message if the lengths of a plan are invalid or contradict each other, or ""."""
    if error := _length_error("seq_len", seq_len, 1) or _length_error("local_len", local_len, 0):
        return error
    if seq_len is not None and local_len is not None:
        return f"local_len must be None if seq_len is given, got {local_len} and seq_len {seq_len}."
    if offsets is None:
        return ""
    if not offsets:
        return "cu_seqlens must have documents + 1 entries, got none."
    if seq_len is None and local_len is None and offsets[-1] < 1:
        return f"cu_seqlens must end at 1 or later if seq_len is not given, got cu_seqlens[-1] = {offsets[-1]}."
    return ""


def _text(name: str, value: object) -> str:
    """Return value if it is a string, else a text that names it: operators take only strings, and reject this one."""
    return value if isinstance(value, str) else f"{name}={value!r}"


class ContextParallelPlan:
    """Hold the lengths and the segment tables of one batch. The ranks have agreed on them.

    Make one plan for each batch, and pass it to all layers. The constructor is a collective over the group: the ranks
    check the lengths and agree on all arguments. Later calls with the plan neither wait for the device nor exchange
    shapes, except for the first call of the group with new shapes or options.

    Args:
        cp_group: the process group, or a `DeviceMesh` with one dimension. Every rank of it must make the plan.
        seq_len: rows of the whole stream. Required without cu_seqlens or local_len. Default: cu_seqlens[-1].
        cu_seqlens: int32, (documents + 1,), offsets of the documents in the whole stream, the same on all ranks. The
            first entry is 0. If documents are padded, these are the padded offsets. A GPU tensor is copied to the host.
            Default: None, one document.
        layout: "zigzag", "contiguous" or "balanced". Default: "zigzag".
        packing: "per_document" or "whole_stream". Not used without cu_seqlens, or with layout "balanced". Default:
            "per_document".
        equal_chunks: whether to raise an error if seq_len, or with "per_document" the length of a document, cannot be
            divided into equal chunks. Set it if other code cuts the stream and needs such lengths, as Megatron's data
            loaders do. Default: False.
        local_len: rows of this rank. Give it instead of seq_len, which is then the sum over the ranks. Default: None.

    Attributes:
        cp_group: the process group.
        cu_seqlens: the offsets on the CPU, or None.
        rank: this rank in cp_group.
        size: number of ranks.
        seq_len: rows of the whole stream.
        local_len: rows of this rank: seq_len / size, on some ranks one more.
        key_rows: rows of keys that this rank has with "all_gather". It is seq_len, or only the rows that its queries
            attend to, if all ranks together then receive less than half as many rows.
        key_rows_p2p: the same with "p2p": seq_len if chunks of keys move around the ring.
        packed: whether the plan was made with cu_seqlens.
        layout: see Args.
        packing: see Args.

    Raises:
        ValueError: On every rank, if any rank finds that
            - seq_len, or a document, does not divide into equal chunks, with equal_chunks;
            - offsets do not start at 0, decrease, or end beyond seq_len;
            - an argument has another invalid value, or differs between the ranks.
            On this rank alone, if it is not in the group.
        TypeError: If cp_group is neither a process group nor a DeviceMesh.
        RuntimeError: If another rank is lost, or does not make the plan before the timeout of the group.

    Example:
        >>> import torch.distributed as dist
        >>> import megatron_sb as sb
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
        >>> plan = sb.ContextParallelPlan(dist.group.WORLD, seq_len=64)
        >>> plan
        ContextParallelPlan(rank 0 of 1, seq_len=64, layout='zigzag', local_len=64, key_rows=64, key_rows_p2p=64)
        >>> dist.destroy_process_group()
    """

    @outside_graphs
    def __init__(
        self,
        cp_group: Group,
        seq_len: int | None = None,
        cu_seqlens: Tensor | None = None,
        layout: str = "zigzag",
        packing: str = "per_document",
        equal_chunks: bool = False,
        local_len: int | None = None,
    ) -> None:
        offsets, error = _offsets(cu_seqlens)
        error = error or _lengths_error(seq_len, local_len, offsets)
        if not error and not isinstance(equal_chunks, bool):
            error = f"equal_chunks must be True or False, got {equal_chunks!r}."
        if error:
            seq_len = local_len = None  # the operator takes only integers of 64 bits; it raises the error
        layout, packing = _text("layout", layout), _text("packing", packing)
        self.cp_group = process_group(cp_group)
        self.state = torch.classes.megatron_sb.ContextParallelPlan(
            self.cp_group.group_name,
            seq_len,
            offsets,
            layout,
            packing,
            error,
            local_len,
            equal_chunks is True,
        )
        self.cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device="cpu")
        self.rank: int = self.state.rank()
        self.size: int = self.state.size()
        self.seq_len: int = self.state.seq_len()
        self.local_len: int = self.state.local_len()
        self.packed: bool = self.state.packed()
        self.layout: str = self.state.layout()
        self.packing: str = self.state.packing()

    @property
    def key_rows(self) -> int:
        """Return the rows of keys that this rank has with "all_gather". It is computed at each access."""
        return self.state.key_rows()

    @property
    def key_rows_p2p(self) -> int:
        """Return the rows of keys that this rank has with "p2p", one after another. It is computed at each access."""
        return self.state.key_rows_p2p()

    def received_bytes(
        self,
        comm: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        batch_size: int = 1,
        a2a_size: int | None = None,
    ) -> ReceivedBytes:
        """Return how many bytes this rank receives from other ranks in one layer. It is computed at each call.

        The count includes keys, values and their gradients, and with "a2a" and "a2a+p2p" also queries, outputs and
        their gradients. It does not include the mass of `return_mass` and the extra columns of gates and biases. A
        gather or a reduce-scatter counts the parts of the other ranks once, as in a ring of NCCL.

        Args:
            comm: "p2p", "all_gather", "a2a" or "a2a+p2p", see `context_parallel_attention`.
            num_heads: query heads.
            num_kv_heads: KV heads.
            head_dim: channels of q and k.
            head_dim_v: channels of v. Default: head_dim.
            dtype: of q, k and v. Default: torch.bfloat16.
            batch_size: sequences of a batch. 1 if the plan is packed. Default: 1.
            a2a_size: ranks of the a2a group. Required with "a2a+p2p". Default: None.

        Returns:
            (forward, backward), a named tuple of two ints.

        Raises:
            ValueError: If an argument has an invalid value, or the heads cannot be exchanged.
            TypeError: If dtype is not a floating-point dtype.

        Example:
            >>> import torch.distributed as dist
            >>> import megatron_sb as sb
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
            >>> plan = sb.ContextParallelPlan(dist.group.WORLD, seq_len=64)
            >>> plan.received_bytes("all_gather", num_heads=4, num_kv_heads=2, head_dim=16)  # there is no other rank
            ReceivedBytes(forward=0, backward=0)
            >>> dist.destroy_process_group()
        """
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = Sizes(num_heads, num_kv_heads, head_dim, head_dim_v, dtype, batch_size)
        return received_bytes(self, comm, sizes, a2a_size)

    def __repr__(self) -> str:
        """Return the rank, the group's size, the arguments, and the rows of this rank and of its keys."""
        packing = f", packing={self.packing!r}" if self.packed and self.layout != "balanced" else ""
        return (
            f"ContextParallelPlan(rank {self.rank} of {self.size}, seq_len={self.seq_len}, "
            f"layout={self.layout!r}{packing}, local_len={self.local_len}, key_rows={self.key_rows}, "
            f"key_rows_p2p={self.key_rows_p2p})"
        )


def _make_plan(
    q: object, cp_group: Group | None, layout: str, cu_seqlens: Tensor | None, packing: str
) -> ContextParallelPlan:
    if cp_group is None:
        raise ValueError("cp_group or plan must be given, got neither.")
    check_tensor("q", q)
    rank = 4 if cu_seqlens is None else 3
    if q.dim() != rank:
        shape = "(b, s_local, h, d)" if cu_seqlens is None else "(t_local, h, d) with cu_seqlens"
        raise ValueError(f"q must have {rank} dimensions, {shape}, got {q.dim()}.")
    return ContextParallelPlan(cp_group, None, cu_seqlens, layout, packing, local_len=q.shape[rank - 3])


def _check_plan(
    plan: object,
    cp_group: Group | None,
    layout: str,
    cu_seqlens: Tensor | None,
    packing: str,
) -> None:
    if not isinstance(plan, ContextParallelPlan):
        raise TypeError(f"plan must be a ContextParallelPlan, got {type(plan).__name__}.")
    if cp_group is not None and process_group(cp_group).group_name != plan.state.group_name():
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


@outside_graphs
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp_group: Group | None = None,
    *,
    plan: ContextParallelPlan | None = None,
    comm: str = "auto",
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    packing: str = "per_document",
    hierarchical_groups: tuple[Group, Group] | None = None,
    return_mass: bool = False,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = DEFAULT_MASS_THRESHOLD,
    logits: str = "dot",
    forget_gate: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    reach: tuple[float, float] | None = None,
) -> attention.Result:
    """Compute the attention over a sequence that the ranks of a group share.

    Every rank calls the function with its local rows and gets the outputs of these rows. Outputs and gradients equal
    those of one rank with the whole sequence, up to rounding and up to what is skipped.

    A call without a plan makes a plan, which is a collective and copies cu_seqlens to the host. In the first call of a
    group with new shapes or options, the ranks check that they agree on them. Later calls with these shapes and options
    are known, and do not check. If one rank makes a known call and another rank a new call, both wait for each other
    until the timeout of the group. Partial outputs, masses and summed gradients are sent in fp32 (fp64 for fp64). The
    function can be differentiated once. Its backward is a collective too.

    Memory in addition to the local tensors:

    - "p2p" keeps about 8 * ranks bytes for each local row and head. With zigzag it also keeps two fp32 partial outputs
      of half of the rows (of nearly all rows if many documents are packed per_document). A ring has two lanes, which
      move in opposite directions. For each lane it holds two chunks of keys, and in the backward three chunks of fp32
      gradients.
    - "all_gather" holds the keys and values of the whole sequence for up to two groups of heads, in the backward with
      their fp32 gradients. A group is a quarter of the KV heads, at least one, and below 32768 rows all of them.
    - "a2a" keeps the exchanged queries, keys and values for the backward. They take as much memory as the local ones,
      which it does not keep.

    In "p2p" zigzag, a rank processes its keys in up to three runs, each from newest to oldest, and combines the runs at
    the end. Within a run, the forward skips keys by the mass of that run alone. Runs are combined from newest to
    oldest: once the mass of a row is below mass_threshold (or is 0, with mass_threshold=0), the row takes nothing from
    older runs. A NaN among the keys or values of those runs does not reach the row.

    Args:
        q: (b, s_local, h, d), or packed (t_local, h, d) with cu_seqlens. dtypes and sizes as in
            `stickbreaking_attention`.
        k: (b, s_local, h_kv, d), or packed (t_local, h_kv, d), in q's dtype.
        v: (b, s_local, h_kv, d_v), or packed (t_local, h_kv, d_v), in q's dtype.
        cp_group: the process group, or a `DeviceMesh` with one dimension. Required without a plan.
        plan: a plan for this batch. It holds layout, cu_seqlens and packing; cu_seqlens must then be None, and layout
            and packing must have their default or the plan's value. Default: None, make a plan.
        comm: how this rank gets the keys that its queries attend to.
            - "p2p": chunks of keys move around the ring of ranks. If each rank needs few keys, as with short documents,
              only these keys are sent, directly from rank to rank.
            - "all_gather": the keys of all ranks are gathered, one group of heads at a time.
            - "a2a": the ranks exchange heads for rows, so that each rank has all rows of its share of the heads. To
              exchange heads between n ranks, h must be a multiple of n, and h_kv a multiple or a divisor of n. With
              fewer KV heads than ranks, each KV head goes to several ranks.
            - "a2a+p2p": "a2a" within the a2a group, and "p2p" over the p2p group.
            - "auto": the first of these modes whose condition holds. "all_gather" if the layout is "balanced" and each
              rank receives at most 9/8 of what it would receive with "a2a". "a2a" if the heads can be exchanged and a
              rank's share has at least 32768 rows (its heads times the rows of the sequence). "all_gather" if the
              gathered keys and values take at most 1 GiB at a time, or if the layout is "balanced". Else "p2p".
            With the layout "balanced" there is no ring, and "p2p" does the same as "all_gather". Default: "auto".
        layout, cu_seqlens, packing: see `ContextParallelPlan`.
        hierarchical_groups: (a2a group, p2p group) of this rank for "a2a+p2p", as Megatron makes them: rank in the
            context-parallel group = rank in the p2p group * size of the a2a group + rank in the a2a group. Each can be
            a `DeviceMesh` with one dimension. Default: None.
        return_mass: whether to return the mass as well. Default: False.
        scale, attend_current, mass_threshold, logits, reach: see `stickbreaking_attention`.
        forget_gate: f of the local keys, (b, s_local, h_kv) or (t_local, h_kv). See `stickbreaking_attention`.
        query_bias: of the local queries, (b, s_local, h) or (t_local, h). See `stickbreaking_attention`.
        key_bias: of the local keys, (b, s_local, h_kv) or (t_local, h_kv). See `stickbreaking_attention`.

    Returns:
        o, (b, s_local, h, d_v) or (t_local, h, d_v), in q's dtype. With return_mass, (o, mass), where mass
        (b, h, s_local) or (h, t_local) is fp32 (fp64 for fp64). Rows after the last document have o = 0, mass = 1 and
        zero gradients.

    Raises:
        ValueError: If an argument has an invalid value, comm does not support the layout, or the ranks disagree. While
            a plan is made, and in a call that is new on every rank, an error on one rank is raised on every rank. A
            rank that makes a known call raises the error after the timeout of the group (gloo). Four errors are raised
            only on this rank at any time: a wrong number of dimensions of q without a plan, a plan that contradicts
            other arguments, unknown logits, and hierarchical_groups that are not two groups of the right ranks.
        TypeError: If an argument has a wrong type, or is a tensor that holds no elements, such as a DTensor or a
            FakeTensor, on the rank that has it.
        RuntimeError: If another rank is lost, or does not call the function before the timeout of the group. Or if the
            group of the plan was destroyed. In the backward, also if the ranks disagree.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> import megatron_sb as sb
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
        >>> q, k, v = (torch.randn(1, 64, 4, 16) for _ in range(3))  # the local rows of one sequence
        >>> plan = sb.ContextParallelPlan(dist.group.WORLD, seq_len=64 * dist.get_world_size())
        >>> sb.context_parallel_attention(q, k, v, plan=plan).shape
        torch.Size([1, 64, 4, 16])
        >>> dist.destroy_process_group()
    """
    if plan is None:
        plan = _make_plan(q, cp_group, layout, cu_seqlens, packing)
    else:
        _check_plan(plan, cp_group, layout, cu_seqlens, packing)
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
    # The operator checks the values of scale, mass_threshold and reach, so that the error is raised on every rank.
    check_option_types(scale, attend_current, mass_threshold, reach)
    check_flag("return_mass", return_mass)
    check_choice("logits", logits, LOGITS)
    variants = {"forget_gate": forget_gate, "query_bias": query_bias, "key_bias": key_bias}
    check_optional_tensors(variants)
    pair = hierarchical_pair(hierarchical_groups, comm, plan.cp_group)
    heads_group, keys_group = ("", "") if pair is None else (group.group_name for group in pair)
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
        **variants,
        euclidean=logits == "euclidean",
        reach=reach,
    )
    return (o, mass) if return_mass else o


def _check_sequence(x: object, dim: object, cu_seqlens: Tensor | None) -> list[int] | None:
    check_tensor("x", x)
    check_integer("dim", dim)
    offsets, error = _offsets(cu_seqlens)
    if error:
        raise ValueError(error)
    return offsets


@outside_graphs
def shard_positions(
    num_ranks: int,
    seq_len: int,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    packing: str = "per_document",
) -> Tensor:
    """Return which rows of a whole sequence each rank holds.

    The function needs no process group, so that a data loader can call it in a worker process.

    Args:
        num_ranks: number of ranks that share the sequence.
        seq_len, layout, cu_seqlens, packing: see `ContextParallelPlan`. seq_len is required.

    Returns:
        int64, (num_ranks, largest number of rows of a rank), on the CPU. Entry (r, i) is the position of local row i of
        rank r in the whole sequence. If a rank has one row less, its last entry is -1.

    Raises:
        ValueError: If an argument is invalid.
        TypeError: If num_ranks or seq_len is no int.

    Example:
        >>> from megatron_sb.ops.context_parallel import shard_positions
        >>> shard_positions(2, 8)
        tensor([[0, 1, 6, 7],
                [2, 3, 4, 5]])
        >>> shard_positions(2, 5, "contiguous")
        tensor([[ 0,  1,  2],
                [ 3,  4, -1]])
    """
    for name, value, bits in (("num_ranks", num_ranks, 30), ("seq_len", seq_len, 31)):
        check_integer(name, value)
        if not 1 <= value < 2**bits:
            raise ValueError(f"{name} must be from 1 to 2^{bits} - 1, got {value}.")
    offsets, error = _offsets(cu_seqlens)
    if error:
        raise ValueError(error)
    return torch.ops.megatron_sb.shard_positions(
        num_ranks, seq_len, _text("layout", layout), offsets, _text("packing", packing)
    )


@outside_graphs
def shard_sequence(
    x: Tensor,
    cp_group: Group,
    dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    packing: str = "per_document",
) -> Tensor:
    """Return this rank's rows of a whole sequence.

    The forward does not communicate. The backward is a collective: it gathers the gradients of all ranks. Every rank
    then has the gradient of the sum of all ranks' losses with respect to x, as with Megatron's scatter to a
    sequence-parallel region. The function can be differentiated once.

    Args:
        x: the whole sequence, the same on all ranks.
        cp_group: the process group, or a `DeviceMesh` with one dimension.
        dim: dimension of x that counts the rows of the sequence. Default: 1.
        layout, cu_seqlens, packing: see `ContextParallelPlan`.

    Returns:
        The local rows of x, in the order that `context_parallel_attention` expects. `shard_positions` returns where
        each of them is in the whole sequence.

    Raises:
        ValueError: If offsets or dim are invalid, x has no rows, or this rank is not in the group.
        TypeError: If cp_group is neither a process group nor a DeviceMesh, x is not a tensor or holds no elements, such
            as a DTensor, or dim is no int.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> import megatron_sb as sb
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
        >>> sb.shard_sequence(torch.randn(1, 64, 8), dist.group.WORLD).shape  # all rows of one rank
        torch.Size([1, 64, 8])
        >>> dist.destroy_process_group()
    """
    offsets = _check_sequence(x, dim, cu_seqlens)
    return torch.ops.megatron_sb.shard_sequence(
        x, process_group(cp_group).group_name, dim, _text("layout", layout), offsets, _text("packing", packing)
    )


@outside_graphs
def unshard_sequence(
    x: Tensor,
    cp_group: Group,
    dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    packing: str = "per_document",
) -> Tensor:
    """Return the whole sequence from the rows of all ranks. This is the inverse of `shard_sequence`.

    The function is a collective, and so is its backward. The backward sums the gradients of all ranks in fp32 (fp64 for
    fp64) and returns to each rank its rows (a reduce-scatter). So if every rank computes the same loss from the whole
    sequence, this loss counts once for each rank: divide it by the number of ranks, or multiply it by 0 on all ranks
    except one. If a rank does not run the backward, the other ranks wait until the timeout of the group. The function
    can be differentiated once.

    Args:
        x: this rank's rows, as `shard_sequence` returns them.
        cp_group: the process group, or a `DeviceMesh` with one dimension.
        dim: dimension of x that counts the rows of the sequence. Default: 1.
        layout, cu_seqlens, packing: see `ContextParallelPlan`.

    Returns:
        The whole sequence, on every rank.

    Raises:
        ValueError: On every rank, if offsets or dim are invalid, or a rank has more or fewer rows than
            `shard_sequence` returns. Or if the ranks disagree on the other sizes or the dtype of x, dim, layout,
            packing or cu_seqlens. On this rank alone, if its cu_seqlens has a wrong type, dtype or number of
            dimensions.
        TypeError: If cp_group is neither a process group nor a DeviceMesh, x is not a tensor or holds no elements, such
            as a DTensor, or dim is no int.
        RuntimeError: If another rank is lost, or does not call the function before the timeout of the group.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> import megatron_sb as sb
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
        >>> whole = torch.randn(1, 64, 8)
        >>> local = sb.shard_sequence(whole, dist.group.WORLD)
        >>> torch.equal(sb.unshard_sequence(local, dist.group.WORLD), whole)
        True
        >>> dist.destroy_process_group()
    """
    offsets = _check_sequence(x, dim, cu_seqlens)
    return torch.ops.megatron_sb.unshard_sequence(
        x, process_group(cp_group).group_name, dim, _text("layout", layout), offsets, _text("packing", packing)
    )
