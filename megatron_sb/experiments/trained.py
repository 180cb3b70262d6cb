"""A trained model in this process, for an experiment that asks it something."""

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
    """The folder of a finished run of the configuration: the configuration's own where that is RUN/config.yaml of a
    finished run and nothing is set over it, else OUT/trained, which is trained first unless it is done.
    """
    here = Path(options.config)
    if here.name == "config.yaml" and not options.set and sweep.is_done(config, here.parent):
        return here.parent
    out = sweep.output_folder(options)
    sweep.train_all(options.config, [sweep.Trial("trained", tuple(options.set))], out)
    return out / "trained"


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """torch computes with so many threads inside, None: with as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def trained_engine(run: Path, config: TrainingConfig, model: str) -> Iterator[Any]:
    """An `Engine` of the last stage with a run's newest weights of one of its models, alone on one device.

    Raises ValueError where the configuration wants a GPU and there is none, FileNotFoundError without a checkpoint.
    """
    import torch
    import torch.distributed as dist

    from megatron_sb.training.rank import silence_warnings

    silence_warnings()
    from megatron_sb.training.engine.engine import Engine

    cuda = on_gpu(config)
    if config.parallel.device == "cuda" and not cuda:
        raise ConfigError("parallel.device is 'cuda' and there is no GPU; its checkpoints need one")
    checkpoint = sweep.newest_checkpoint(run, model)
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        engine = Engine(config, model, config.stages[-1], config.vocab_size, device)
        try:
            engine.load(checkpoint)
            yield engine
        finally:
            engine.close()
    finally:
        dist.destroy_process_group()


def plain_sticks(config: TrainingConfig) -> list[str]:
    """The models of compare whose logits are q . k and whose keys have no gates: what experiments write out again."""
    chosen = {name: config.attention[name] for name in config.compare if config.breaks_sticks(name)}
    return [name for name, attention in chosen.items() if attention.logits == "dot" and not attention.forget_gate]


def on_gpu(config: TrainingConfig) -> bool:
    """Whether `trained_engine` has a GPU."""
    import torch

    return config.parallel.device != "cpu" and torch.cuda.is_available()


def device_of(config: TrainingConfig) -> str:
    """What `trained_engine` runs on, in words."""
    from megatron_sb.training.report import hardware

    return hardware("cuda" if on_gpu(config) else "cpu", ranks=1)


def on_one_rank(config: TrainingConfig) -> TrainingConfig:
    """A run's configuration, for one rank that loads its checkpoints: nothing is spread.

    Raises ConfigError where one rank cannot: on a CPU, of a model that tensor parallelism splits.
    """
    parallel = config.parallel
    if parallel.tensor_parallel_size > 1 and not on_gpu(config):
        raise ConfigError(
            f"parallel.tensor_parallel_size = {parallel.tensor_parallel_size}: on a CPU as many ranks are needed to "
            "load what it saves, and an experiment looks into a model on one; 1 is allowed"
        )
    alone = ParallelConfig(
        device=parallel.device, threads_per_rank=parallel.threads_per_rank, timeout_seconds=parallel.timeout_seconds
    )
    whole = {"context_parallel_size": 1, "hierarchical_context_parallel_sizes": ()}
    stages = tuple(dataclasses.replace(stage, **whole) for stage in config.stages)
    config = dataclasses.replace(config, parallel=alone, stages=stages)
    check(config)
    return config
