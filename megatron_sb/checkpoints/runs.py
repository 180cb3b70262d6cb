"""Find the distributed checkpoint of a run, of a model in it, or of a folder of Megatron-LM's scripts."""

from __future__ import annotations

from pathlib import Path

from megatron_sb.training.checkpoint import newest_checkpoint
from megatron_sb.training.config import TrainingConfig, load_config
from megatron_sb.validation import InputError

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"  # Megatron-LM finds a checkpoint by these names


def find_checkpoint(source: Path) -> Path | None:
    """Return the folder of the distributed checkpoint that `source` names, or None if it names none.

    Args:
        source: a checkpoint; or a folder whose newest checkpoint is wanted: RUN/MODEL/checkpoints, RUN/MODEL, RUN, or
            a folder of Megatron-LM's scripts. RUN must have exactly one stick-breaking model.

    Raises:
        FileNotFoundError: if a run has no checkpoint.
        ValueError: if a run does not have exactly one stick-breaking model, or the file that names the newest
            checkpoint is damaged.
    """
    if (source / ".metadata").exists() or (source / "metadata.json").exists():
        return source
    if (source / TRACKER).exists():
        return _newest_of_megatron_lm(source)
    if (source / "latest").exists():
        return newest_checkpoint(source)
    if (source / "checkpoints").is_dir():
        return newest_checkpoint(source / "checkpoints")
    if (source / "config.yaml").exists():
        model = only_stick_breaking_model(load_config(source / "config.yaml"), f"Or name one: {source}/MODEL.")
        return newest_checkpoint(source / model / "checkpoints")
    return None


def only_stick_breaking_model(training: TrainingConfig, advice: str) -> str:
    """Return the name of a configuration's stick-breaking model. Raise ValueError unless there is exactly one.

    advice: a sentence that ends the message.
    """
    found = [name for name in training.compare if training.breaks_sticks(name)]
    if len(found) != 1:
        raise InputError(
            f"compare must have exactly one stick-breaking model, got {len(found)} in {list(training.compare)}. "
            f"{advice}"
        )
    return found[0]


def _newest_of_megatron_lm(folder: Path) -> Path:
    name = (folder / TRACKER).read_text(encoding="utf-8", errors="backslashreplace").strip()
    if name != RELEASE and not name.isdecimal():
        raise InputError(f"{folder / TRACKER} must hold a number of steps or {RELEASE!r}, got {name!r}.")
    return folder / (name if name == RELEASE else f"iter_{int(name):07d}")
