"""The trained run of an experiment, its models and its device."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron_sb.experiments import sweep
from megatron_sb.training.config import AttentionConfig, TrainingConfig
from megatron_sb.training.loading import on_gpu


def trained_run(options: argparse.Namespace, config: TrainingConfig) -> Path:
    """Return the folder of a finished run of the configuration.

    If CONFIG is RUN/config.yaml of a finished run and --set is not used, the folder is RUN. Otherwise it is
    OUT/trained, which is trained first unless it is finished.
    """
    path = Path(options.config)
    if path.name == "config.yaml" and not options.set and sweep.is_done(config, path.parent):
        return path.parent
    out = sweep.output_folder(options)
    trial = sweep.Trial("trained", (*options.set, "checkpoint.stage_ends=true"))
    sweep.train_all(options.config, [trial], out)
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


def plain_stickbreaking_models(config: TrainingConfig, *, with_reach: bool = False) -> list[str]:
    """Return the stick-breaking models of compare with dot-product logits and without forget gates.

    The experiments compute attention from queries and keys only, and as dot products. Models with reach are left out,
    unless with_reach.
    """

    def is_plain(attention: AttentionConfig) -> bool:
        if attention.kind != "stick_breaking" or attention.logits != "dot":
            return False
        return (with_reach or attention.reach is None) and not attention.forget_gate

    return [name for name in config.compare if is_plain(config.attention[name])]


def device_of(config: TrainingConfig) -> str:
    """Describe the device that `loading.trained_engine` uses."""
    from megatron_sb.training.report import hardware

    return hardware("cuda" if on_gpu(config) else "cpu", ranks=1)
