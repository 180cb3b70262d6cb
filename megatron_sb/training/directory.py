"""A run's directory: which one it is, what may differ when a run is resumed, and that one job at a time writes to it.

DIR/config.yaml    makes it a run
DIR/.lock          held (flock) by the job that writes; it stays when the job is gone, and holds nobody up then
"""

from __future__ import annotations

import errno
import fcntl
import re
import sys
import time
import warnings
from pathlib import Path
from typing import IO

from megatron_sb.training import config as configuration
from megatron_sb.training.config import TrainingConfig

LOCK_WAIT_SECONDS = 60.0  # a run whose launcher was killed ends its step and saves, and is then gone on with
POLL_SECONDS = 0.1
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without flock say
# What may differ when a run is resumed; what documents are padded to is looked at by itself.
LAYOUT_FIELDS = (
    r"parallel\..*|model\.recompute|report\..*|checkpoint\..*"
    r"|stages\.\d+\.(context_parallel_size|hierarchical_context_parallel_sizes|rows_per_micro_batch|pad_multiple)"
)


def prepare_directory(config: TrainingConfig, out: str | None, resume: bool) -> tuple[Path, IO]:
    """The directory of a new run, made, or of the run to go on with, and its lock, which is held until it is closed;
    what makes it a run is the config.yaml in it.

    Raises ValueError where a new one holds a run already, one to resume holds none or was configured otherwise, or
    another job writes to it (for one to resume, still after LOCK_WAIT_SECONDS).
    """
    if resume:
        directory = Path(out) if out else _newest(config.name)
        if not (directory / "config.yaml").exists():
            raise ValueError(f"--resume: {directory} holds no run (no config.yaml)")
        refuse_changes(directory, config)
        # The other ranks wait for the answer no longer than timeout_seconds.
        return directory, hold(directory, min(LOCK_WAIT_SECONDS, config.parallel.timeout_seconds / 2))
    directory = Path(out) if out else _made(Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    directory.mkdir(parents=True, exist_ok=True)
    lock = hold(directory)
    if (directory / "config.yaml").exists():
        lock.close()
        raise ValueError(f"{directory} holds a run already: go on with --resume, or name another directory with --out")
    return directory, lock


def hold(directory: Path, wait_seconds: float = 0.0) -> IO:
    """Take the directory's lock: an open file, which holds it until it is closed or its process ends.

    Raises ValueError where another job has it, still after so many seconds. Where the file system has no locks, nobody
    is held up, and a warning says so.
    """
    file = (directory / ".lock").open("a")
    deadline, said = time.monotonic() + wait_seconds, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise ValueError(f"another job is writing to {directory}") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(
                f"{directory} cannot be locked ({error.strerror}): start one job at a time there", stacklevel=2
            )
            return file
        if not said:
            said = True
            text = f"another job is writing to {directory}; waiting up to {wait_seconds:g} s for it to end"
            print(f"megatron-sb: {text}", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)


def refuse_changes(directory: Path, config: TrainingConfig) -> None:
    """Only what a model and its rows are spread over may change: not the rows, nor what is done with them.

    Raises ValueError for another configuration than the one that the directory's run was started with.
    """
    before = configuration.load_config(directory / "config.yaml")
    began, wanted = configuration.flatten(before), configuration.flatten(config)
    for path in began | wanted:
        if began.get(path) != wanted.get(path) and not re.fullmatch(LAYOUT_FIELDS, path):
            raise ValueError(
                f"--resume: {path} = {wanted.get(path)!r}, but {directory} was started with {began.get(path)!r}; "
                "a resumed run must go on as it began"
            )
    for index, (old, new) in enumerate(zip(before.stages, config.stages, strict=True)):
        if before.pad_multiple(old) != config.pad_multiple(new):
            raise ValueError(
                f"--resume: stages.{index} pads documents to multiples of {config.pad_multiple(new)} on these ranks, "
                f"but {directory} was started with {before.pad_multiple(old)}, and rows would be cut elsewhere; give "
                f"stages.{index}.pad_multiple = {before.pad_multiple(old)}"
            )


def _newest(name: str) -> Path:
    found = sorted(path.parent for path in Path("runs").glob(f"{name}-*/config.yaml"))
    if not found:
        raise ValueError(f"--resume: there is no runs/{name}-* to go on with; name the directory with --out")
    return found[-1]


def _made(directory: Path) -> Path:
    """A new directory of this name, or with -2, -3 and so on after it where that is taken: another job's."""
    count, made = 1, directory
    while True:
        try:
            made.mkdir(parents=True)
            return made
        except FileExistsError:
            count += 1
            made = directory.with_name(f"{directory.name}-{count}")
