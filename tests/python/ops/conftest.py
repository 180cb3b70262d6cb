"""Run the tests of this folder on a CPU and a GPU, with uninitialised memory full of NaN (support/devices.py)."""

import pytest
import torch
from support.devices import device, on_device, pytest_collection_modifyitems  # noqa: F401


@pytest.fixture
def one_thread():
    """Use one thread. In thousands of tiny calls, several threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
