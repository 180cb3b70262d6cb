"""Training jobs of the tests: run them, watch them, and kill them at chosen moments."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import torch
from support.fork_server import PythonProcess, python_processes, run_python
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

TRAIN = [sys.executable, "-m", "megatron_sb.training"]
# TRAIN with forked ranks. support/fork_server.py runs it.
FORKED_TRAIN = [Path(__file__).parents[1] / "workers" / "forked_training.py", "megatron_sb.training"]
Job = subprocess.Popen | PythonProcess | psutil.Process
TIMEOUT_SECONDS = 120
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])

# A job of a few seconds. Both stages use context parallelism, and the first stage uses micro-batches.
SMALL_JOB = f"""
name: small
data: {{paths: ["{_LIBRARY / "json"}", "{_LIBRARY / "email"}"], validation_fraction: 0.3}}
model: {{num_layers: 2, hidden_size: 32, num_heads: 2, num_kv_heads: 1, ffn_hidden_size: 64}}
attention: {{softmax_rope: {{evaluated_scalings: [none, linear, ntk]}}}}
parallel: {{ranks: 2, device: cpu, threads_per_rank: 1, timeout_seconds: 60}}
stages:
  - {{name: short, context_length: 32, steps: 30, rows_per_step: 4, rows_per_micro_batch: 2, learning_rate: 1e-2,
      warmup_steps: 4, schedule: power, context_parallel_size: 2}}
  - {{name: extended, context_length: 64, steps: 30, rows_per_step: 4, learning_rate: 1e-2, warmup_steps: 4,
      schedule: exponential, context_parallel_size: 2}}
evaluation: {{windows: 4, target_tokens: 16, length_factor: 8}}
checkpoint: {{interval: 7, keep: 2}}
"""


def run_command(command: Iterable, *arguments: object, **environment: str) -> tuple[int, str, str]:
    """Run a command as a user does. Return its exit status, standard output and standard error."""
    done = subprocess.run(
        [*map(str, (*command, *arguments))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


def train(*arguments: object) -> tuple[int, str, str]:
    """Run the trainer with forked ranks. Return its exit status, standard output and standard error."""
    done = run_python([*FORKED_TRAIN, *arguments], seconds=TIMEOUT_SECONDS)
    return done.returncode, done.stdout, done.stderr


@contextlib.contextmanager
def started_forks(*arguments: object) -> Iterator[PythonProcess]:
    """Start the trainer with forked ranks in the background, and kill it at the end of the `with` block."""
    with python_processes([{"arguments": [*FORKED_TRAIN, *arguments]}]) as (job,):
        yield job


@contextlib.contextmanager
def started(command: Iterable, *arguments: object) -> Iterator[subprocess.Popen]:
    """Start a command in the background, and kill it at the end of the `with` block."""
    process = subprocess.Popen(
        [*map(str, (*command, *arguments))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()  # its ranks notice this and end
        process.wait()


def metrics(out: Path) -> list[dict]:
    """Return the steps that a run has reported so far."""
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def wait_for_step(job: subprocess.Popen | PythonProcess, out: Path, model: str, stage: str, step: int) -> None:
    """Wait until a job has reported a step."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not any(line["step"] >= step and (line["model"], line["stage"]) == (model, stage) for line in metrics(out)):
        _assert_running(job)
        assert time.monotonic() < deadline, f"{stage} did not reach step {step} within {TIMEOUT_SECONDS} s"
        time.sleep(0.01)


def state(checkpoint: Path, folder: Path) -> dict:
    """Return all tensors and numbers of a checkpoint by name. Writes a file into `folder`."""
    dcp_to_torch_save(checkpoint, folder / "state.pt")
    tensors = {}

    def collect(value, name):
        if isinstance(value, dict):
            for key, child in value.items():
                collect(child, f"{name}/{key}")
        elif isinstance(value, (list, tuple)):
            for index, child in enumerate(value):
                collect(child, f"{name}/{index}")
        else:
            tensors[name] = value

    collect(torch.load(folder / "state.pt", weights_only=False), "")
    return tensors


def kill_while_it_saves(job: subprocess.Popen | PythonProcess, checkpoints: Path) -> None:
    """SIGKILL all processes of a job while it writes a checkpoint, once it has finished an earlier one."""
    kill_while([job], lambda: bool(list(checkpoints.glob(".*.tmp"))) and (checkpoints / "latest").exists())


def kill_while(jobs: Sequence[Job], condition: Callable[[], bool]) -> None:
    """SIGKILL all processes of some jobs at a moment when the condition holds. Until then all jobs must run."""
    killed = False
    while not killed:
        for job in jobs:
            _assert_running(job)
        if not condition():
            continue
        processes = [process for job in jobs for process in _family(job)]
        _signal_all(processes, signal.SIGSTOP)
        killed = condition()  # it may have changed before the processes stopped
        _signal_all(processes, signal.SIGKILL if killed else signal.SIGCONT)
    for job in jobs:
        job.wait(TIMEOUT_SECONDS)


def kill_all(job: Job) -> None:
    """SIGKILL a job and the processes that it started, if they still run."""
    _signal_all(_family(job), signal.SIGKILL)


def _family(job: Job) -> list[psutil.Process]:
    try:
        parent = psutil.Process(job.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _assert_running(job: Job) -> None:
    if isinstance(job, psutil.Process):
        assert job.is_running(), job
    elif isinstance(job, PythonProcess):
        assert job.returncode is None, job.stdout + job.stderr
    else:
        assert job.poll() is None, job.communicate()[0]


def _signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
