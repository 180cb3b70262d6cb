"""The files that `data.kind: text` reads."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import hashlib
import os
import re
import sysconfig
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_sb.training.config import SITE_PACKAGES, STANDARD_LIBRARY, TEXT_OF_PYTHON, TextDataConfig
from megatron_sb.validation import InputError

# Directories of the standard library that hold tables or other packages instead of text, or are missing in some
# installations.
STANDARD_LIBRARY_EXCLUDE = (
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip"),
    *("encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"),
)
# Reasons to leave out a file.
BY_INCLUDE, BY_EXCLUDE, EMPTY = "by data.include", "by data.exclude", "empty"


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """The files of `data.kind: text`.

    Attributes:
        names: their paths.
        sizes: in bytes: int64.
        digest: changes with the name, the size or the time of a file.
        left_out: number of files that are not used, by reason. An excluded directory counts as one file.
    """

    names: list[str]
    sizes: np.ndarray
    digest: str
    left_out: dict[str, int]


def list_files(data: TextDataConfig) -> TextFiles:
    """Return the files that data.paths names, in that order, sorted by relative path within each entry.

    Raises:
        ValueError: An entry names no file, or data.include and data.exclude leave none of its files or have a pattern
            that no name can match.
        OSError: A directory cannot be read.
    """
    check_patterns(data.include, data.exclude)
    found: dict[str, str] = {}  # absolute path, which does not depend on the entry that a file is below -> its name
    sizes, digest, left_out = array("q"), hashlib.sha256(), Counter()
    for entry in data.paths:
        of_entry, num_found = Counter(), 0
        for name, stat in _files_of(entry, data, of_entry):
            num_found += 1
            if stat.st_size == 0:
                of_entry[EMPTY] += 1
            elif (absolute := os.path.abspath(name)) not in found:
                found[absolute] = name
                sizes.append(stat.st_size)
                digest.update(
                    f"{name}\0{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\0".encode(errors="replace")
                )
        if not num_found:
            raise InputError(_why_nothing(entry, data, of_entry))
        left_out += of_entry
    return TextFiles([*found.values()], np.array(sizes, dtype=np.int64), digest.hexdigest(), dict(left_out))


def check_patterns(include: Sequence[str], exclude: Sequence[str]) -> None:
    """Raise ValueError for a pattern that no name can match, such as a path."""
    for field, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if "/" in pattern:
                raise InputError(
                    f"data.{field} must have patterns of names, without '/', got {pattern!r}. A pattern is compared "
                    "with the names of files and directories, not with their paths."
                )


def _why_nothing(entry: str, data: TextDataConfig, left_out: Counter[str]) -> str:
    if left_out[BY_INCLUDE]:
        return (
            f"data.include must match files in {entry!r}, got {list(data.include)!r}, which match none of the "
            f"{left_out[BY_INCLUDE]} files there"
        )
    if left_out[BY_EXCLUDE]:
        return f"data.exclude must leave files in {entry!r}, got {list(data.exclude)!r}, which match all files there"
    return (
        f"data.paths must name files, directories, glob patterns or {' or '.join(map(repr, TEXT_OF_PYTHON))}, "
        f"got {entry!r}, which names no file"
    )


def _files_of(entry: str, data: TextDataConfig, left_out: Counter[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and status of the files of one entry of data.paths. Count the others in `left_out`."""
    if entry == STANDARD_LIBRARY:
        kinds = _Kinds(data, only="*.py", never=STANDARD_LIBRARY_EXCLUDE)
        yield from kinds.below(sysconfig.get_paths()["stdlib"], left_out)
    elif entry == SITE_PACKAGES:
        yield from _Kinds(data).below(sysconfig.get_paths()["purelib"], left_out)
    elif os.path.isdir(entry):
        yield from _Kinds(data).below(str(Path(entry)), left_out)
    else:
        yield from _Kinds(data).matching(entry, left_out)


class _Kinds:
    """Tells which files to read.

    Args:
        data: its include and exclude count what they leave out.
        only: pattern of files that are considered at all.
        never: patterns of files and directories that are not considered.
    """

    def __init__(self, data: TextDataConfig, only: str = "*", never: Sequence[str] = ()) -> None:
        patterns = (data.include, data.exclude, [only], never)
        self._included, self._excluded, self._only, self._never = map(matcher, patterns)

    def matching(self, entry: str, left_out: Counter[str]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the file with this name, or the files that match a glob pattern, sorted.

        data.exclude applies to the names that the pattern's wildcards match, and to that of the file.
        """
        if os.path.isfile(entry):
            names, fixed = [entry], len(Path(entry).parts) - 1
        else:
            names = [name for name in sorted(glob.glob(entry, recursive=True)) if os.path.isfile(name)]
            fixed = list(map(glob.has_magic, Path(entry).parts)).index(True) if names else 0
        for name in map(Path, names):
            if any(map(self._excluded, name.parts[fixed:])):
                left_out[BY_EXCLUDE] += 1
            else:
                yield str(name), os.stat(name)

    def below(self, folder: str, left_out: Counter[str]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files below a folder, sorted by relative path. Symbolic links to directories are not followed."""
        with os.scandir(folder) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
        for entry in entries:
            name, is_folder = entry.name, entry.is_dir(follow_symlinks=False)
            if self._never(name) or not (is_folder or (self._only(name) and entry.is_file())):
                continue
            if self._excluded(name):
                left_out[BY_EXCLUDE] += 1
            elif is_folder:
                yield from self.below(entry.path, left_out)
            elif self._included(name):
                yield entry.path.removeprefix("./"), entry.stat()
            else:
                left_out[BY_INCLUDE] += 1


def matcher(patterns: Sequence[str]):
    """Return a function that tells whether a name matches a pattern."""
    return re.compile("|".join(map(fnmatch.translate, patterns)) if patterns else r"(?!)").match
