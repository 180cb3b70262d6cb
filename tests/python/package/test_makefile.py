"""The Makefile works in a folder that is not a git repository, for example an unpacked archive."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.messages import mentions

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


@pytest.fixture
def archive(tmp_path):
    """Return a folder without .git that holds the Makefile, one C++ file and an environment that is newer than both."""
    for name in ("pyproject.toml", "CMakeLists.txt", "cmake/Own.cmake", "csrc/core/own.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv").mkdir()
    for name in (".torch", ".built"):
        (tmp_path / ".venv" / name).touch()
    return tmp_path


def dry_run(folder, target):
    """Return the exit status of `make --dry-run`, the commands that it prints, and its standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "MAKE"))}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent)
    command = ["make", "--dry-run", "PYTHON312=", target]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("target", "option"), [("lint", "--dry-run -Werror"), ("format", "-i")])
def test_clang_format_gets_the_cpp_files(archive, target, option):
    status, commands, errors = dry_run(archive, target)
    assert status == 0, errors
    assert f".venv/bin/clang-format {option} csrc/core/own.h\n" in commands


def test_only_a_changed_file_causes_a_build(archive):
    assert "pip install" not in dry_run(archive, "build")[1]
    os.utime(archive / "csrc" / "core" / "own.h", (2**32, 2**32))
    assert "pip install" in dry_run(archive, "build")[1]


@pytest.mark.parametrize("target", ["lint", "format"])
def test_without_cpp_files_make_fails(archive, target):
    """clang-format without a file would wait for standard input."""
    (archive / "csrc" / "core" / "own.h").unlink()
    status, commands, errors = dry_run(archive, target)
    assert status != 0 and "clang-format" not in commands
    assert re.search(mentions("C++ CMakeLists.txt cmake csrc tests/cpp"), errors)
