"""Load a trained model of a run into this process, on one device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_sb.training.checkpoint import check_whole, load, newest_checkpoint, read_progress
from megatron_sb.training.config import (
    ConfigError,
    TrainingConfig,
    check_packages,
    load_config,
    needs_gpu,
)
from megatron_sb.training.config.checks import check
from megatron_sb.training.config.loader import without_parallelism
from megatron_sb.training.data import PackedBatch
from megatron_sb.validation import InputError, MissingFileError, check_choice

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model of a run with the weights of its newest checkpoint, as `load_run` yields it.

    Attributes:
        config: the run's configuration, changed to one rank.
        name: the model's name in config.compare.
        checkpoint: folder of the checkpoint.
        engine: the `megatron_sb.training.engine.engine.Engine` that holds the weights.
    """

    config: TrainingConfig
    name: str
    checkpoint: Path
    engine: Any

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute the logits of the token after each token of one document. There is no KV cache.

        Args:
            tokens: at least one token, each from 0 to vocab_size - 1.

        Returns:
            (len(tokens), vocab_size), in the model's dtype, on the CPU.

        Raises:
            ValueError: A token is not an integer or is out of range, or tokens is empty.
        """
        size, found = self.config.vocab_size, np.asarray(tokens)
        are_integers = found.dtype.kind in "iu" and found.ndim == 1 and len(found) > 0
        if not are_integers or found.min() < 0 or found.max() >= size:
            raise InputError(f"tokens must be at least one integer from 0 to {size - 1}, got {tokens!r}.")
        found, bounds = found.astype(np.int64), np.array([0, len(found)], dtype=np.int32)
        return self.engine.logits(PackedBatch(found, np.zeros_like(found), np.ones(len(found), dtype=bool), bounds))


def config_of(run: str | Path) -> TrainingConfig:
    """Return the configuration of a run.

    Raises:
        FileNotFoundError: The folder holds no run.
        ConfigError: Its config.yaml is damaged.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise MissingFileError(f"run must be the folder of a run of megatron-sb train, got {str(run)!r}: no {path}.")
    return load_config(path)


def choose_model(config: TrainingConfig, name: str | None) -> str:
    """Return the model of config.compare with this name, by default the first. Raise ValueError for another name."""
    if name is not None and name not in config.compare:
        raise InputError(f"model must be one of {', '.join(map(repr, config.compare))}, got {name!r}.")
    return name or config.compare[0]


@contextlib.contextmanager
def load_run(run: str | Path, model: str | None = None, device: str | None = None) -> Iterator[LoadedModel]:
    """Load the newest weights of one model of a run.

    The process must not have a default process group. Only one model may be loaded at a time. The training engine of
    Megatron-Core holds the weights, so every kind of attention of the trainer can be loaded. A checkpoint from GPUs
    needs a GPU; `megatron_sb.checkpoints.load` reads stick-breaking models anywhere.

    Args:
        run: folder of the run, finished or not.
        model: a name in `compare` of the run's config.yaml. Default None: the first.
        device: "cpu", "cuda", or "auto": a GPU if there is one. Default None: `parallel.device` of the run.

    Yields:
        The model, until the end of the context.

    Raises:
        FileNotFoundError: The folder is not a run, or the model has no checkpoint.
        ValueError: The run has no such model, its checkpoint is damaged, or it needs a GPU and there is none. Or the
            process has a default process group.

    Example:
        >>> from megatron_sb.training import load_run
        >>> with load_run("runs/tiny") as model:  # doctest: +SKIP
        ...     print(model.name, model.logits([100, 101, 102]).shape)
        stick_breaking torch.Size([3, 257])
    """
    config = config_of(run)
    name = choose_model(config, model)
    check_choice("device", device, (None, "auto", "cpu", "cuda"))
    parallel = dataclasses.replace(config.parallel, device=device or config.parallel.device)
    config = on_one_rank(dataclasses.replace(config, parallel=parallel))
    with _open_newest(Path(run), config, name) as (engine, checkpoint):
        yield LoadedModel(config, name, checkpoint, engine)


@contextlib.contextmanager
def trained_engine(run: Path, config: TrainingConfig, model: str) -> Iterator[Any]:
    """Open an `Engine` on one device with the weights of one model of a finished run, after its last step.

    Raise ConfigError if the configuration needs a GPU and there is none, FileNotFoundError without a checkpoint, and
    ValueError if it is damaged or of an earlier step.
    """
    newest, last = newest_checkpoint(run / model / "checkpoints"), config.stages[-1]
    progress = read_progress(newest)
    if (progress.stage, progress.step) != (last.name, last.steps):  # with checkpoint.stage_ends = false
        raise InputError(
            f"the newest checkpoint of {model} must be that of step {last.steps} of stage {last.name}, the last one, "
            f"got {newest}. Run `megatron-sb train {run} --resume --set checkpoint.stage_ends=true`."
        )
    with _open_newest(run, config, model) as (engine, _):
        yield engine


@contextlib.contextmanager
def _open_newest(run: Path, config: TrainingConfig, model: str) -> Iterator[tuple[Any, Path]]:
    """Open the engine of `trained_engine`. Yield it and its checkpoint: a run that still trains saves newer ones."""
    import torch
    import torch.distributed as dist

    from megatron_sb.training.rank import silence_warnings

    silence_warnings()
    from megatron_sb.training.engine.engine import Engine

    if dist.is_initialized():
        raise InputError(
            "the process must not have a default process group to load a model, got one. Leave the context of the "
            "model that is loaded, or call torch.distributed.destroy_process_group()."
        )
    check_packages(config, [model])
    cuda = on_gpu(config)
    if config.parallel.device == "cuda" and not cuda:
        raise ConfigError("the device must be 'cpu' or 'auto' without a GPU, got 'cuda'. Use a machine with a GPU.")
    for field, why in () if cuda else needs_gpu(config):
        raise ConfigError(f"{field} needs a GPU, and this machine has none: {why}")
    checkpoint = newest_checkpoint(run / model / "checkpoints")
    check_whole(checkpoint)
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        stages = {stage.name: stage for stage in config.stages}
        stage = stages.get(read_progress(checkpoint).stage, config.stages[-1])  # a run may change its model by stage
        engine = Engine(config, model, stage, config.vocab_size, device)
        try:
            load(engine, checkpoint)
            yield engine, checkpoint
        finally:
            engine.close()
    finally:
        dist.destroy_process_group()


def check_device(device: str) -> None:
    """Raise ValueError if --device is "cuda" and there is no GPU. device: "auto", "cpu" or "cuda"."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device must be 'auto' or 'cpu', got 'cuda': torch finds no CUDA device.")


def resolved_device(device: str) -> str:
    """Return "cuda" or "cpu" for --device "auto": a GPU if there is one. Return other values as they are."""
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def on_gpu(config: TrainingConfig) -> bool:
    """Return whether `trained_engine` uses a GPU."""
    import torch

    return config.parallel.device != "cpu" and torch.cuda.is_available()


def on_one_rank(config: TrainingConfig) -> TrainingConfig:
    """Return a run's configuration without parallelism, for one rank that loads its checkpoints.

    Raise ConfigError for a tensor-parallel model on a CPU: one rank cannot load its checkpoints there.
    """
    parallel = config.parallel
    if parallel.tensor_parallel_size > 1 and not on_gpu(config):
        raise ConfigError(
            f"parallel.tensor_parallel_size must be 1 on a CPU, got {parallel.tensor_parallel_size}. One rank loads "
            "the model, and on a CPU one rank cannot load the checkpoints of several tensor-parallel ranks."
        )
    config = without_parallelism(config, ("device", "threads_per_rank", "timeout_seconds"))
    check(config)
    return config
