"""Checkpoints on disk: a directory each, written aside and renamed, and a file that names the newest.

    <root>/short-000100/        model, optimizer (written by the engine) and progress.json
    <root>/latest               "short-000100"

A job that dies while writing leaves `<root>/.short-000100.tmp`, which nothing reads and the next save of
that step removes.
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
    """Where a model's training stands: `step` steps of stage `stage` are done.

    tokens: labels trained on so far, over all stages. sampler: the position in the stage's data. corpus: the
    documents' fingerprint.
    """

    stage: str
    step: int
    tokens: int
    sampler: dict[str, int]
    corpus: dict[str, int]


class Saveable(Protocol):
    """What the engine offers; both are collective."""

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


class CheckpointDirectory:
    """The checkpoints of one model. Every method is called by all ranks; rank 0 touches the names, the engine writes
    from every rank.

    keep: how many checkpoints of each stage stay; the newest of every stage does.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = keep

    def latest(self) -> Progress | None:
        """What the newest checkpoint holds, None before the first."""
        try:
            name = (self.root / "latest").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        return Progress(**json.loads((self.root / name / "progress.json").read_text(encoding="utf-8")))

    def path(self, progress: Progress) -> Path:
        """The directory of one checkpoint."""
        return self.root / f"{progress.stage}-{progress.step:06d}"

    def save(self, engine: Saveable, progress: Progress) -> Path:
        """Write a checkpoint; when this returns it is whole and the newest. What is saved already is left alone."""
        final = self.path(progress)
        if self.latest() == progress:
            return final
        aside = self.root / f".{final.name}.tmp"
        if dist.get_rank() == 0:
            for left_over in (aside, final):
                shutil.rmtree(left_over, ignore_errors=True)
            aside.mkdir(parents=True)
        dist.barrier()
        engine.save(aside)
        dist.barrier()
        if dist.get_rank() == 0:
            write_aside(aside / "progress.json", json.dumps(dataclasses.asdict(progress), indent=1))
            aside.rename(final)
            write_aside(self.root / "latest", final.name)
            self._prune(progress)
        dist.barrier()
        return final

    def load(self, engine: Saveable, progress: Progress) -> None:
        """Bring the engine to the state that `progress` was saved with."""
        engine.load(self.path(progress))

    def _prune(self, newest: Progress) -> None:
        """Later steps than the newest's are of a run that died before it could name them."""
        of_stage = re.compile(re.escape(newest.stage) + r"-(\d{6,})")
        saved = {int(match[1]): path for path in self.root.iterdir() if (match := of_stage.fullmatch(path.name))}
        steps = sorted(step for step in saved if step <= newest.step)
        for step in steps[: -self._keep]:
            shutil.rmtree(saved[step])


def write_aside(path: Path, text: str) -> None:
    """Replace a file whole: whoever reads it sees the old text or the new."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
