"""Context parallelism for models that call `stickbreaking_attention` without any knowledge of other ranks."""

import contextlib
import functools
from collections.abc import Iterator

from torch import Tensor

from megatron_sb.ops import attention
from megatron_sb.ops.context_parallel import ContextParallelPlan, context_parallel_attention, shard_sequence
from megatron_sb.ops.groups import Group
from megatron_sb.validation import check_integer, check_tensor


@contextlib.contextmanager
def shared_sequence(
    plan: ContextParallelPlan,
    *tensors: Tensor,
    dim: int = 1,
    comm: str = "auto",
    hierarchical_groups: tuple[Group, Group] | None = None,
) -> Iterator[tuple[Tensor, ...]]:
    """Let the ranks of a group share one sequence, in a model that needs no change.

    In the `with` block, `stickbreaking_attention` takes and returns the local rows of the plan, and computes
    `context_parallel_attention`. This holds for every thread of the process, and for models of transformers with
    `attn_implementation="stickbreaking"`. Stick-breaking attention needs no positions. So layers that process each row
    separately need no change. Shift labels before they are sharded, because the row after a local row can be on another
    rank. `StickBreakingForCausalLM` raises ValueError for `labels`, because it would shift them itself.

    Sum the gradients of the parameters over the group, as with `context_parallel_attention`. If the model recomputes
    activations in the backward, run the backward in the block too.

    Args:
        plan: the plan of the batch. If it is packed, the model has a batch of one row, which holds all documents.
        tensors: whole tensors, the same on all ranks, such as tokens and labels.
        dim: the dimension of each tensor that counts the rows of the sequence. Default: 1.
        comm, hierarchical_groups: see `context_parallel_attention`.

    Yields:
        The local rows of each tensor.

    Raises:
        ValueError: If the block is inside another one, or a tensor does not have the rows of the plan. In the block, if
            an argument of the attention is invalid, or if it gets other rows than the plan's local ones.
            `stickbreaking_attention_varlen` raises: the documents are those of the plan.
            `stickbreaking_attention_with_kvcache` raises: a cache holds whole sequences.
        TypeError: If plan is not a ContextParallelPlan, one of `tensors` is not a tensor, or dim is no int.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> import megatron_sb as sb
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
        >>> plan = sb.ContextParallelPlan(dist.group.WORLD, seq_len=64)
        >>> with sb.shared_sequence(plan, torch.randn(1, 64, 4, 16)) as (x,):
        ...     sb.stickbreaking_attention(x, x, x).shape
        torch.Size([1, 64, 4, 16])
        >>> dist.destroy_process_group()
    """
    if not isinstance(plan, ContextParallelPlan):
        raise TypeError(f"plan must be a ContextParallelPlan, got {type(plan).__name__}.")
    check_integer("dim", dim)
    if attention.over_ranks is not None:
        raise ValueError(f"shared_sequence must not be inside another one, got {plan!r} inside.")
    for i, x in enumerate(tensors):
        check_tensor(f"tensors[{i}]", x)
    local = tuple(_shard(plan, x, dim) for x in tensors)
    attention.over_ranks = functools.partial(_attend, plan, comm=comm, hierarchical_groups=hierarchical_groups)
    try:
        yield local
    finally:
        attention.over_ranks = None


def shared_plan() -> ContextParallelPlan | None:
    """Return the plan of the `shared_sequence` block that is active, or None."""
    return None if attention.over_ranks is None else attention.over_ranks.args[0]


def _shard(plan: ContextParallelPlan, x: Tensor, dim: int) -> Tensor:
    if -x.dim() <= dim < x.dim() and x.shape[dim] != plan.seq_len:
        raise ValueError(
            f"tensors must have the {plan.seq_len} rows of the plan in dimension {dim}, got {x.shape[dim]}."
        )
    return shard_sequence(x, plan.cp_group, dim, plan.layout, plan.cu_seqlens, plan.packing)


def _attend(plan: ContextParallelPlan, q: Tensor, k: Tensor, v: Tensor, **options):
    """Compute `context_parallel_attention` of q, k and v, (1, local rows, heads, d) also if the plan is packed."""
    rows = (q.shape[1], k.shape[1]) if q.dim() == k.dim() == 4 else None
    if rows is not None and rows != (plan.local_len, plan.local_len):
        raise ValueError(
            f"q and k must have the {plan.local_len} local rows of {plan!r} in shared_sequence, got {rows[0]} and "
            f"{rows[1]}."
        )
    if not plan.packed:
        return context_parallel_attention(q, k, v, plan=plan, **options)
    variants = {name: options[name] for name in ("forget_gate", "query_bias", "key_bias") if options[name] is not None}
    for name, x in {"q": q, "k": k, "v": v, **variants}.items():
        if x.dim() != (3 if name in variants else 4) or x.shape[0] != 1:
            raise ValueError(f"{name} must have a batch of one row if the plan is packed, got shape {tuple(x.shape)}.")
    options |= {name: x[0] for name, x in variants.items()}
    result = context_parallel_attention(q[0], k[0], v[0], plan=plan, **options)
    return tuple(x[None] for x in result) if options["return_mass"] else result[None]
