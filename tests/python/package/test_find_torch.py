"""Which torch a build finds inside pip's isolation, that is with variables that hide what is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
PROJECT = f"""
cmake_minimum_required(VERSION 3.20)
project(asks NONE)
include("{ROOT / "cmake" / "SbTorch.cmake"}")
message(STATUS "torch ${{SB_TORCH_VERSION}} in ${{SB_TORCH_ROOT}}")
"""
TORCH = """
from types import SimpleNamespace
__version__, version, compiled_with_cxx11_abi = "2.11.7", SimpleNamespace(cuda=None), lambda: True
"""


def ask(folder, torch):
    """Configure for a Python whose user has the package `torch`, as pip does: (status, what was said, the package)."""
    (folder / "hidden").mkdir()
    (folder / "hidden" / "torch.py").write_text("raise ImportError('hidden by the isolation')")
    (folder / "CMakeLists.txt").write_text(PROJECT)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    package = folder / "home" / ".local" / "lib" / version / "site-packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(torch)
    alone = {"HOME": str(folder / "home"), "PYTHONNOUSERSITE": "1", "PYTHONPATH": str(folder / "hidden")}
    # .venv's Python knows no packages of the user's.
    command = [CMAKE, "-S", folder, "-B", folder / "build", f"-DPython_EXECUTABLE={sys._base_executable}"]
    done = subprocess.run(command, env=os.environ | alone, capture_output=True, text=True, timeout=60)
    return done.returncode, " ".join((done.stdout + done.stderr).split()), package


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
def test_torch_of_the_user_is_found(tmp_path):
    status, said, package = ask(tmp_path, TORCH)
    assert status == 0, said
    assert f"torch 2.11.7 in {package}" in said


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
def test_without_torch_the_error_says_what_to_do(tmp_path):
    status, said, _ = ask(tmp_path, "raise ImportError('broken')")
    assert status != 0
    assert "has no torch, and SB_TORCH_ROOT is not set. Run pip install 'torch==2.11.*' first." in said
    assert "use pip install --no-build-isolation" in said
