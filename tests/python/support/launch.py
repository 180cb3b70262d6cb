"""Ranks of torch.distributed in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

WORKERS = Path(__file__).parents[1] / "workers"


def failed_checks(num_ranks: int, device: str, checks: tuple[str, ...], out: Path, seconds: int) -> dict:
    """Run checks of workers/context_parallel_run.py under torchrun: {check: {rank: traceback}}, as far as it came."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [str(WORKERS / "context_parallel_run.py"), str(out), device, *checks]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **hidden}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    return json.loads(out.read_text())


def assert_passed(check: str, found: dict) -> None:
    """The check was reached and failed on no rank."""
    assert check in found, f"not reached: a check before it failed: {list(found)[-1]}"
    assert not found[check], "\n".join(f"rank {rank}:\n{text}" for rank, text in found[check].items())
