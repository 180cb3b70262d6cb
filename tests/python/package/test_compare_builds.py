"""benchmarks/compare_builds.py at toy sizes."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_sb.ops import library

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def compare(monkeypatch):
    """Return a function that calls the script with these arguments on the CPU."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script = importlib.import_module("compare_builds")
    return lambda *args: script.main(["--dry-run", "--rounds=1", "--seconds=0.001", *args])


def test_two_builds_take_turns(compare, tmp_path, capsys):
    """The table has a column for each build: here one with a library only, and one with a package."""
    shutil.copytree(library.library_path().parents[1], tmp_path / "lib")
    package = Path(library.__file__).parents[2]
    assert compare(str(tmp_path), str(package), "--rows", "backward:64:1:2:1:4096") == 0
    header, _, row = capsys.readouterr().out.splitlines()[-3:]
    assert header == f"| row | {tmp_path} | {package} |"
    assert row.startswith("| backward b=1 h=2:1 d=64 L=64 | ") and len(row.split("|")) == 5
    assert all(float(cell) >= 0 for cell in row.split("|")[2:4])


def test_a_build_can_be_compared_with_itself(compare, capsys):
    """The difference of its columns is the noise of the measurement."""
    package = str(Path(library.__file__).parents[2])
    assert compare(package, package, "--rows", "forward:64:1:1:1:4096") == 0
    header, _, row = capsys.readouterr().out.splitlines()[-3:]
    assert header == f"| row | {package} | {package}, 2 |" and len(row.split("|")) == 5


def test_the_package_need_not_be_installed(tmp_path):
    """Only the processes that measure import megatron_sb, and each imports the one of its build.

    The script removes the copy of the package that it makes for them.
    """
    (tmp_path / "temporary").mkdir()
    shutil.copytree(library.library_path().parents[1], tmp_path / "lib")
    code = (
        "import runpy, sys; sys.modules['megatron_sb'] = None; del sys.argv[0]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    options = ["--dry-run", "--rounds=1", "--seconds=0.001", "--rows", "forward:64:1:1:1:4096"]
    command = [sys.executable, "-c", code, str(BENCHMARKS / "compare_builds.py"), str(tmp_path), *options]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("| forward b=1 h=1:1 d=64 L=64 | ")
    assert not list((tmp_path / "temporary").glob("megatron_sb_suite_*"))


def test_rates_count_the_sizes_that_are_measured(compare, monkeypatch):
    """A call of 1 ms. In a dry run, the rate is that of the short length."""
    script = importlib.import_module("compare_builds")
    monkeypatch.setattr(script, "take_turns", lambda calls, seconds: dict.fromkeys(calls, 1.0))
    rows = script.parse(["BUILD", "--dry-run", "--rows", "forward:16:2:4:2:4096", "backward:8:1:1:1:640"]).rows
    assert [row.s for row in rows] == [64, 10]
    forward, backward = script.measure(rows, [], 0.0)
    assert forward["ours"] == 2 * 2 * 4 * 64**2 * 16 / 1e9 and backward["ours"] == 2.5 * 2 * 10**2 * 8 / 1e9


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["build", "--rows", "sideways:64:1:2:1:4096"], "got 'sideways:64:1:2:1:4096'"),
        (["build", "--rows", "backward:64:1:2:1"], "a row must be DIRECTION:HEAD_DIM"),
        (["build", "--rows", "backward:64:0:2:1:4096"], "sizes of at least 1, got 'backward:64:0:2:1:4096'"),
        (["build", "--rounds", "0"], "argument --rounds: must be a whole number and at least 1, got 0"),
        ([], "needs a BUILD"),
        (["build", "--cudnn"], "--cudnn needs a GPU"),
        (["no-such-folder"], f"must be a folder with a {library.library_path().parent.name}/libmegatron_sb_ops.so"),
    ],
)
def test_errors_name_the_argument(compare, args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        compare(*args)
    assert message in f"{stop.value} {capsys.readouterr().err}"
