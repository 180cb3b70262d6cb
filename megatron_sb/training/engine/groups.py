"""Process groups of an engine. Megatron-Core creates them and never destroys them."""

import torch.distributed as dist


def process_groups() -> list[dist.ProcessGroup]:
    """Return every process group of this process, in the order of their creation."""
    return list(dist.distributed_c10d._world.pg_map)  # torch has no public list


def destroy_groups_except(kept: list[dist.ProcessGroup]) -> None:
    """Destroy all process groups that are not in `kept`, in the order of their creation.

    No rank may still receive over these groups.

    Example:
        >>> import torch.distributed as dist
        >>> from megatron_sb.training.engine.groups import destroy_groups_except, process_groups
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
        >>> earlier = process_groups()
        >>> group = dist.new_group()
        >>> destroy_groups_except(earlier)
        >>> process_groups() == earlier
        True
        >>> dist.destroy_process_group()
    """
    for group in process_groups():
        if group not in kept:
            dist.destroy_process_group(group)
