"""GPU tests: each test here has the mark `gpu`, creates tensors on the GPU, and gets uninitialised memory full of NaN.

With MEGATRON_SB_GPU_TESTS_ON=cpu the tests that do not need CUDA run on a CPU. Use it to debug the tests themselves.
"""

import os
from pathlib import Path

import pytest
import torch
from support.memory import poisoned_memory, quiet

_DEVICE = os.environ.get("MEGATRON_SB_GPU_TESTS_ON", "cuda")


@pytest.hookimpl(tryfirst=True)  # before tests/python/conftest.py reads the mark
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(quiet)
            if _DEVICE == "cuda":
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="module")
def device():
    """Return the device of the tests."""
    return _DEVICE


@pytest.fixture(autouse=True)
def _on_device(device):
    """Make the GPU the default device, and fill uninitialised memory with NaN."""
    with torch.device(device), poisoned_memory():
        yield
