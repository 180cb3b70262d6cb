"""Run Megatron's own training loop with workers/megatron_pretrain.py, a small model and mock data."""

import contextlib
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.fork_server import PythonProcess
from support.hosts import ON_HOST, Host
from support.jobs import kill_all
from support.launch import WORKERS, megatron_launcher, megatron_losses, started_megatron, torchrun_command

HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None
needs_training = pytest.mark.skipif(
    not HAS_TRAINING, reason="this Megatron-Core has no megatron.training (wheels from 0.17 on, for Python 3.12, do)"
)
PRETRAIN = WORKERS / "megatron_pretrain.py"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
BATCHES = "--micro-batch-size 1 --global-batch-size 4 --train-iters 20 --lr 5e-3 --lr-decay-style constant --mock-data"
TOKENS = "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 2"
# Without Transformer Engine and Apex:
PLAIN = "--transformer-impl local --no-gradient-accumulation-fusion --no-rope-fusion"
FP32 = f"{SHAPE} {BATCHES} {TOKENS} {PLAIN}"
MEGATRON = f"{FP32} --bf16"
ACCEPTED = "--attention-dropout 0 --position-embedding-type none"


def train(
    device: str, ranks: int, folder: Path, *flags: str, model: str = MEGATRON, hosts: Sequence[Host] = ()
) -> list[float]:
    """Train with torchrun and the launcher, by default for 20 steps, and return the logged losses."""
    return megatron_losses(PRETRAIN, ranks, *_all_flags(folder, flags, model), device=device, hosts=hosts)


@contextlib.contextmanager
def started_training(ranks: int, folder: Path, *flags: str, model: str = MEGATRON) -> Iterator[list[PythonProcess]]:
    """Start the same on CPUs, and kill it at the end of the `with` block."""
    with started_megatron(PRETRAIN, ranks, *_all_flags(folder, flags, model)) as processes:
        yield processes


@contextlib.contextmanager
def started_on_gpus(script: Path, ranks: int, *flags: object) -> Iterator[subprocess.Popen]:
    """Start a Megatron training script with the launcher under torchrun. Kill all its processes at the end.

    If the block raises an error, a note with the end of the output is added to it.
    """
    launcher, variables = megatron_launcher("cuda")
    command, environment = torchrun_command(ranks, [*launcher, script, *flags], variables)
    with tempfile.TemporaryFile("w+") as log:
        job = subprocess.Popen(command, cwd=script.parent, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield job
        except BaseException as error:
            log.seek(0)
            error.add_note(log.read()[-8000:])
            raise
        finally:
            kill_all(job)
            job.wait()


@contextlib.contextmanager
def started_torchrun(
    hosts: Sequence[Host], folder: Path, *flags: str, model: str = MEGATRON
) -> Iterator[Callable[..., PythonProcess]]:
    """Give a function that starts torchrun on a host, with one CPU rank. The ranks of all hosts train together.

    torchrun forks its rank, see workers/forked_training.py.

    The arguments of the function are the number of the host, and more flags. The first host has the store of the
    rendezvous. All processes are killed at the end of the `with` block.
    """
    launcher, variables = megatron_launcher("cpu")
    started: list[PythonProcess] = []

    def start(number: int, *more: str) -> PythonProcess:
        host = hosts[number]
        torchrun = [WORKERS / "forked_training.py", "torch.distributed.run", "--nnodes", len(hosts)]
        torchrun += ["--nproc-per-node", 1]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:29400"]
        torchrun += ["--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", host.address]
        arguments = [ON_HOST, host.name, *torchrun, *launcher, PRETRAIN, *_all_flags(folder, flags, model), *more]
        started.append(PythonProcess(arguments, {**variables, **host.environment}, PRETRAIN.parent))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            kill_all(process)
            process.close()


def rank_of(torchrun: PythonProcess) -> psutil.Process:
    """Return the rank that torchrun has started."""
    (rank,) = psutil.Process(torchrun.pid).children()
    return rank


def newest(saved: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 without one."""
    tracker = saved / "latest_checkpointed_iteration.txt"
    text = tracker.read_text() if tracker.exists() else ""
    return int(text) if text.isdigit() else 0


def is_saving_another(saved: Path) -> bool:
    """Return whether there is a complete checkpoint and a newer one that is not complete."""
    steps = [int(re.sub(r"\D", "", path.name)) for path in saved.glob("iter_*")]
    return 0 < newest(saved) < max(steps, default=0)


def _all_flags(folder: Path, flags: tuple[str, ...], model: str) -> list[str]:
    logged = ["--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000", "--data-cache-path", str(folder)]
    flags = [*ACCEPTED.split(), "--hidden-dropout", "0", "--stick-breaking-attention", "--num-workers", "0", *flags]
    return [*model.split(), *logged, *flags]
