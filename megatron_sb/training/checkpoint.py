"""Checkpoints on disk. Each is a directory, written under a temporary name and renamed. `latest` names the newest one.

    <root>/short-000100/        model and optimizer (written by the engine), progress.json, and checksums.json
    <root>/latest               "short-000100"

A job that dies while it writes leaves `<root>/.short-000100.tmp`. No code reads that directory. The next job that
resumes the run removes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_sb.megatron.integrity import CheckpointError, cause_of, check_files, write_checksums
from megatron_sb.validation import MissingFileError, naming

# What readers and writers of checkpoints raise for bad files. The first comes from every rank at once.
FAILURES = (CheckpointException, OSError, ValueError, KeyError, pickle.UnpicklingError)

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class Progress:
    """The position of a model's training.

    Attributes:
        stage: name of the stage.
        step: number of finished steps of the stage.
        tokens: number of labels trained on so far, over all stages.
        sampler: state of the stage's sampler.
        corpus: fingerprint of the data.
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
        root: the directory that holds them.
        keep: number of checkpoints to keep for each stage, the newest ones.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = keep

    def latest(self) -> Progress | None:
        """Return the position of the newest checkpoint, or None if there is none."""
        return None if self.is_empty() else read_progress(newest_checkpoint(self.root))

    def is_empty(self) -> bool:
        """Return whether no checkpoint was saved."""
        return not (self.root / "latest").exists()

    def restore_latest(self) -> list[str]:
        """Let `latest` name a whole checkpoint, and remove what a job left that died while it saved.

        Only one process may call this, before any other method.

        Returns:
            A sentence for each damaged checkpoint, and one that names the checkpoint to use instead. Empty if the
            newest checkpoint is whole or there is none.

        Raises:
            CheckpointError: All checkpoints are damaged.
        """
        for left_over in filter(Path.is_dir, self.root.glob(".*.tmp")):
            shutil.rmtree(left_over)
        if self.is_empty():
            return []
        newest = newest_checkpoint(self.root)
        saved = (path for path in self.root.iterdir() if path.is_dir() and not path.name.startswith("."))
        older = sorted((path for path in saved if path != newest), key=_tokens, reverse=True)
        damaged = []
        for path in (newest, *older):
            try:
                check_whole(path)
            except ValueError as error:
                damaged.append(str(error))
                continue
            if not damaged:
                return []
            write_atomically(self.root / "latest", path.name)
            return [*damaged, f"using {path}, the newest whole checkpoint"]
        raise CheckpointError(f"{damaged[0]}, and {self.root} has no whole checkpoint. Start a new run.")

    def path(self, progress: Progress) -> Path:
        """Return the directory of a checkpoint."""
        return self.root / f"{progress.stage}-{progress.step:06d}"

    def save(self, engine: Saveable, progress: Progress) -> Path:
        """Write a checkpoint and return its directory. Do nothing if it is already the newest.

        Raises:
            CheckpointError: The checkpoint cannot be written, for example because the disk is full.
        """
        final = self.path(progress)
        if agreed(lambda: self.latest() == progress):
            return final
        try:
            self._write(engine, progress, final)
        except (*FAILURES, RuntimeError) as error:  # torch's writer raises RuntimeError when the disk is full
            raise CheckpointError(f"{final} could not be saved: {cause_of(error)}") from error
        return final

    def _write(self, engine: Saveable, progress: Progress, final: Path) -> None:
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
            write_checksums(temporary)
            temporary.rename(final)
            write_atomically(self.root / "latest", final.name)
            self._prune(progress)
        dist.barrier()

    def load(self, engine: Saveable, progress: Progress) -> None:
        """Load the checkpoint of `progress` into the engine. For errors, see the function `load`."""
        load(engine, self.path(progress))

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


def agreed(find: Callable[[], Found]) -> Found:
    """Return what rank 0 finds, on every rank. Collective.

    On a network file system, another machine can see a new file of rank 0 seconds later. Ranks that found different
    files would call different collectives, or train on from different steps.
    """
    answer = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def newest_checkpoint(root: Path) -> Path:
    """Return the newest checkpoint in the folder of a model's checkpoints.

    Raises:
        FileNotFoundError: No checkpoint was saved there.
    """
    try:  # of a damaged file, bytes that are not UTF-8 become the name of a checkpoint that does not exist
        return root / (root / "latest").read_text(encoding="utf-8", errors="backslashreplace").strip()
    except FileNotFoundError:
        raise MissingFileError(
            f"{root} has no checkpoint: the file 'latest' does not exist. Train the run. If it is finished, it was "
            "trained with checkpoint.stage_ends = false: `megatron-sb train RUN --resume --set "
            "checkpoint.stage_ends=true` repeats the steps that it has not saved."
        ) from None


def load(engine: Saveable, path: Path) -> None:
    """Load a checkpoint into the engine. Collective.

    Raises:
        CheckpointError: The checkpoint cannot be read, or belongs to another model.
    """
    try:
        engine.load(path)
    except FAILURES as error:
        raise CheckpointError(f"{path} cannot be loaded: {cause_of(error)}") from error


def check_whole(path: Path) -> None:
    """Check the files of a checkpoint of a run.

    Raises:
        ValueError: A file is damaged or missing.
    """
    read_progress(path)
    check_files(path)


def read_progress(path: Path) -> Progress:
    """Return the position of training at which a checkpoint was saved.

    Raises:
        CheckpointError: The file cannot be read.
    """
    try:
        return Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path / 'progress.json'} is damaged: {cause}") from error


def _tokens(path: Path) -> int:
    """Return the number of labels that the model of a checkpoint was trained on; 0 if its progress is damaged."""
    try:
        return read_progress(path).tokens
    except CheckpointError:
        return 0


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path), temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
