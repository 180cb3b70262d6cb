"""Ranks on the CPUs of this machine, forked from one process, so that they share the memory of its imports."""

import gc
import os
import socket
from collections.abc import Callable

import torch
import torch.multiprocessing as mp


def run_forked(function: Callable, num_ranks: int, *arguments) -> None:
    """Call function(*arguments) in each of `num_ranks` forked processes, with the environment that torchrun would set.

    Raise an error if one of them fails. Each has one thread.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    gc.freeze()  # a collection in a rank would copy the pages that it shares with the others
    mp.start_processes(_run, (function, arguments), num_ranks, start_method="fork")


def _run(rank: int, function: Callable, arguments: tuple) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    function(*arguments)
