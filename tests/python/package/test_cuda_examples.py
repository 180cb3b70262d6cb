"""The minimal CUDA kernels in examples/cuda compile. tests/python/gpu/test_minimal_kernels.py runs them."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[3] / "examples/cuda").glob("*.cu"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_example_compiles(source, tmp_path):
    command = ["nvcc", "-ptx", "-arch=compute_80", "-Werror=all-warnings", "-o", str(tmp_path / "out.ptx"), str(source)]
    subprocess.run(command, check=True, timeout=120)
