"""Everything here needs a GPU: tests are marked so, tensors are made there, and fresh memory holds NaN.

MEGATRON_SB_GPU_TESTS_ON=cpu runs on a CPU what can run there: to try the tests themselves, which says nothing of a GPU.
"""

import os
from pathlib import Path

import pytest
import torch
from support.memory import poisoned_memory, quiet

_DEVICE = os.environ.get("MEGATRON_SB_GPU_TESTS_ON", "cuda")


@pytest.hookimpl(tryfirst=True)  # before tests/python/conftest.py looks for the mark
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(quiet)
            if _DEVICE == "cuda":
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="module")
def device():
    """Where the tests run."""
    return _DEVICE


@pytest.fixture(autouse=True)
def _on_device(device):
    """What a test makes without saying where is made on the GPU."""
    with torch.device(device), poisoned_memory():
        yield
