"""Poisoned memory: in these tests, what torch allocates without a value holds NaN (the largest value for integers)."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """An operator that leaves a part of its output unwritten shows it, and no recycled memory can hold the answer."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, 5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
