"""Checkpoints on disk. Each is a directory, written under a temporary name and renamed. `latest` names the newest one.

    <root>/short-000100/        model and optimizer (written by the engine), and progress.json
    <root>/latest               "short-000100"

A job that dies while it writes leaves `<root>/.short-000100.tmp`. No code reads that directory. The next save of
the same step removes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Protocol

import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Progress:
    """The position of a model's training.

    Attributes:
        stage: Name of the stage.
        step: Number of finished steps of the stage.
        tokens: Number of labels trained on so far, over all stages.
        sampler: State of the stage's sampler.
        corpus: Fingerprint of the data.
    """

    stage: str
    step: int
    tokens: int
    sampler: dict[str, int]
    corpus: dict[str, int]


class Saveable(Protocol):
    """The engine's methods that a checkpoint needs. Both are collective."""

    def save(self, path: Path) -> None:
        """Write model and optimizer into an existing directory."""

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""


class CheckpointDirectory:
    """The checkpoints of one model.

    All ranks call every method. The engine writes from every rank; only rank 0 creates and renames directories.

    Args:
        root: The directory that holds them.
        keep: Number of checkpoints to keep for each stage, the newest ones.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = keep

    def latest(self) -> Progress | None:
        """Return the position of the newest checkpoint, or None if there is none."""
        try:
            name = (self.root / "latest").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        return Progress(**json.loads((self.root / name / "progress.json").read_text(encoding="utf-8")))

    def path(self, progress: Progress) -> Path:
        """Return the directory of a checkpoint."""
        return self.root / f"{progress.stage}-{progress.step:06d}"

    def save(self, engine: Saveable, progress: Progress) -> Path:
        """Write a checkpoint and return its directory. Do nothing if it is already the newest."""
        final = self.path(progress)
        if self.latest() == progress:
            return final
        temporary = self.root / f".{final.name}.tmp"
        if dist.get_rank() == 0:
            for left_over in (temporary, final):
                shutil.rmtree(left_over, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        engine.save(temporary)
        dist.barrier()
        if dist.get_rank() == 0:
            write_atomically(temporary / "progress.json", json.dumps(dataclasses.asdict(progress), indent=1))
            temporary.rename(final)
            write_atomically(self.root / "latest", final.name)
            self._prune(progress)
        dist.barrier()
        return final

    def load(self, engine: Saveable, progress: Progress) -> None:
        """Load the checkpoint of `progress` into the engine."""
        engine.load(self.path(progress))

    def _prune(self, newest: Progress) -> None:
        """Remove old checkpoints of a stage.

        Keep those of later steps: a save wrote them and died before it updated `latest`. They do not count as kept, and
        the next save of the same step replaces them.
        """
        of_stage = re.compile(re.escape(newest.stage) + r"-(\d{6,})")
        saved = {int(match[1]): path for path in self.root.iterdir() if (match := of_stage.fullmatch(path.name))}
        steps = sorted(step for step in saved if step <= newest.step)
        for step in steps[: -self._keep]:
            shutil.rmtree(saved[step])


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
