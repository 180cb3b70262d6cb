"""Find and load the operator library, which must be built for the installed torch."""

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
    """Return the folders of this package: an editable install has sources in one and libraries in another."""
    return [Path(folder) for folder in importlib.import_module("megatron_sb").__path__]


def library_path() -> Path:
    """Return the operator library's path.

    Raises:
        ImportError: If the library is in none of the folders of the package.
    """
    for folder in package_folders():
        if (folder / _LIBRARY).is_file():
            return folder / _LIBRARY
    folders = [str(folder) for folder in package_folders()]
    raise ImportError(f"megatron_sb: {_LIBRARY} is in none of {folders}. Install the package again (pip install .).")


def check_torch(built_with: str, installed: str) -> None:
    """Raise ImportError unless both versions of torch have the same major and minor number and CUDA variant."""

    def compatible_part(version: str) -> tuple[str, str]:
        release, _, variant = version.partition("+")
        return ".".join(release.split(".")[:2]), variant

    if compatible_part(built_with) != compatible_part(installed):
        raise ImportError(
            f"megatron_sb was built with torch {built_with}, but torch {installed} is installed. "
            "Install that torch, or build megatron_sb again (pip install --force-reinstall --no-deps .)."
        )


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of this package in a new process, from the same installation.

    Python searches the current folder first. A checkout there would hide the installed package, so -P excludes the
    folder.
    """
    runs_in_checkout = Path(__file__).parents[2] == Path.cwd()
    return [sys.executable, *([] if runs_in_checkout else ["-P"]), "-m", module]


@functools.cache
def load() -> None:
    """Load the operators into torch.ops.megatron_sb.

    Raises:
        ImportError: If they are missing, or were built with another torch.
    """
    check_torch(build_info()["torch"], torch.__version__)
    torch.ops.load_library(library_path())
