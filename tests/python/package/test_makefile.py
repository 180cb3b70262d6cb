"""The Makefile where git does not know the files: an archive that was unpacked, a folder of another user."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


@pytest.fixture
def archive(tmp_path):
    """A folder without .git, with the Makefile, one C++ file, and an environment that looks newer than both."""
    for name in ("pyproject.toml", "CMakeLists.txt", "cmake/Own.cmake", "csrc/core/own.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv").mkdir()
    for name in (".torch", ".built"):
        (tmp_path / ".venv" / name).touch()
    return tmp_path


def would_run(folder, target):
    """What make prints that it would run: (status, standard output, standard error)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "MAKE"))}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent)
    command = ["make", "--dry-run", "PYTHON312=", target]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("target", "option"), [("lint", "--dry-run -Werror"), ("format", "-i")])
def test_cpp_files_are_found_without_git(archive, target, option):
    status, commands, errors = would_run(archive, target)
    assert status == 0, errors
    assert f".venv/bin/clang-format {option} csrc/core/own.h\n" in commands


def test_a_changed_file_is_built_without_git(archive):
    assert "pip install" not in would_run(archive, "build")[1]
    os.utime(archive / "csrc" / "core" / "own.h", (2**32, 2**32))
    assert "pip install" in would_run(archive, "build")[1]


@pytest.mark.parametrize("target", ["lint", "format"])
def test_clang_format_does_not_wait_for_standard_input(archive, target):
    (archive / "csrc" / "core" / "own.h").unlink()
    status, commands, errors = would_run(archive, target)
    assert status != 0 and "clang-format" not in commands
    assert "there are no C++ files in CMakeLists.txt cmake csrc tests/cpp" in errors
