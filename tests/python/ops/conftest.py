"""Where the operator tests run, and on what memory: what torch allocates without a value holds NaN."""

import pytest
import torch
from support.memory import poisoned_memory, quiet

# Modules that work anywhere use this fixture: once on the CPU, once on a GPU.
_DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, quiet])]


@pytest.fixture(scope="module", params=_DEVICES)
def device(request):
    """Where what a test makes without saying where is made."""
    return request.param


@pytest.fixture(autouse=True)
def _on_device(request):
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
