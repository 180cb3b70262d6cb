"""Tests of the folder nn run on the devices and the memory of support/devices.py."""

from support.devices import device, on_device, pytest_collection_modifyitems  # noqa: F401
