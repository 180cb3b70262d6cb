"""Process groups as arguments, and the heads that their ranks can exchange.

A `DeviceMesh` with one dimension can stand for its group.
"""

import sys
from typing import TYPE_CHECKING, Union

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group = Union[dist.ProcessGroup, "DeviceMesh"]


def check_group_type(group: object, argument: str = "cp_group") -> None:
    """Raise TypeError unless group is a process group or a DeviceMesh. It may be a group without this rank."""
    if group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup) or _is_mesh(group):
        return
    raise TypeError(
        f"{argument} must be a torch.distributed.ProcessGroup or a DeviceMesh, got {type(group).__name__}. "
        "Use torch.distributed.group.WORLD for all ranks."
    )


def process_group(group: object, argument: str = "cp_group") -> dist.ProcessGroup:
    """Return a process group, or that of a DeviceMesh with one dimension. Raise if it is not one that has this rank."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{argument} needs torch.distributed. Call torch.distributed.init_process_group first.")
    check_group_type(group, argument)
    if _is_mesh(group):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(range(group.ndim))
            raise ValueError(
                f"{argument} must have one dimension if it is a DeviceMesh, got the dimensions {names}. Pass one of "
                f"them, such as mesh[{names[-1]!r}]."
            )
        inside = group.get_coordinate() is not None
        group = group.get_group() if inside else dist.GroupMember.NON_GROUP_MEMBER
    if group is dist.GroupMember.NON_GROUP_MEMBER or _rank_in(group, argument) < 0:
        raise ValueError(
            f"{argument} must contain this rank, got a group without rank {dist.get_rank()}. "
            "torch.distributed.new_group returns such a group on ranks that are not in its list."
        )
    return group


def _is_mesh(group: object) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")  # there is no mesh before it is imported
    return module is not None and isinstance(group, module.DeviceMesh)


def _rank_in(group: dist.ProcessGroup, argument: str) -> int:
    try:
        return dist.get_rank(group)
    except ValueError as error:  # torch does not know the group
        raise ValueError(
            f"{argument} must exist, got a group that was destroyed, or that torch.distributed.new_group did not make. "
            "Make a new group, and a new plan for it."
        ) from error


def hierarchical_pair(
    groups: object, comm: object, cp_group: dist.ProcessGroup
) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Return the process groups of hierarchical_groups, or None without them.

    Raise if comm does not use them, or if their ranks do not form a grid of cp_group: the a2a groups are its rows, the
    p2p groups its columns.
    """
    if groups is None:
        return None
    if comm != "a2a+p2p":
        raise ValueError(f"hierarchical_groups must be None unless comm is 'a2a+p2p', got comm {comm!r}.")
    if not isinstance(groups, (tuple, list)) or len(groups) != 2:
        raise ValueError(f"hierarchical_groups must be two groups, (a2a group, p2p group), got {groups!r}.")
    a2a, p2p = (process_group(group, f"hierarchical_groups[{i}]") for i, group in enumerate(groups))
    ranks, rank, size = dist.get_process_group_ranks(cp_group), dist.get_rank(cp_group), dist.get_world_size(a2a)
    if len(ranks) % size:
        raise ValueError(
            f"hierarchical_groups[0], the a2a group, must have a divisor of the {len(ranks)} ranks of cp_group, got "
            f"{size} ranks."
        )
    neighbours, across = ranks[rank - rank % size :][:size], ranks[rank % size :: size]
    if (found := dist.get_process_group_ranks(a2a)) != neighbours:
        raise ValueError(
            f"hierarchical_groups[0], the a2a group, must have the neighbours {neighbours} of the {len(ranks)} ranks "
            f"of cp_group, got the ranks {found}."
        )
    if (found := dist.get_process_group_ranks(p2p)) != across:
        raise ValueError(
            f"hierarchical_groups[1], the p2p group, must have the ranks {across}, one of each a2a group of the "
            f"{len(ranks)} ranks of cp_group, got the ranks {found}."
        )
    return a2a, p2p


def exchange_problem(
    num_heads: int,
    num_kv_heads: int,
    num_ranks: int,
    names: tuple[str, str] = ("the number of heads", "the number of KV heads"),
) -> str:
    """Return why ranks cannot exchange heads, or "". names: of the first two arguments, for the text."""
    if num_heads % num_ranks:
        return f"{names[0]} must be a multiple of {num_ranks}, got {num_heads}"
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        return f"{names[1]} must be a multiple or a divisor of {num_ranks}, got {num_kv_heads}"
    return ""
