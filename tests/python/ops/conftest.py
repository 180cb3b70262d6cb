"""Run the tests of this folder on a CPU and a GPU, with uninitialised memory full of NaN (support/devices.py)."""

from support.devices import device, on_device, pytest_collection_modifyitems  # noqa: F401
