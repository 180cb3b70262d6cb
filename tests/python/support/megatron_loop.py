"""Run Megatron's own training loop with workers/megatron_pretrain.py, a small model and mock data."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import PythonProcess
from support.launch import megatron_losses, started_megatron

HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None
needs_training = pytest.mark.skipif(
    not HAS_TRAINING, reason="this Megatron-Core has no megatron.training (wheels from 0.17 on, for Python 3.12, do)"
)
PRETRAIN = Path(__file__).parents[1] / "workers" / "megatron_pretrain.py"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
BATCHES = "--micro-batch-size 1 --global-batch-size 4 --train-iters 20 --lr 5e-3 --lr-decay-style constant --mock-data"
TOKENS = "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 2"
# Without Transformer Engine and Apex:
PLAIN = "--transformer-impl local --no-gradient-accumulation-fusion --no-rope-fusion"
FP32 = f"{SHAPE} {BATCHES} {TOKENS} {PLAIN}"
MEGATRON = f"{FP32} --bf16"
ACCEPTED = "--attention-dropout 0 --position-embedding-type none"


def train(device: str, ranks: int, folder: Path, *flags: str, model: str = MEGATRON) -> list[float]:
    """Train with torchrun and the launcher, by default for 20 steps, and return the logged losses."""
    return megatron_losses(PRETRAIN, ranks, *_all_flags(folder, flags, model), device=device)


@contextlib.contextmanager
def started_training(ranks: int, folder: Path, *flags: str, model: str = MEGATRON) -> Iterator[list[PythonProcess]]:
    """Start the same on CPUs, and kill it at the end of the `with` block."""
    with started_megatron(PRETRAIN, ranks, *_all_flags(folder, flags, model)) as processes:
        yield processes


def _all_flags(folder: Path, flags: tuple[str, ...], model: str) -> list[str]:
    logged = ["--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000", "--data-cache-path", str(folder)]
    flags = [*ACCEPTED.split(), "--hidden-dropout", "0", "--stick-breaking-attention", "--num-workers", "0", *flags]
    return [*model.split(), *logged, *flags]
