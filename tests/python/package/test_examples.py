"""Every example runs as its docstring says."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# quickstart.py trains for a minute; tests/python/docs/test_quickstart.py runs it with fewer steps.
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples/quickstart.py"})


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("train_torchrun.sh", "train_torchrun.sh: torchrun must be on PATH"),
        ("train_slurm.sbatch", "SLURM_JOB_NODELIST: must be set by Slurm. Submit this script with sbatch"),
    ],
)
def test_a_script_without_its_launcher_says_so(script, words):
    environment = {"PATH": "/usr/bin:/bin"}
    command = ["bash", ROOT / "examples" / script, "CONFIG.yaml"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0 and not run.stdout
    (line,) = run.stderr.splitlines()
    assert words in line


def test_torchrun_needs_a_configuration():
    run = subprocess.run(
        ["bash", ROOT / "examples/train_torchrun.sh"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert run.stderr.startswith("train_torchrun.sh: the configuration is missing.")


def test_context_parallel_without_torchrun_says_so():
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, ROOT / "examples/context_parallel.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert run.stderr.startswith("Start this example with torchrun")


def test_several_machines_need_a_place_to_meet():
    """Without it, each would wait for minutes at its own localhost."""
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "NODES": "2", "RANKS_PER_NODE": "1"}
    command = ["bash", ROOT / "examples/train_torchrun.sh", "CONFIG.yaml"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert run.returncode == 2
    assert run.stderr.startswith("train_torchrun.sh: HEAD must be the name of the machine where the ranks meet")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path):
    command = ast.get_docstring(ast.parse(path.read_text())).splitlines()[-1].split()
    assert command[-1] == f"examples/{path.name}"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.strip()
