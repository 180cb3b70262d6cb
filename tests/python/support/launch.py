"""Ranks of torch.distributed in processes of their own."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

_WORKERS = Path(__file__).parents[1] / "workers"


def run_worker(script: str, num_ranks: int, out: Path, *arguments: str, device: str = "cpu", seconds: int = 300):
    """Run a worker, `script OUT ARGUMENTS..`, under torchrun and return the JSON that its first rank wrote."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(num_ranks), str(_WORKERS / script), str(out), *arguments]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **hidden}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    workers_words = done.stderr.partition("torch.distributed.elastic.multiprocessing")[0]
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-2000:]}\n{workers_words[-8000:]}"
    return json.loads(out.read_text())


def end_worker(out: str, findings: dict) -> NoReturn:
    """What each rank of a worker does last: the first one writes the findings. Destructors may abort a process, so it
    ends without them.
    """
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(findings))
    dist.barrier()
    dist.destroy_process_group()
    for writer in multiprocessing.active_children():  # of checkpoints; os._exit would leave it running
        writer.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def failed_checks(num_ranks: int, device: str, checks: tuple[str, ...], out: Path, seconds: int) -> dict:
    """Run checks of workers/context_parallel_run.py: {check: {rank: traceback}}, as far as it came."""
    return run_worker("context_parallel_run.py", num_ranks, out, device, *checks, device=device, seconds=seconds)


def assert_passed(check: str, found: dict) -> None:
    """The check was reached and failed on no rank."""
    assert check in found, f"not reached: a check before it failed: {list(found)[-1]}"
    assert not found[check], "\n".join(f"rank {rank}:\n{text}" for rank, text in found[check].items())
