"""Capture calls in CUDA graphs, and forbid calls to synchronise with the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call in a CUDA graph. Return the graph, and the results that each replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # loads modules, which is not possible during a capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Make operations that wait for the GPU raise an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
