"""One thread for the sockets of all gloo groups of a process."""

import functools
import os
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store

_own_init = ProcessGroupGloo.__init__
_DEFAULT_TIMEOUT = timedelta(minutes=30)


@functools.cache
def _devices() -> list[ProcessGroupGloo.Device]:
    """Return the devices that torch would make for each group. A process calls this after its fork."""
    names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    return [ProcessGroupGloo.create_device(interface=name) for name in names] or [
        ProcessGroupGloo.create_default_device()
    ]


def share_devices() -> None:
    """Let all gloo groups of this process, and of its forks, use the same devices.

    Each device has a thread, which wakes up every 10 ms. Torch makes a device for each group, and a rank of Megatron
    has dozens of groups. The connections stay those of a group.
    """

    def init(self, store: Store, rank: int, size: int, timeout: timedelta = _DEFAULT_TIMEOUT, **newer: bool) -> None:
        options = ProcessGroupGloo._Options()
        for name, value in newer.items():  # torch 2.15 passes enable_reconfigure, which is an option, too
            setattr(options, name, value)
        options._devices, options._timeout = _devices(), timeout
        options._threads = 2 * len(options._devices)
        _own_init(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init
