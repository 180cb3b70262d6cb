"""Find and load the operator library. It must be built for the installed torch."""

import functools
import importlib
import platform
import sys
from pathlib import Path
from typing import TypedDict

import torch

_LIBRARY = "lib/libmegatron_sb_ops.so"


class BuildInfo(TypedDict):
    """How the installed library was built."""

    version: str
    torch: str
    cuda: str | None  # nvcc's version; None for a CPU build
    compiler: str


@functools.cache
def build_info() -> BuildInfo:
    """Return how this package was built.

    Raises:
        ImportError: If there is no compiled module.
    """
    try:
        return importlib.import_module("megatron_sb._C").build_info()
    except ModuleNotFoundError as error:
        folder = Path(__file__).parents[1]
        raise ImportError(
            f"megatron_sb was imported from {folder}, which has no compiled module for Python "
            f"{platform.python_version()}. This is a source tree. It hides an installed package while Python runs in "
            f"{folder.parent}. Run Python in another folder or with -P, or install with pip install -e . (make build)."
        ) from error


def package_folders() -> list[Path]:
    """Folders that hold files of this package: an editable install has sources in one and libraries in another."""
    return [Path(folder) for folder in importlib.import_module("megatron_sb").__path__]


def library_path() -> Path:
    """Return the operator library's path.

    Raises:
        ImportError: it is in none of the package's folders.
    """
    for folder in package_folders():
        if (folder / _LIBRARY).is_file():
            return folder / _LIBRARY
    raise ImportError(f"megatron_sb: {_LIBRARY} is in none of {[str(folder) for folder in package_folders()]}")


def check_torch(built_with: str, installed: str) -> None:
    """Raise ImportError unless both torch versions share major, minor and their CUDA variant."""

    def key(version: str) -> tuple[str, str]:
        release, _, variant = version.partition("+")
        return ".".join(release.split(".")[:2]), variant

    if key(built_with) != key(installed):
        raise ImportError(
            f"megatron_sb was built with torch {built_with}, but torch {installed} is installed; "
            "install that torch or build megatron_sb again (pip install --force-reinstall --no-deps .)"
        )


def module_command(module: str) -> list[str]:
    """What starts a module of this package in a new process, which imports the same package.

    Python looks in the current folder first, where a checkout would hide what is installed; -P leaves the folder out.
    """
    here = Path(__file__).parents[2] == Path.cwd()
    return [sys.executable, *([] if here else ["-P"]), "-m", module]


@functools.cache
def load() -> None:
    """Load the operators into torch.ops.megatron_sb.

    Raises:
        ImportError: they are missing, or were built with another torch.
    """
    check_torch(build_info()["torch"], torch.__version__)
    torch.ops.load_library(library_path())
