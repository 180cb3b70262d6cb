"""What the scripts in benchmarks/ share, and their options and files, without a GPU."""

import importlib
import os
import types
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a script of benchmarks/, which is not a package, on the CPU."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module


def test_power_and_clocks_are_those_of_the_gpu_that_is_measured(script, monkeypatch, tmp_path):
    """nvidia-smi numbers all GPUs of the machine, CUDA only those of CUDA_VISIBLE_DEVICES."""
    timing = script("timing")
    tool, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    tool.write_text(f"#!/bin/sh\necho \"$@\" >> {asked}\necho '580.1, 700.00 W, 143771 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    pci = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0xAB, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: pci)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    with timing.Sensors():
        assert timing.machine()["driver"] == "580.1"
    commands = asked.read_text().splitlines()
    assert len(commands) == 2 and all("--id=00000000:ab:01.0" in command.split() for command in commands)
