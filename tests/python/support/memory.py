"""Memory that shows who relies on what it happens to hold."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

_BLOCKS = (*[2**18] * 16, 2**22, 2**24, 2**26)  # fp32 values, of the sizes that the caching allocator keeps apart

# What torch says of its own operators while memory is poisoned, thousands of times on a GPU.
quiet = pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What torch allocates without a value holds NaN, or the largest value for integers.

    An operator that leaves a part of its output unwritten shows it, and no recycled memory can hold the answer.
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
    """Fill free blocks of the GPU's caching allocator with NaN, for memory that is asked of it by other means."""
    if device == "cuda":
        blocks = [torch.full((size,), torch.nan, device=device) for size in _BLOCKS]
        del blocks
