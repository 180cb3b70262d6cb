"""Arrays that are computed once, written to files, and mapped into memory by every rank of every job.

FOLDER/NAME-DIGEST/             an entry; the digest is that of everything its arrays depend on
FOLDER/NAME-DIGEST/entry.json   its facts, and the dtype and length of each array; written last
FOLDER/NAME-DIGEST/ARRAY.bin    an array
FOLDER/.NAME-DIGEST.lock        locked (flock) by the process that builds the entry
FOLDER/.NAME-DIGEST.*.tmp       an entry before it is complete

A builder writes under the temporary name, then renames. So a reader sees a complete entry or none. Other processes wait
for the builder's lock, which ends with its process, and then find the entry.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_sb.training.directory import NO_LOCKS, POLL_SECONDS
from megatron_sb.validation import InputError

ABOUT = "entry.json"


@dataclass(frozen=True)
class Entry:
    """Arrays of the index.

    Attributes:
        key: names the entry, and changes with everything that the arrays depend on.
        arrays: the arrays by name. Do not write to them.
        facts: what the builder returned: numbers, strings, lists and dictionaries.
    """

    key: str
    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


class Growing(Protocol):
    """An array that is being built."""

    def append(self, values: np.ndarray) -> None:
        """Append values, which must fit the dtype."""


# Builds an entry. The argument returns a new array from its name and dtype. The result are the entry's facts.
Build = Callable[[Callable[[str, type], Growing]], dict[str, Any]]


class MemoryIndex:
    """An index without files: every process builds its own entries in memory."""

    def entry(self, name: str, inputs: Any, build: Build) -> Entry:
        """Return an entry.

        Args:
            name: the kind of entry.
            inputs: everything that the arrays depend on: numbers, strings and lists.
            build: computes the entry if it does not exist.
        """
        parts: dict[str, _Parts] = {}

        def new(name: str, dtype: type) -> Growing:
            parts[name] = _Parts(dtype)
            return parts[name]

        facts = build(new)
        return Entry(_key(name, inputs), {name: array.whole() for name, array in parts.items()}, facts)


class FileIndex(MemoryIndex):
    """An index in a folder.

    Args:
        folder: the folder, which is created when it is needed.
        wait_seconds: longest time to wait for a process that builds an entry and writes nothing.
    """

    def __init__(self, folder: Path, wait_seconds: float) -> None:
        self._folder = folder
        self._wait_seconds = wait_seconds

    def entry(self, name: str, inputs: Any, build: Build) -> Entry:
        """See `MemoryIndex.entry`. An entry whose files are incomplete is built again.

        Raises:
            ValueError: The folder cannot be written to, or another process builds the entry and has stopped writing.
        """
        path = self._folder / _key(name, inputs)
        if (found := _read(path)) is not None:
            return found
        with self._naming_folder():
            self._folder.mkdir(parents=True, exist_ok=True)
        with self._turn(path) as beat:
            if (found := _read(path)) is not None:  # another process has built it meanwhile
                return found
            print(f"megatron-sb: building {path}", file=sys.stderr, flush=True)
            self._build(path, build, beat)
        found = _read(path)
        assert found is not None, f"{path} was removed as soon as it was built"
        return found

    def _build(self, path: Path, build: Build, beat: Callable[[], None]) -> None:
        arrays: dict[str, _File] = {}

        def new(name: str, dtype: type) -> Growing:
            with self._naming_folder():
                arrays[name] = _File(temporary / f"{name}.bin", dtype, self._naming_folder, beat)
            return arrays[name]

        with self._naming_folder():
            for left_over in (*self._folder.glob(f".{path.name}.*.tmp"), path):
                shutil.rmtree(left_over, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=self._folder))
        try:
            facts = build(new)
            with self._naming_folder():
                about = {name: [np.dtype(array.dtype).str, array.close()] for name, array in arrays.items()}
                with (temporary / ABOUT).open("w", encoding="utf-8") as file:
                    json.dump({"facts": facts, "arrays": about}, file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.chmod(0o755)  # mkdtemp's folders are private; other users' jobs may read the same data
                try:
                    temporary.rename(path)
                except OSError:
                    if _read(path) is None:  # else, without locks, another process has built the same entry
                        raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _turn(self, path: Path) -> Iterator[Callable[[], None]]:
        """Hold the lock of an entry. Yield a function that shows waiting processes that this one makes progress."""
        with self._naming_folder():
            lock = (self._folder / f".{path.name}.lock").open("a")
        with lock:
            seen, deadline = 0, 0.0
            while not _locked(lock.fileno()):
                changed = os.fstat(lock.fileno()).st_mtime_ns
                if changed != seen:
                    seen, deadline = changed, time.monotonic() + self._wait_seconds
                elif time.monotonic() > deadline:
                    raise InputError(
                        f"data.index_folder: the process that builds {path} must write to it at least every "
                        f"parallel.timeout_seconds = {self._wait_seconds:g} s, and has not. End that process, or "
                        "raise parallel.timeout_seconds."
                    )
                time.sleep(POLL_SECONDS)
            yield lambda: os.utime(lock.fileno())

    @contextlib.contextmanager
    def _naming_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                "data.index_folder must be a folder that can be written to, with room for the index of the data, "
                f"got {str(self._folder)!r}: {error.strerror}"
            ) from error


class _Parts:
    """A `Growing` array in memory."""

    def __init__(self, dtype: type) -> None:
        self._parts = [np.empty(0, dtype)]

    def append(self, values: np.ndarray) -> None:
        self._parts.append(np.asarray(values, self._parts[0].dtype))

    def whole(self) -> np.ndarray:
        return np.concatenate(self._parts)


class _File:
    """A `Growing` array in a file."""

    def __init__(self, path: Path, dtype: type, naming: Callable[[], Any], beat: Callable[[], None]) -> None:
        self.dtype = dtype
        self._file = path.open("wb")
        self._naming = naming
        self._beat = beat

    def append(self, values: np.ndarray) -> None:
        with self._naming():
            self._file.write(np.ascontiguousarray(values, self.dtype).data)
            self._beat()

    def close(self) -> int:
        """Write everything to the disk and return the length."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell() // np.dtype(self.dtype).itemsize


def _key(name: str, inputs: Any) -> str:
    return f"{name}-{hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]}"


def _locked(descriptor: int) -> bool:
    """Return whether this process holds the lock now. It does on file systems without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _read(path: Path) -> Entry | None:
    """Map the arrays of an entry. Return None if it does not exist, or a file of it cannot be read or is cut off."""
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        arrays = {name: _map(path / f"{name}.bin", *of_array) for name, of_array in about["arrays"].items()}
        return Entry(path.name, arrays, about["facts"])
    except (OSError, ValueError, KeyError):
        return None


def _map(path: Path, dtype: str, length: int) -> np.ndarray:
    """Map an array. NumPy raises ValueError if the file is too short."""
    return np.asarray(np.memmap(path, dtype, "r", shape=length)) if length else np.empty(0, dtype)
