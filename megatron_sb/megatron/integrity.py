"""Find damaged files of a distributed checkpoint before they are loaded.

`write_checksums` records the size and the checksum of every file. `check_files` compares them. A checkpoint without a
record is checked less well: its metadata name the size that each file must have at least.
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from megatron_sb.megatron.metadata import read_metadata
from megatron_sb.validation import InputError

CHECKSUMS = "checksums.json"
CHUNK_BYTES = 2**24


class CheckpointError(InputError):
    """A checkpoint is damaged, or cannot be read or written. args: a sentence with the file and the cause."""


def write_checksums(folder: Path) -> None:
    """Record the size and checksum of every file of a checkpoint folder. Call this after all files are written."""
    paths = [path for path in _files(folder) if path.name != CHECKSUMS]
    with ThreadPoolExecutor() as pool:  # zlib computes without the interpreter's lock
        checksums = list(pool.map(_checksum, paths))
    entries = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": checksum}
        for path, checksum in zip(paths, checksums, strict=True)
    }
    with (folder / CHECKSUMS).open("w", encoding="utf-8") as file:
        json.dump(entries, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def check_files(folder: Path) -> None:
    """Check that the files of a checkpoint folder are whole.

    Raises:
        CheckpointError: A file is missing, has another size or another checksum.
        ValueError: `.metadata` cannot be read safely.
    """
    record = folder / CHECKSUMS
    if not record.exists():
        _check_sizes(folder, _needed_sizes(folder))
        return
    try:
        entries = json.loads(record.read_text(encoding="utf-8"))
        checksums = {name: entry["crc32"] for name, entry in entries.items()}
        sizes = {name: entry["bytes"] for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{record} is damaged: {error!r}") from error
    _check_sizes(folder, sizes)
    paths = [folder / name for name in checksums]
    with ThreadPoolExecutor() as pool:
        for path, found, expected in zip(paths, pool.map(_checksum, paths), checksums.values(), strict=True):
            if found != expected:
                raise CheckpointError(f"{path} is damaged: its checksum must be {expected}, got {found}")


def cause_of(error: BaseException) -> str:
    """Return the first line of what a reader or writer of checkpoints raised, without its traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _needed_sizes(folder: Path) -> dict[str, int]:
    """Return the size that each file must have at least for the entries that the metadata place in it."""
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder / '.metadata'} is damaged: the file does not exist")
    needed: dict[str, int] = {}
    for place in (read_metadata(folder).storage_data or {}).values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    return needed


def _check_sizes(folder: Path, needed: dict[str, int]) -> None:
    for name, size in needed.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is damaged: the file does not exist")
        if path.stat().st_size < size:
            raise CheckpointError(f"{path} is damaged: it must have {size} bytes, got {path.stat().st_size}")


def _checksum(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"
