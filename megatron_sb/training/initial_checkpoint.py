"""Checks of `initial_checkpoint`, before a job starts from it."""

from __future__ import annotations

import math
from pathlib import Path

import yaml
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_sb.megatron.integrity import check_files
from megatron_sb.megatron.metadata import read_metadata
from megatron_sb.megatron.shards import SHARD
from megatron_sb.megatron.weights import (
    EXTRA_STATE,
    HEADS,
    belongs_to_optimizer,
    check_scale_once,
    read_attention_kind,
    read_heads,
)
from megatron_sb.training.config import (
    GatedDeltaNetConfig,
    SoftmaxAttentionConfig,
    StickBreakingAttentionConfig,
    TrainingConfig,
    count_parameters,
)
from megatron_sb.validation import InputError

OF_ATTENTION = (".core_attention.", ".gate_proj.")  # in names of weights that not every kind of attention has
# Option of attention with weights of its own, and its value -> what the names of these weights contain.
OWN_WEIGHTS = {
    ("forget_gate", True): ".gate_proj.",
    ("remainder_bias", True): ".core_attention.remainder_bias",
    ("head_norm", True): ".core_attention.norm_weight",
    ("position", "fire"): ".core_attention.attention.fire.",
}


def check_initial_checkpoint(config: TrainingConfig) -> None:
    """Check that a job can start from config.initial_checkpoint, if that is set.

    Raises:
        ValueError: It is no checkpoint directory, cannot be read safely, is damaged, or holds a model of another size
            or with another kind of attention.
    """
    if config.initial_checkpoint is None:
        return
    folder = Path(config.initial_checkpoint)
    if not (folder / ".metadata").exists():
        raise InputError(
            f"initial_checkpoint must be a checkpoint directory with a .metadata, got {config.initial_checkpoint!r}"
        )
    metadata = read_metadata(folder)
    check_files(folder)
    _check_attention(config, folder)
    _check_own_weights(config, folder, metadata)
    _check_sizes(config, folder, metadata)
    _check_heads(config, folder)
    _check_options(config, folder)


def attention_kind(folder: Path) -> str | None:
    """Return the kind of attention of the model in a checkpoint, or None if nothing records it.

    Version 0.1.0 recorded it only in the run's config.yaml: the folder is then RUN/MODEL/checkpoints/STEP.
    """
    kind = read_attention_kind(folder)
    return _configured_kind(folder.resolve().parent.parent) if kind is None else kind


def _configured_kind(model: Path) -> str | None:
    """Return the kind in RUN/config.yaml of the model RUN/MODEL, or None if there is no such file with this model."""
    kind = _configured(model, "attention", model.name).get("kind")
    return kind if isinstance(kind, str) else None


def _configured(model: Path, *path: str) -> dict:
    """Return a section in RUN/config.yaml of the model RUN/MODEL, or {} if there is no such file with this section."""
    try:
        entry = yaml.safe_load((model.parent / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # the file of something else
    for name in path:
        entry = entry.get(name) if isinstance(entry, dict) else None
    return entry if isinstance(entry, dict) else {}


def _check_attention(config: TrainingConfig, folder: Path) -> None:
    (model,) = config.compare
    own, found = config.attention[model].kind, attention_kind(folder)
    wanted = config.initial_attention or own
    if found is not None and found != wanted:
        source = "initial_attention" if config.initial_attention else f"attention.{model}.kind"
        raise InputError(
            f"initial_checkpoint must hold a model with {source} = {wanted!r}, got {folder}, where it is {found!r}. "
            f"Set initial_attention={found} to train its weights with {own!r} attention."
        )
    if config.initial_attention is None:
        check_scale_once(folder, f"attention.{model}.scale", getattr(config.attention[model], "scale", None))


def without(value: bool | str) -> str:
    """Return in words the values of an option in OWN_WEIGHTS that have no weights."""
    return "False" if value is True else f"other than {value!r}"


def _check_own_weights(config: TrainingConfig, folder: Path, metadata: Metadata) -> None:
    """Check that checkpoint and model have weights for the same options of attention.

    A job makes no weights that are missing. It leaves weights out only if the attention is changed on purpose.
    """
    (model,) = config.compare
    names = getattr(config.attention[model], "layers", (model,))  # of mixed attention
    layers = {name: config.attention[name] for name in names}
    for (option, value), part in OWN_WEIGHTS.items():
        found = {name: getattr(layer, option) for name, layer in layers.items() if hasattr(layer, option)}
        is_saved = any(part in weight for weight in metadata.state_dict_metadata)
        name = next((name for name, own in found.items() if own == value), None)
        if name is not None and not is_saved:
            raise InputError(
                f"attention.{name}.{option} must be {without(value)} to start from {folder}, which has no weights for "
                f"it, got {value!r}."
            )
        if name is None and is_saved and found and config.initial_attention is None:
            name, own = next(iter(found.items()))
            raise InputError(
                f"attention.{name}.{option} must be {value!r} to start from {folder}, which has weights for it, got "
                f"{own!r}. Set initial_attention={config.attention[model].kind} to leave these weights out."
            )


def _check_sizes(config: TrainingConfig, folder: Path, metadata: Metadata) -> None:
    """Compare the numbers of weights. Those that stick-breaking and softmax attention differ in do not count."""
    (model,) = config.compare
    entries = metadata.state_dict_metadata
    if any(name.startswith(SHARD) for name in entries):
        return  # shards of a CPU's tensor-parallel ranks, which repeat some weights
    found = sum(
        math.prod(entry.size)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
        and not belongs_to_optimizer(name)
        and EXTRA_STATE not in name
        and not any(part in name for part in OF_ATTENTION)
    )
    attention = config.attention_of_layers(model)
    layers = [each if isinstance(each, GatedDeltaNetConfig) else SoftmaxAttentionConfig() for each in attention]
    expected = count_parameters(config.model, layers, config.vocab_size).total
    if found != expected:
        raise InputError(
            f"initial_checkpoint must hold a model of the configured sizes, {expected:,} weights, got {folder} with "
            f"{found:,}. The weights of the attention's own options are not counted."
        )


def recorded_heads(folder: Path) -> dict[str, int]:
    """Return the heads of the model in a checkpoint by the names in `HEADS`, as far as anything records them.

    Earlier versions recorded them only in the run's config.yaml: the folder is then RUN/MODEL/checkpoints/STEP.
    """
    found = read_heads(folder) or _configured(folder.resolve().parent.parent, "model")
    return {name: found[name] for name in HEADS if isinstance(found.get(name), int)}


def _check_heads(config: TrainingConfig, folder: Path) -> None:
    """Compare the heads. The weights have the same shapes with other heads of other widths."""
    for name, found in recorded_heads(folder).items():
        if found != (own := getattr(config.model, name)):
            raise InputError(f"model.{name} must be {found} to start from {folder}, whose model has it, got {own}.")


def _check_options(config: TrainingConfig, folder: Path) -> None:
    """Compare the options of stick-breaking attention that have no weights with those of the checkpoint's run.

    A job changes them only if the attention is changed on purpose. Without the run's config.yaml, nothing is compared.
    """
    (model,) = config.compare
    own, run = config.attention[model], folder.resolve().parent.parent
    trained = _configured(run, "attention", run.name)
    is_same_kind = isinstance(own, StickBreakingAttentionConfig) and trained.get("kind") == own.kind
    if config.initial_attention is not None or not is_same_kind:
        return
    for option in ("attend_current", "logits", "scale", "reach"):
        found = trained.get(option)
        found = getattr(StickBreakingAttentionConfig(), option) if found is None else found
        found = tuple(found) if isinstance(found, list) else found
        if found != getattr(own, option):
            raise InputError(
                f"attention.{model}.{option} must be {found!r} to start from {folder}, whose model was trained with "
                f"it, got {getattr(own, option)!r}. Set initial_attention={own.kind} to change it."
            )
