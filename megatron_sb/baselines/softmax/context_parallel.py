"""Softmax attention over a sequence that the ranks of a process group share.

The plan is that of stick-breaking attention (`megatron_sb.ops.context_parallel`), so both kinds of layers of a model
take the same local rows. shards.py says which blocks of queries and keys a rank computes, blocks.py computes them, and
exchange.py moves keys, values and heads between ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megatron_sb.baselines.autocast import without_autocast
from megatron_sb.baselines.softmax import kernels
from megatron_sb.baselines.softmax.attention import SoftmaxAttention, cast_by_autocast
from megatron_sb.baselines.softmax.blocks import RowGradients, Sums, block_backward, block_forward
from megatron_sb.baselines.softmax.exchange import Gathered, Ring, exchange_heads, exchange_rows
from megatron_sb.baselines.softmax.forget_gates import CHANNELS, append_gate_channels, gate_channels
from megatron_sb.baselines.softmax.positions import rotary_cos_sin, rotate
from megatron_sb.baselines.softmax.shards import Shards, shards_of
from megatron_sb.baselines.softmax.stable_mask import pseudo_lse
from megatron_sb.ops.context_parallel import ContextParallelPlan, unshard_sequence
from megatron_sb.ops.graph_breaks import outside_graphs
from megatron_sb.ops.groups import Group, exchange_problem, hierarchical_pair, process_group
from megatron_sb.options import COMMS
from megatron_sb.validation import check_choice, check_tensor

MAX_GATHERED_BYTES = 2**30  # of keys and values that "auto" gathers


@outside_graphs
def context_parallel_softmax(
    attention: SoftmaxAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gates: Tensor | None = None,
    *,
    plan: ContextParallelPlan,
    comm: str = "auto",
    hierarchical_groups: tuple[Group, Group] | None = None,
) -> Tensor:
    """Compute softmax attention over a sequence that the ranks of a group share.

    Every rank calls the function with its local rows and gets their outputs. Outputs and gradients equal those of
    `attention` on one rank with the whole sequence, up to rounding. Positions, windows, StableMask and forget gates
    count the rows of the whole document. All layouts of the plan support all modes.

    The function is a collective, and so is its backward. The ranks must pass equal shapes, dtypes and options: this is
    not checked. Gradients of FIRE's parameters are those of this rank's rows or heads; sum them over the ranks. The
    function can be differentiated once.

    Args:
        attention: the module with the options of the attention.
        q: (b, s_local, h, d), or packed (t_local, h, d) if the plan has cu_seqlens. dtypes and sizes as in
            `SoftmaxAttention.forward`.
        k: (b, s_local, h_kv, d), or packed (t_local, h_kv, d), in q's dtype.
        v: of k's shape, in q's dtype.
        log_gates: log f of the forget gate of each local key, (b, s_local, h_kv), or packed (t_local, h_kv), fp32 or
            fp64. Must be None with StableMask. Default None: no gates.
        plan: the plan of the batch.
        comm: how a rank gets the keys that its queries see.
            - "p2p": keys and values move around the ring of ranks. Each rank folds the blocks of its rows by their
              log-sum-exp.
            - "all_gather": the keys and values of all ranks are gathered, again in the backward.
            - "a2a": the ranks exchange heads for rows, so that each rank has all rows of its share of the heads, and
              computes them with the kernels of one rank. To exchange heads between n ranks, h must be a multiple of n,
              and h_kv a multiple or a divisor of n.
            - "a2a+p2p": "a2a" within the a2a group, and "p2p" over the p2p group.
            - "auto": "a2a" if the heads can be exchanged; else "all_gather" if the gathered keys and values take at
              most 1 GiB; else "p2p".
        hierarchical_groups: (a2a group, p2p group) of this rank for "a2a+p2p"; see
            `megatron_sb.context_parallel_attention`. Default None.

    Returns:
        A tensor of q's shape and dtype. Rows after the last document have o = 0 and zero gradients.

    Raises:
        ValueError: if an argument has the wrong shape or value, the plan's group was destroyed, or the heads cannot be
            exchanged. It is raised on this rank alone: other ranks that go on wait until the timeout of the group.
        TypeError: if an argument has the wrong type, dtype or device, on the rank that has it.
        RuntimeError: if another rank is lost, or does not call the function before the timeout of the group (gloo).

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> import megatron_sb as sb
        >>> from megatron_sb.baselines.softmax import SoftmaxAttention, context_parallel_softmax
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
        >>> plan = sb.ContextParallelPlan(dist.group.WORLD, seq_len=64 * dist.get_world_size())
        >>> q, k, v = (torch.randn(1, 64, heads, 16) for heads in (4, 2, 2))  # the local rows of one sequence
        >>> context_parallel_softmax(SoftmaxAttention(num_heads=4, head_dim=16), q, k, v, plan=plan).shape
        torch.Size([1, 64, 4, 16])
        >>> dist.destroy_process_group()
    """
    if not isinstance(attention, SoftmaxAttention):
        raise TypeError(f"attention must be a SoftmaxAttention, got {type(attention).__name__}.")
    if not isinstance(plan, ContextParallelPlan):
        raise TypeError(f"plan must be a ContextParallelPlan, got {type(plan).__name__}.")
    process_group(plan.cp_group, "the plan's cp_group")  # it may be destroyed
    check_choice("comm", comm, COMMS)
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
    q, k, v = (cast_by_autocast(x) for x in (q, k, v))
    min_tokens = min(1, plan.local_len)  # a rank of a short stream may have none
    attention.check_inputs(q, k, v, packed=plan.packed, offsets="the plan's cu_seqlens", min_tokens=min_tokens)
    if q.shape[-3] != plan.local_len:
        raise ValueError(f"q must have the {plan.local_len} local rows of {plan!r}, got {q.shape[-3]}.")
    if log_gates is not None:
        attention.check_gates(log_gates, k)
    comm = _chosen(comm, q, k, plan)
    head_group, key_group = _groups(comm, plan, hierarchical_groups)
    exchanging = 1 if head_group is None else dist.get_world_size(head_group)
    _check_heads(q.shape[-2], k.shape[-2], exchanging, comm)
    if plan.packed:
        q, k, v, log_gates = (None if x is None else x[None] for x in (q, k, v, log_gates))
    with without_autocast(q):
        shards = shards_of(plan, exchanging)
        q, k, v = _with_positions(attention, q, k, v, log_gates, plan, shards)
        o = _attend(attention, q, k, v, shards, comm, head_group, key_group)
        o = o if log_gates is None else o[..., :-CHANNELS]
    return o[0] if plan.packed else o


def _chosen(comm: str, q: Tensor, k: Tensor, plan: ContextParallelPlan) -> str:
    """Return the mode that "auto" stands for."""
    if comm != "auto":
        return comm
    if not exchange_problem(q.shape[-2], k.shape[-2], plan.size):
        return "a2a"
    batch = 1 if plan.packed else k.shape[0]  # not the local rows, which differ between ranks
    num_bytes = 2 * batch * plan.seq_len * k.shape[-2] * k.shape[-1] * k.element_size()
    return "all_gather" if num_bytes <= MAX_GATHERED_BYTES else "p2p"


def _groups(
    comm: str, plan: ContextParallelPlan, hierarchical_groups: object
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the groups that exchange heads, and keys. None: no exchange."""
    pair = hierarchical_pair(hierarchical_groups, comm, plan.cp_group)
    if comm != "a2a+p2p":
        group = plan.cp_group if plan.size > 1 else None
        return (group, None) if comm == "a2a" else (None, group)
    if pair is None:
        raise ValueError(
            "hierarchical_groups must be two groups, (a2a group, p2p group), with comm 'a2a+p2p', got None."
        )
    head_group, key_group = (group if dist.get_world_size(group) > 1 else None for group in pair)
    return head_group, key_group


def _check_heads(num_heads: int, num_kv_heads: int, num_ranks: int, comm: str) -> None:
    if problem := exchange_problem(num_heads, num_kv_heads, num_ranks):
        raise ValueError(
            f"comm {comm!r} exchanges heads between {num_ranks} ranks: {problem}. Use 'all_gather' or 'p2p'."
        )


def _with_positions(
    attention: SoftmaxAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gates: Tensor | None,
    plan: ContextParallelPlan,
    shards: Shards,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q (b, s, h, d) and k, and append the channels of the gates, by the positions of the local rows."""
    rows = shards.indices(q.device).local
    if attention.position == "rope":
        sizes = (attention.head_dim, attention.rotary_base, attention.scaling)
        cos, sin = (x[rows] for x in rotary_cos_sin(shards.all_lengths, *sizes, q.dtype, q.device))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if log_gates is not None:
        # A gate reaches the channels of all later keys of its document, which other ranks may hold.
        whole = unshard_sequence(log_gates, plan.cp_group, 1, plan.layout, plan.cu_seqlens, plan.packing)
        channels = gate_channels(whole, shards.all_lengths, attention.scale, q.dtype)
        q, k, v = append_gate_channels(q, k, v, channels.index_select(1, rows))
    return q, k, v


def _attend(
    attention: SoftmaxAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    comm: str,
    head_group: dist.ProcessGroup | None,
    key_group: dist.ProcessGroup | None,
) -> Tensor:
    """Compute q (b, s, h, d), k and v (b, s, h_kv, d), the local rows, with the scores of `attention`."""
    if not shards.num_rows:  # a product with 0 would keep a NaN
        o, *others = (x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0) for x in (q, k, v))
        return o + sum(x.sum() for x in others)
    scores, indices = attention.scores(max(shards.lengths)), shards.indices(q.device)
    if head_group is not None:
        share = q.shape[2] // dist.get_world_size(head_group)
        first = share * dist.get_rank(head_group)
        scores = scores.of_heads(first, first + share)
        q, k, v = exchange_heads(q, k, v, head_group, shards)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if key_group is None:
        documents = (x[:, :, : shards.num_rows] for x in (q, k, v))
        o = kernels.attend(*documents, shards.lengths, scores)
        o = pad(o, (0, 0, 0, q.shape[2] - shards.num_rows))
    else:
        transport = (Gathered if comm == "all_gather" else Ring)(key_group, shards, scores.window)
        o, lse = _SharedKeys.apply(q, k, v, transport, scores, *scores.parameters)
        if scores.stable_mask_gammas is not None:
            pseudo = pseudo_lse(scores.stable_mask_gammas, shards.all_lengths, q.device)
            pseudo = pseudo[:, indices.member].to(lse.dtype)
            o = (o * (lse - pseudo).sigmoid()[..., None]).to(q.dtype)
    o = o.transpose(1, 2)
    return o if head_group is None else exchange_rows(o, head_group, shards)


class _SharedKeys(torch.autograd.Function):
    """Attention of this member's queries to the keys of all members.

    q: (b, h, s, d). k, v: (b, h_kv, s, d). The outputs are o, (b, h, s, d) in q's dtype, and the log-sum-exp, (b, h, s)
    in fp32 (fp64 for fp64), 0 in rows that see no key.
    """

    @staticmethod
    def forward(ctx, q, k, v, transport, scores, *parameters):
        sums = Sums(q)
        for (keys, values), blocks in transport.shards(torch.stack((k, v))):
            for block in blocks:
                sums.add(block.rows, *block_forward(q, keys, values, block, scores))
        o, lse = sums.o.to(q.dtype), sums.lse
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.transport, ctx.scores = transport, scores
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, o, lse = (x.detach() for x in ctx.saved_tensors)
        delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1) - dlse
        of_rows = RowGradients(o, lse, do.contiguous(), delta)
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        dparameters = [torch.zeros_like(parameter) for parameter in ctx.scores.parameters]

        def add(kv, dkv, blocks):
            for block in blocks:
                dq_here, dk, dv, parts = block_backward(q, *kv, of_rows, block, ctx.scores)
                dq[:, :, block.rows] += dq_here
                dkv[0][:, :, block.keys] += dk
                dkv[1][:, :, block.keys] += dv
                for total, part in zip(dparameters, parts, strict=True):
                    total += part

        with without_autocast(q):
            dk, dv = ctx.transport.gradients(torch.stack((k, v)), add)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, *dparameters
