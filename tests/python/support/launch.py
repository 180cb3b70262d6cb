"""Ranks of torch.distributed in processes of their own."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

_WORKERS = Path(__file__).parents[1] / "workers"
SEVERAL_MACHINES = Path(__file__).parent / "several_machines.sh"


def run_ranks(num_ranks: int, arguments: list, seconds: int, folder: Path | None = None, **environment: str) -> str:
    """Run `arguments` under torchrun to the end: what it printed. Fails with its last words before torchrun's own."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*map(str, [*command, num_ranks, *arguments])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    words = done.stderr.partition("torch.distributed.elastic.multiprocessing")[0]
    assert done.returncode == 0, f"{arguments[0]} failed:\n{done.stdout[-2000:]}\n{words[-8000:]}"
    return done.stdout


def run_worker(script: str, num_ranks: int, out: Path, *arguments: str, device: str = "cpu", seconds: int = 300):
    """Run a worker, `script OUT ARGUMENTS..`, under torchrun and return the JSON that its first rank wrote."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    run_ranks(num_ranks, [_WORKERS / script, out, *arguments], seconds, **hidden)
    return json.loads(out.read_text())


def megatron_losses(script: Path, num_ranks: int, *flags: str, device: str) -> list[float]:
    """The losses that Megatron logs for a training script under the launcher, started from the script's folder."""
    launcher = ["-m", "megatron_sb.megatron.launch"] if device == "cuda" else [_WORKERS / "megatron_on_cpu.py"]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONSAFEPATH": ""}  # empty: a user's python has it not
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # Megatron builds with its python3
    environment |= {} if device == "cuda" else {"TORCHDYNAMO_DISABLE": "1"}
    said = run_ranks(num_ranks, [*launcher, script, *flags], 300, script.parent, **environment)
    return [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", said)]


def end_worker(out: str, findings: dict) -> NoReturn:
    """What each rank of a worker does last: the first one writes the findings."""
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(findings))
    end_rank()


def end_rank() -> NoReturn:
    """End a rank that is done. Destructors may abort a process (gloo's threads do now and then), so without them."""
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
