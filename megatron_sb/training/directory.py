"""A run's directory: its choice, the fields that a resumed run may change, and its lock.

DIR/config.yaml    marks the directory as a run, and names what it was trained with
DIR/.lock          locked (flock) by the job that writes; the lock ends with the job, the file stays. Its text tells
                   other ranks whether their machine has the same directory
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import IO, Any

from megatron_sb.training import config as configuration
from megatron_sb.training.config import TrainingConfig
from megatron_sb.validation import InputError, naming

LOCK_WAIT_SECONDS = 60.0  # after a supervisor was killed, its ranks may still be ending
SEEN_SECONDS = 20.0  # a network file system may show a new file late
POLL_SECONDS = 0.1
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of file systems without flock
# Fields that a resumed run may change. `refuse_changes` also checks that documents are padded as before.
LAYOUT_FIELDS = (
    r"parallel\..*|model\.(recompute|recompute_layers|offloaded_inputs|tokens_at_once)|report\..*|checkpoint\..*"
    r"|data\.index_folder|evaluation\.(interval|last_stage_only)"
    r"|stages\.\d+\.(context_parallel_size|hierarchical_context_parallel_sizes|rows_per_micro_batch|pad_multiple)"
)
RESULTS = ("metrics.jsonl", "evaluation", "*/checkpoints")  # what only a run writes


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, without a last line that a crash cut off. Without the file, none.

    Raises:
        ValueError: Another line is damaged, as after the machine has stopped.
    """
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_metrics_of(path, number, line) for number, line in enumerate(lines[:-1], start=1)]


def _metrics_of(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(
            f"line {number} of {path} is damaged, got {line[:80]!r}. Remove the line: it is a record only."
        )
    return found


def prepare_directory(config: TrainingConfig, out: str | None, resume: bool) -> tuple[Path, IO]:
    """Create the directory of a new run, or find the run to resume, and lock it.

    Args:
        config: the job's configuration.
        out: the directory. Default: runs/NAME-TIME, or the newest runs/NAME-TIME with `resume`.
        resume: find a run instead of creating one.

    Returns:
        The directory, and an open file that holds its lock until it is closed.

    Raises:
        ValueError: The directory of a new run holds a run or results already. The run to resume does not exist, or was
            started with another configuration. Another job writes to the directory; with `resume`, it still does after
            a wait.
    """
    if resume:
        directory = Path(out) if out else _newest(config.name)
        config_of_run(directory)
        refuse_changes(directory, config)
        # The other ranks wait at most timeout_seconds for this rank.
        return directory, hold(directory, min(LOCK_WAIT_SECONDS, config.parallel.timeout_seconds / 2))
    directory = Path(out) if out else _create(Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    directory.mkdir(parents=True, exist_ok=True)
    lock = hold(directory)
    try:
        if (directory / "config.yaml").exists():
            raise InputError(
                f"{directory} holds a run already. Use --resume to continue it, or --out for another directory."
            )
        refuse_results(directory)
    except ValueError:
        lock.close()
        raise
    return directory, lock


def delete_unused(directory: Path) -> None:
    """Delete the directory of a new run that cannot start. Keep it if it has more than the lock."""
    if [path.name for path in directory.iterdir()] == [".lock"]:
        shutil.rmtree(directory)


def config_of_run(directory: Path) -> Path:
    """Return the configuration of the run to resume. Raise ValueError if the directory holds no run."""
    path = directory / "config.yaml"
    if not path.exists():
        raise InputError(f"--resume: {directory} holds no run, because it has no config.yaml")
    return path


def hold(directory: Path, wait_seconds: float = 0.0) -> IO:
    """Lock the directory until the returned file is closed or this process ends.

    On a file system without locks, this function warns and returns.

    Raises:
        ValueError: Another job still holds the lock after `wait_seconds`.
    """
    file = (directory / ".lock").open("a")
    deadline, announced = time.monotonic() + wait_seconds, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise InputError(f"another job is writing to {directory}") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(
                f"{directory} cannot be locked ({error.strerror}). Start only one job at a time there.", stacklevel=2
            )
            return file
        if not announced:
            announced = True
            text = f"another job is writing to {directory}; waiting up to {wait_seconds:g} s for it to end"
            print(f"megatron-sb: {text}", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)


def mark(lock: IO) -> str:
    """Write a new token into the file of a directory's lock, and return it for `check_is_marked`."""
    token = secrets.token_hex(16)
    with naming(Path(lock.name)):
        lock.truncate(0)
        lock.write(token)
        lock.flush()
        os.fsync(lock.fileno())
    return token


def check_is_marked(directory: Path, token: str, wait_seconds: float) -> None:
    """Check that this machine sees the directory that rank 0 has marked. Each rank writes its part of a checkpoint.

    Raises:
        ValueError: It does not within `wait_seconds`.
    """
    deadline = time.monotonic() + wait_seconds
    while not _is_marked(directory, token):
        if time.monotonic() >= deadline:
            raise InputError(
                f"--out must be a folder on a file system that all machines share, got {directory}: "
                f"{socket.gethostname()} does not see what rank 0 writes there"
            )
        time.sleep(POLL_SECONDS)


def _is_marked(directory: Path, token: str) -> bool:
    try:
        return (directory / ".lock").read_text(encoding="utf-8") == token
    except (OSError, UnicodeDecodeError):
        return False


def refuse_results(directory: Path) -> None:
    """Check that a directory without a config.yaml holds no results. They could come from any configuration.

    Raises:
        ValueError: The directory holds metrics, evaluations or checkpoints.
    """
    found = sorted(path for pattern in RESULTS for path in directory.glob(pattern))
    if found:
        raise InputError(
            f"{directory} must be empty or have a config.yaml, got {found[0]} without one. It is the result of a run "
            "with unknown settings. Restore its config.yaml and use --resume, or use --out for another directory."
        )


def refuse_changes(directory: Path, config: TrainingConfig) -> None:
    """Check that a configuration changes neither the rows nor the optimisation of the directory's run.

    Raises:
        ValueError: Another field differs from the configuration that the run was started with.
    """
    before = configuration.load_config(directory / "config.yaml")
    started, wanted = configuration.flatten(before), configuration.flatten(config)
    for fields in (started, wanted):
        if fields.get("initial_checkpoint"):  # two paths can name one folder
            fields["initial_checkpoint"] = str(Path(fields["initial_checkpoint"]).resolve())
    for path in started | wanted:
        if started.get(path) != wanted.get(path) and not re.fullmatch(LAYOUT_FIELDS, path):
            raise InputError(
                f"{path} must be {started.get(path)!r}, which {directory} was started with, got {wanted.get(path)!r}. "
                "For a new run, use another folder (--out)."
            )
    for index, (old, new) in enumerate(zip(before.stages, config.stages, strict=True)):
        if before.pad_multiple(old) != config.pad_multiple(new):
            raise InputError(
                f"stages.{index}.pad_multiple must be {before.pad_multiple(old)}, which {directory} was "
                f"started with, got {config.pad_multiple(new)}. Set it to {before.pad_multiple(old)}, or use a layout "
                "with this default: with another value, rows would be cut elsewhere."
            )


def _newest(name: str) -> Path:
    """Return the newest directory that `_create` made for `name`. Other names may begin with `name`, too."""
    own_directory = re.compile(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found = [
        (match[1], int(match[2] or 1), path.parent)
        for path in Path("runs").glob(f"{name}-*/config.yaml")
        if (match := own_directory.fullmatch(path.parent.name))
    ]
    if not found:
        raise InputError(f"--resume: there is no runs/{name}-TIME. Name the directory with --out.")
    return max(found)[-1]


def _create(directory: Path) -> Path:
    """Create a directory of this name. If it exists, append -2, -3 and so on."""
    count, created = 1, directory
    while True:
        try:
            created.mkdir(parents=True)
            return created
        except FileExistsError:
            count += 1
            created = directory.with_name(f"{directory.name}-{count}")
