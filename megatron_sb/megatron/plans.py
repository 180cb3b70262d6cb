"""Cache the context-parallel plan of a batch, which all layers of a model share."""

from __future__ import annotations

from collections import OrderedDict

import torch
from megatron.core import parallel_state

from megatron_sb.ops.context_parallel import ContextParallelPlan
from megatron_sb.ops.snapshot import Snapshot


def hierarchical_levels(groups) -> tuple:
    """Return the levels of this rank's context-parallel groups for "a2a+p2p": the a2a group, then the p2p group.

    Args:
        groups: a collection of Megatron's process groups, or None. Without levels in it, `parallel_state` is
            asked.

    Returns:
        As many groups as there are levels, none if Megatron has not made them.
    """
    levels = getattr(groups, "hcp", None)
    if levels is None:
        levels = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    return tuple(levels or ())


class PlanCache:
    """Keep the latest context-parallel plans.

    Megatron's data loaders cut documents into equal chunks, so other lengths raise an error. They do not make packed
    batches of the layout "balanced": these may have any length, and the ranks numbers of rows that differ by one.

    A plan is reused while the group, the local rows, the layout and the packing are the same. `cu_seqlens` must also be
    the same tensor object and hold the same values. On a GPU, a write that torch counts makes a new plan. Torch does
    not count writes by collectives, by CUDA graphs and through `.data`: after such a write, the device stops with an
    error (`megatron_sb.ops.snapshot`). Torch counts no writes to inference tensors, so each call with one makes a new
    plan.

    Making a plan is a collective. The ranks of a group run the same layers on the same batches, so they make plans at
    the same calls. The cache holds references to process groups and `cu_seqlens` until `clear`.

    Args:
        capacity: number of plans to keep. It should be at least the number of micro-batches that a pipeline has in
            flight. A plan that was dropped is made again. Default 16.

    Example:
        >>> import torch.distributed as dist
        >>> from megatron_sb.megatron.plans import PlanCache
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
        >>> plans = PlanCache()
        >>> arguments = {"local_len": 64, "cu_seqlens": None, "layout": "zigzag", "packing": "per_document"}
        >>> plans.get(dist.group.WORLD, **arguments) is plans.get(dist.group.WORLD, **arguments)
        True
        >>> plans.clear()
        >>> dist.destroy_process_group()
    """

    def __init__(self, capacity: int = 16):
        self.capacity = capacity
        self._plans: OrderedDict[tuple, tuple] = OrderedDict()

    def get(
        self,
        cp_group: torch.distributed.ProcessGroup,
        *,
        local_len: int,
        cu_seqlens: torch.Tensor | None,
        layout: str,
        packing: str,
    ) -> ContextParallelPlan:
        """Return the plan for these arguments of `ContextParallelPlan`. All ranks of the group must call this."""
        arguments = {"cu_seqlens": cu_seqlens, "layout": layout, "packing": packing}
        if layout == "balanced" and cu_seqlens is not None:
            arguments["local_len"] = local_len
        else:
            arguments |= {"seq_len": local_len * cp_group.size(), "equal_chunks": True}
        if cu_seqlens is not None and cu_seqlens.is_inference():
            return ContextParallelPlan(cp_group, **arguments)
        key = (id(cp_group), local_len, id(cu_seqlens), layout, packing)
        plan, snapshot, *_ = self._plans.get(key, (None, None))
        if plan is None or not (snapshot is None or snapshot.is_current(cu_seqlens)):
            if cu_seqlens is not None:
                snapshot = Snapshot("cu_seqlens", cu_seqlens)
                arguments["cu_seqlens"] = snapshot.values
            plan = ContextParallelPlan(cp_group, **arguments)
            # The entry keeps the group and the tensor alive, so that no new object gets their ids.
            self._plans[key] = (plan, snapshot, cp_group, cu_seqlens)
        self._plans.move_to_end(key)
        while len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
        return plan

    def clear(self) -> None:
        """Drop all plans. Call this before process groups are destroyed."""
        self._plans.clear()


shared_plans = PlanCache()
