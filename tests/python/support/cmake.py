"""Run functions of the folder cmake/ as a script, without a compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
needs_cmake = pytest.mark.skipif(not CMAKE, reason="needs cmake")


def run_script(folder: Path, module: str, code: str) -> tuple[int, str]:
    """Run code after cmake/MODULE.cmake. Return the exit status and the output, which ends with "end of script".

    Example:
        >>> run_script(tmp_path, "SbVersions", "sb_check_torch()")
        (0, '-- end of script')
    """
    script = folder / "script.cmake"
    begin = "cmake_minimum_required(VERSION 3.25)"  # as in CMakeLists.txt; it sets policies
    script.write_text(f'{begin}\ninclude({ROOT / "cmake" / module}.cmake)\n{code}\nmessage(STATUS "end of script")\n')
    done = subprocess.run([CMAKE, "-P", script], capture_output=True, text=True, timeout=60)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def configure(folder: Path, *options: str) -> tuple[int, str]:
    """Configure this project in a new folder, without the Python module. Return the exit status and the output."""
    command = [CMAKE, "-S", ROOT, "-B", folder / "build", "-DSB_BUILD_PYTHON=OFF", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, " ".join((done.stdout + done.stderr).split())
