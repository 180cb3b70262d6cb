"""What every Python test runs under: the number of threads, fixed seeds, and skips for devices that are not there."""

import importlib.util
import os
import random

import numpy
import pytest
import torch

_DEVICES_NEEDED = {"gpu": 1, "multigpu": 2}

try:
    _HAS_MEGATRON = importlib.util.find_spec("megatron.core") is not None
except ModuleNotFoundError:
    _HAS_MEGATRON = False
_HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
collect_ignore = ([] if _HAS_MEGATRON else ["megatron", "training", "checkpoints", "experiments"]) + (
    [] if _HAS_TRANSFORMERS else ["huggingface", "checkpoints"]
)


def pytest_report_header():
    """Say what is left out as a whole."""
    return [
        "megatron-core: "
        + ("here" if _HAS_MEGATRON else "NOT INSTALLED, tests/python/{megatron,training,checkpoints,experiments} out"),
        "transformers: "
        + ("here" if _HAS_TRANSFORMERS else "NOT INSTALLED, tests/python/{huggingface,checkpoints} skipped"),
    ]


def pytest_configure():
    """Share the cores among pytest-xdist's workers."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def pytest_collection_modifyitems(items):
    """Skip what this machine has too few devices for."""
    present = torch.cuda.device_count()
    for item in items:
        for name, needed in _DEVICES_NEEDED.items():
            if item.get_closest_marker(name) and present < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), there are {present}"))


@pytest.fixture(autouse=True)
def _fixed_seeds():
    """Every test draws the same numbers, whichever ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
