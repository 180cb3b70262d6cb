"""Find and load the operator library for the installed torch. A package has one for each version of torch it serves."""

import functools
import importlib
import platform
import warnings
from pathlib import Path
from typing import TypedDict

import torch

from megatron_sb.torch_version import major_minor

_LIBRARIES = "lib/torch[0-9]*/libmegatron_sb_ops.so"
_BUILD_AGAIN = "build megatron_sb again (pip install --force-reinstall --no-deps .)"


class BuildInfo(TypedDict):
    """How the installed package was built."""

    version: str
    cuda: str | None  # nvcc's version; None for a CPU build
    cuda_architectures: list[int]  # with machine code: 90 for sm_90
    fast_compile: bool  # whether GPU kernels other than Hopper's for bf16 are slow (SB_FAST_COMPILE)
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
            f"{folder.parent}. Run Python in another folder or with -P (Python 3.11 or later), or install with "
            f"pip install -e . (make build)."
        ) from error


def package_folders() -> list[Path]:
    """Return the folders of this package: an editable install has sources in one and libraries in another."""
    return [Path(folder) for folder in importlib.import_module("megatron_sb").__path__]


def libraries() -> dict[str, Path]:
    """Return the operator libraries of this package by the version of torch that they are for, such as 2.11.

    Raises:
        ImportError: If there is none in the folders of the package.
    """
    paths = [path for folder in package_folders() for path in folder.glob(_LIBRARIES)]
    if not paths:
        folders = [str(folder) for folder in package_folders()]
        raise ImportError(
            f"megatron_sb: {_LIBRARIES} is in none of {folders}. Install the package again (pip install .)."
        )
    by_version = {path.parent.name.removeprefix("torch"): path for path in reversed(paths)}
    return dict(sorted(by_version.items(), key=lambda item: major_minor(item[0])))


def library_path() -> Path:
    """Return the path of the operator library for the installed torch.

    Raises:
        ImportError: If the package has none for this version of torch.
    """
    return choose_library(libraries(), torch.__version__)


def choose_library(found: dict[str, Path], version: str) -> Path:
    """Return the path of the operator library for a torch.

    Args:
        found: the paths by version of torch, as `libraries` returns them.
        version: torch.__version__.

    Raises:
        ImportError: If there is none for the major and minor number of this version.
    """
    major, minor = major_minor(version)
    if f"{major}.{minor}" not in found:
        raise ImportError(
            f"megatron_sb has libraries for torch {', '.join(found)}, but torch {version} is installed. "
            f"Install a version of this list, or {_BUILD_AGAIN}."
        )
    return found[f"{major}.{minor}"]


def check_cuda(build: BuildInfo, version: str, cuda: str | None) -> None:
    """Check that this package works with the CUDA version of a torch.

    Args:
        build: how this package was built.
        version: torch.__version__.
        cuda: torch.version.cuda; None for a CPU build of torch.

    Raises:
        ImportError: If this package has CUDA kernels and torch has another major version of CUDA.
    """
    if build["cuda"] is None:
        return
    needed_cuda = build["cuda"].partition(".")[0]
    if (cuda or "").partition(".")[0] != needed_cuda:
        raise ImportError(
            f"megatron_sb was built with CUDA {build['cuda']}, but torch {version} has "
            f"{f'CUDA {cuda}' if cuda else 'no CUDA'}. Install a torch for CUDA {needed_cuda}, or {_BUILD_AGAIN}."
        )


def warn_of_missing_kernels(build: BuildInfo) -> None:
    """Warn of a build without GPU kernels on a machine with GPUs. To count the GPUs does not initialise CUDA.

    Args:
        build: how this package was built.
    """
    num_gpus = torch.cuda.device_count() if build["cuda"] is None and torch.version.cuda else 0
    if num_gpus:
        warnings.warn(
            f"megatron_sb is a CPU build: it has no kernels for the GPUs of this machine ({num_gpus}). "
            f"To use them, put nvcc on PATH and {_BUILD_AGAIN}.",
            stacklevel=2,
        )


@functools.cache
def load() -> None:
    """Load the operators into torch.ops.megatron_sb. Warn if this build has no kernels for the GPUs of this machine.

    Raises:
        ImportError: If they are missing, or were built for another torch.
    """
    build, path = build_info(), library_path()
    check_cuda(build, torch.__version__, torch.version.cuda)
    warn_of_missing_kernels(build)
    try:
        torch.ops.load_library(path)
    except OSError as error:  # such as an undefined symbol: a pre-release of torch differs from the release
        reason = error.__cause__ or error  # newer versions of torch only name the file, and chain the linker's message
        raise ImportError(
            f"megatron_sb: {path} does not load with torch {torch.__version__}: {reason}. To fix this, {_BUILD_AGAIN}."
        ) from error
    if major_minor(torch.__version__) < (2, 9):
        importlib.import_module("megatron_sb.ops.group_timeout").register()
