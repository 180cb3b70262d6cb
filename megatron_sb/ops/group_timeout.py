"""The operator `group_timeout`, for torch 2.8 only.

Later versions of torch tell the timeout of a process group to C++ code. torch 2.8 tells it only to Python, so the C++
code of context parallelism calls this operator (csrc/distributed/group_properties.cpp).
"""

from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

LIBRARY = torch.library.Library("megatron_sb", "FRAGMENT")


def group_timeout(group_name: str) -> int:
    """Return the shortest timeout of the backends of a process group, in milliseconds.

    Args:
        group_name: `group.group_name`.
    """
    group = distributed_c10d._resolve_process_group(group_name)
    backends = [group._get_backend(device) for device in group._device_types]
    # Custom backends may have no options. The default holds for them.
    timeouts = [backend.options._timeout for backend in backends if hasattr(backend, "options")]
    return min([*timeouts, distributed_c10d.default_pg_timeout]) // timedelta(milliseconds=1)


def register() -> None:
    """Register the operator. The C++ code finds it by its name."""
    LIBRARY.define("group_timeout(str group_name) -> int")
    LIBRARY.impl("group_timeout", group_timeout, "CompositeExplicitAutograd")
