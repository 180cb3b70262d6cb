"""Programs that import the published package `stickbreaking_attention` run on this library."""

import importlib
import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from support.fork_server import run_python

from megatron_sb import compat
from megatron_sb.integrations import stickbreaking_attention as package

NAMES = ("stickbreaking_attention", "stickbreaking_attention.sb_attn", "stickbreaking_attention.sb_varlen")
# Prints the sum of an output, where the function is from, and the arguments.
PROGRAM = """
import sys, torch, neighbour
from stickbreaking_attention import sb_attn
x = torch.linspace(-1, 1, 2 * 8 * 16).view(1, 2, 8, 16)
print(__name__, round(sb_attn(x, x, x)[0].sum().item(), 4), sb_attn.__module__, sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    package.uninstall()


def test_imports():
    package.install()
    package.install()  # changes nothing
    import stickbreaking_attention
    from stickbreaking_attention import sb_attn, sb_attn_varlen
    from stickbreaking_attention.sb_attn import sb_attn as from_module
    from stickbreaking_attention.sb_varlen import sb_attn_varlen as varlen_from_module

    assert stickbreaking_attention.sb_attn is sb_attn is from_module is compat.sb_attn
    assert sb_attn_varlen is varlen_from_module is compat.sb_attn_varlen
    assert importlib.util.find_spec("stickbreaking_attention") is not None, "as programs ask for it"
    package.uninstall()
    assert not {*NAMES} & {*sys.modules}


def test_the_published_package_must_not_be_imported_before(monkeypatch):
    theirs = ModuleType("stickbreaking_attention")
    theirs.__file__ = "their/__init__.py"
    monkeypatch.setitem(sys.modules, "stickbreaking_attention", theirs)
    with pytest.raises(RuntimeError, match=r"install must be called before .* their/__init__\.py"):
        package.install()
    package.uninstall()
    assert sys.modules["stickbreaking_attention"] is theirs


@pytest.mark.parametrize("way", [["{folder}/program.py"], ["-m", "program"]], ids=["script", "module"])
def test_a_program_runs_unmodified(way, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "neighbour.py").touch()
    command = [sys.executable, "-m", "megatron_sb.integrations.stickbreaking_attention"]
    command += [part.format(folder=tmp_path) for part in way]
    done = subprocess.run([*command, "--lr", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    x = torch.linspace(-1, 1, 2 * 8 * 16).view(1, 2, 8, 16)
    total = round(compat.sb_attn(x, x, x)[0].sum().item(), 4)
    assert done.stdout == f"__main__ {total} megatron_sb.compat ['--lr', '1']\n"


SPAWNING = """
import multiprocessing
from stickbreaking_attention import sb_attn
from stickbreaking_attention.sb_varlen import sb_attn_varlen

def work():
    print(sb_attn.__module__, sb_attn_varlen.__module__, flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_processes_that_a_program_spawns(tmp_path):
    """As the workers of a data loader with multiprocessing_context="spawn", which import the program again."""
    (tmp_path / "program.py").write_text(SPAWNING)
    command = [sys.executable, "-m", "megatron_sb.integrations.stickbreaking_attention", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "megatron_sb.compat megatron_sb.compat\n0\n", done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["missing.py"],
        ["-m"],
        ["-m", "missing"],
        ["-m", "missing.module"],
        ["-m", "os.missing"],
        ["-m", ".relative"],
    ],
)
def test_missing_programs(arguments, tmp_path):
    command = ["-m", "megatron_sb.integrations.stickbreaking_attention", *arguments]
    done = run_python(command, folder=tmp_path, seconds=120)
    assert done.returncode == 1 and "usage: python -m" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
