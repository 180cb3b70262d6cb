"""Every call of the CUDA runtime in csrc/ is checked, so that an error names the call that caused it."""

import re
from pathlib import Path

import pytest
import torch

from megatron_sb.ops import library

CSRC = Path(__file__).parents[3] / "csrc"
FILES = [path for path in sorted(CSRC.rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
# These calls report errors; they do not fail themselves.
REPORTS = {"cudaGetLastError", "cudaGetErrorName", "cudaGetErrorString"}


def statements(text: str) -> list[str]:
    """Split C++ code at semicolons and braces, without comments and preprocessor lines."""
    code = re.sub(r"//.*|^\s*#.*", "", text, flags=re.MULTILINE)
    return re.split(r"[;{}]", code)


def unchecked_calls(text: str) -> list[str]:
    """Return the CUDA calls without check() and the launches without check_launch() after them.

    A call is checked if it is an argument of check() or the initial value of a variable `error`.
    """
    found, launch = [], None
    for statement in statements(text):
        for call in re.finditer(r"\bcuda[A-Z]\w*(?=\()", statement):
            checked = re.search(r"\bcheck\([^;]*$|\bcudaError_t error =\s*$", statement[: call.start()])
            if call[0] not in REPORTS and not checked:
                found.append(call[0])
        if launch is not None and "check_launch(" not in statement:
            found.append(launch)
        launch = next(iter(re.findall(r"(\w+)\s*<<<", statement)), None)
    return found


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("cudaGetDevice(&device);", ["cudaGetDevice"]),
        ('check("device", "cudaGetDevice", cudaGetDevice(&device));', []),
        ("if (n > 0) { cudaMemsetAsync(x, 0, n, stream); }", ["cudaMemsetAsync"]),
        ("kernel<<<1, 32>>>(x); return;", ["kernel"]),
        ('kernel<<<1, 32>>>(x); check_launch("kernel");', []),
        ("// cudaGetDevice(&device);", []),
        ("const cudaError_t error = cudaGetLastError();", []),
    ],
)
def test_unchecked_calls(code, calls):
    assert unchecked_calls(code) == calls


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CSRC)))
def test_calls_are_checked(path):
    assert unchecked_calls(path.read_text()) == []


def test_no_wait_has_expired():
    """The text is empty without a failed kernel, also in a build without CUDA."""
    library.load()
    assert torch.ops.megatron_sb.expired_waits() == ""


def test_settings_of_kernels_are_made_in_one_place():
    """launch.cu makes them once for each device and kernel, and not at each launch."""
    once = ("cudaFuncSetAttribute(", "cudaDeviceGetAttribute(", "cudaOccupancyMaxActiveBlocksPerMultiprocessor(")
    users = {path.name for path in FILES if any(call in path.read_text() for call in once)}
    assert users == {"launch.cu"}
