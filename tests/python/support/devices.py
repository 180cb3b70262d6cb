"""Fixtures for tests that run on a CPU and on a GPU, with uninitialised memory full of NaN."""

import pytest
import torch
from support.memory import poisoned_memory, quiet

# A module that uses the fixture `device` runs twice: on a CPU and on a GPU.
_DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, quiet])]


@pytest.fixture(scope="module", params=_DEVICES)
def device(request):
    """Return the default device of the test: "cpu" or "cuda"."""
    return request.param


@pytest.fixture(autouse=True)
def on_device(request):
    """Make the device of the test the default device, and fill uninitialised memory with NaN."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    with torch.device(device), poisoned_memory():
        yield


def pytest_collection_modifyitems(config, items):
    """Deselect fp64 tests on a GPU, which has no fp64 kernels."""
    fp64 = [i for i in items if _parameters(i).get("device") == "cuda" and torch.float64 in _parameters(i).values()]
    if fp64:
        config.hook.pytest_deselected(items=fp64)
        items[:] = [item for item in items if item not in fp64]


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}
