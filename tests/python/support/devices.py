"""Fixtures for tests that run on the CPU and on a GPU, on memory that holds NaN until a value is written."""

import pytest
import torch
from support.memory import poisoned_memory, quiet

# A module that uses the fixture `device` runs twice: on the CPU and on a GPU.
_DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, quiet])]


@pytest.fixture(scope="module", params=_DEVICES)
def device(request):
    """Return the default device of the test: "cpu" or "cuda"."""
    return request.param


@pytest.fixture(autouse=True)
def on_device(request):
    """Allocate on the device of the test, on memory that holds NaN."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    with torch.device(device), poisoned_memory():
        yield


def pytest_collection_modifyitems(config, items):
    """GPUs have no kernels for fp64."""
    wide = [i for i in items if _parameters(i).get("device") == "cuda" and torch.float64 in _parameters(i).values()]
    if wide:
        config.hook.pytest_deselected(items=wide)
        items[:] = [item for item in items if item not in wide]


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}
