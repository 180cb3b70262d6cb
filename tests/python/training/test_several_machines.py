"""The examples of jobs over several machines: torchrun on two machines, both of which are this one, and a Slurm made of
two small scripts. test_job_options.py runs torchrun on one machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import SEVERAL_MACHINES

ROOT = Path(__file__).parents[3]
SMALL = ["parallel.ranks=2", "parallel.device=cpu", "parallel.threads_per_rank=1", "compare=[stick_breaking]"]
SMALL += ["model={num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 2, ffn_hidden_size: 64}"]
SMALL += [
    "stages.0.context_length=64",
    "stages.1.context_length=128",
    "evaluation.windows=2",
    "evaluation.target_tokens=32",
]
SMALL += ["stages.0.steps=31", "stages.1.steps=11", "evaluation.length_factor=1"]
# What Slurm does for a job of one machine and two tasks.
SLURM = {
    "scontrol": "echo 127.0.0.1",
    "srun": """shift
    SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
    SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
    wait $first && wait $second""",
}


def run(command, out, **environment):
    """Train the small model with one of the examples and return the steps it reported."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    arguments = [ROOT / "configs" / "tiny_context_extension.yaml", *SMALL, "--out", out]
    done = subprocess.run(
        [*map(str, [*command, *arguments])],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_torchrun_on_two_machines(tmp_path):
    """Each machine starts a rank, and the ranks find each other."""
    steps = run([SEVERAL_MACHINES], tmp_path / "out", NODES="2", RANKS_PER_NODE="1", SECONDS_AT_MOST="170")
    assert steps == [*range(1, 32), *range(1, 12)]


def test_slurm(tmp_path):
    for name, script in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"SLURM_JOB_NODELIST": "here", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        port = str(20000 + os.getpid() % 10000)
        steps = run(
            ["bash", ROOT / "examples" / "train_slurm.sbatch"], tmp_path / "out", MASTER_PORT=port, **environment
        )
    assert steps == [*range(1, 32), *range(1, 12)]
