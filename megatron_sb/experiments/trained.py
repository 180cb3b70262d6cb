"""Load a trained model into this process for an experiment."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_sb.experiments import sweep
from megatron_sb.training.config import ConfigError, ParallelConfig, TrainingConfig
from megatron_sb.training.config.checks import check


def trained_run(options: argparse.Namespace, config: TrainingConfig) -> Path:
    """Return the folder of a finished run of the configuration.

    If CONFIG is RUN/config.yaml of a finished run and --set is not used, the folder is RUN. Otherwise it is
    OUT/trained, which is trained first unless it is finished.
    """
    path = Path(options.config)
    if path.name == "config.yaml" and not options.set and sweep.is_done(config, path.parent):
        return path.parent
    out = sweep.output_folder(options)
    sweep.train_all(options.config, [sweep.Trial("trained", tuple(options.set))], out)
    return out / "trained"


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads within the context. None leaves it unchanged."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def trained_engine(run: Path, config: TrainingConfig, model: str) -> Iterator[Any]:
    """Open an `Engine` of the last stage on one device, with the newest weights of one model of a run.

    Raise ConfigError if the configuration needs a GPU and there is none, FileNotFoundError without a checkpoint, and
    ValueError if it is damaged.
    """
    import torch
    import torch.distributed as dist

    from megatron_sb.training.checkpoint import check_whole, load, newest_checkpoint
    from megatron_sb.training.rank import silence_warnings

    silence_warnings()
    from megatron_sb.training.engine.engine import Engine

    cuda = on_gpu(config)
    if config.parallel.device == "cuda" and not cuda:
        raise ConfigError(
            "parallel.device must be 'cpu' or 'auto' without a GPU, got 'cuda'. Use a machine with a GPU."
        )
    checkpoint = newest_checkpoint(run / model / "checkpoints")
    check_whole(checkpoint)
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        engine = Engine(config, model, config.stages[-1], config.vocab_size, device)
        try:
            load(engine, checkpoint)
            yield engine
        finally:
            engine.close()
    finally:
        dist.destroy_process_group()


def plain_stickbreaking_models(config: TrainingConfig) -> list[str]:
    """Return the stick-breaking models of compare with dot-product logits and without forget gates."""
    chosen = {name: config.attention[name] for name in config.compare if config.breaks_sticks(name)}
    return [name for name, attention in chosen.items() if attention.logits == "dot" and not attention.forget_gate]


def on_gpu(config: TrainingConfig) -> bool:
    """Return whether `trained_engine` uses a GPU."""
    import torch

    return config.parallel.device != "cpu" and torch.cuda.is_available()


def device_of(config: TrainingConfig) -> str:
    """Describe the device that `trained_engine` uses."""
    from megatron_sb.training.report import hardware

    return hardware("cuda" if on_gpu(config) else "cpu", ranks=1)


def on_one_rank(config: TrainingConfig) -> TrainingConfig:
    """Return a run's configuration without parallelism, for one rank that loads its checkpoints.

    Raise ConfigError for a tensor-parallel model on a CPU: one rank cannot load its checkpoints there.
    """
    parallel = config.parallel
    if parallel.tensor_parallel_size > 1 and not on_gpu(config):
        raise ConfigError(
            f"parallel.tensor_parallel_size must be 1 on a CPU, got {parallel.tensor_parallel_size}. Experiments load "
            "a model on one rank, and on a CPU one rank cannot load the checkpoints of several tensor-parallel ranks."
        )
    one_rank = ParallelConfig(
        device=parallel.device, threads_per_rank=parallel.threads_per_rank, timeout_seconds=parallel.timeout_seconds
    )
    no_context_parallelism = {"context_parallel_size": 1, "hierarchical_context_parallel_sizes": ()}
    stages = tuple(dataclasses.replace(stage, **no_context_parallelism) for stage in config.stages)
    config = dataclasses.replace(config, parallel=one_rank, stages=stages)
    check(config)
    return config
