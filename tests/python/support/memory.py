"""Fill free memory with NaN, so that tests fail if a kernel reads memory that it has not written."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

_BLOCKS = (*[2**18] * 16, 2**22, 2**24, 2**26)  # in fp32 values: a block for each pool of the caching allocator

# poisoned_memory() makes torch warn about its own nondeterministic operators, thousands of times on a GPU.
quiet = pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch fill uninitialised tensors with NaN, or with the largest value for integers.

    A part of an output that an operator does not write is then NaN, and recycled memory cannot hold the right result.
    """
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, 5).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def poison_free_memory(device: str) -> None:
    """Fill free blocks of the GPU's caching allocator with NaN. Kernels may allocate other than with torch.empty."""
    if device == "cuda":
        blocks = [torch.full((size,), torch.nan, device=device) for size in _BLOCKS]
        del blocks
