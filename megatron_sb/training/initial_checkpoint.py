"""Checks of `initial_checkpoint`, before a job starts from it."""

from __future__ import annotations

from pathlib import Path

import yaml

from megatron_sb.megatron.metadata import read_metadata
from megatron_sb.megatron.weights import read_attention_kind
from megatron_sb.training.config import TrainingConfig
from megatron_sb.validation import InputError


def check_initial_checkpoint(config: TrainingConfig) -> None:
    """Check that a job can start from config.initial_checkpoint, if that is set.

    Raises:
        ValueError: It is no checkpoint directory, cannot be read safely, or holds a model with another kind of
            attention.
    """
    if config.initial_checkpoint is None:
        return
    folder = Path(config.initial_checkpoint)
    if not (folder / ".metadata").exists():
        raise InputError(
            f"initial_checkpoint must be a checkpoint directory with a .metadata, got {config.initial_checkpoint!r}"
        )
    read_metadata(folder)
    _check_attention(config, folder)


def attention_kind(folder: Path) -> str | None:
    """Return the kind of attention of the model in a checkpoint, or None if nothing records it.

    Version 0.1.0 recorded it only in the run's config.yaml: the folder is then RUN/MODEL/checkpoints/STEP.
    """
    kind = read_attention_kind(folder)
    model = folder.resolve().parent.parent
    path = model.parent / "config.yaml"
    if kind is None and path.exists():
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))["attention"]
        kind = sections.get(model.name, {}).get("kind")
    return kind


def _check_attention(config: TrainingConfig, folder: Path) -> None:
    (model,) = config.compare
    own, found = config.attention[model].kind, attention_kind(folder)
    wanted = config.initial_attention or own
    if found is not None and found != wanted:
        source = "initial_attention" if config.initial_attention else f"attention.{model}.kind"
        raise InputError(
            f"initial_checkpoint must hold a model with {source} = {wanted!r}, got {folder}, whose model has {found!r}."
            f" Set initial_attention={found} to train its weights with {own!r} attention."
        )
