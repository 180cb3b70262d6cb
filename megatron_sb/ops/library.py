"""Find and load the operator library, which must be built for the installed torch."""

import functools
import importlib
import platform
import warnings
from pathlib import Path
from typing import TypedDict

import torch

from megatron_sb.torch_version import major_minor

_LIBRARY = "lib/libmegatron_sb_ops.so"
_BUILD_AGAIN = "build megatron_sb again (pip install --force-reinstall --no-deps .)"


class BuildInfo(TypedDict):
    """How the installed library was built."""

    version: str
    torch: str
    cuda: str | None  # nvcc's version; None for a CPU build
    cuda_architectures: list[int]  # with machine code: 90 for sm_90
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


def check_torch(build: BuildInfo, version: str, cuda: str | None) -> None:
    """Check that this library works with a torch.

    Args:
        build: how this library was built.
        version: torch.__version__.
        cuda: torch.version.cuda; None for a CPU build of torch.

    Raises:
        ImportError: If torch has another major or minor number, or if this library has CUDA kernels and torch has
            another major version of CUDA.
    """
    needed = major_minor(build["torch"])
    if major_minor(version) != needed:
        raise ImportError(
            f"megatron_sb was built with torch {build['torch']}, but torch {version} is installed. "
            f"Install torch {needed[0]}.{needed[1]}, or {_BUILD_AGAIN}."
        )
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
        build: how this library was built.
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
        ImportError: If they are missing, or were built with another torch.
    """
    check_torch(build_info(), torch.__version__, torch.version.cuda)
    warn_of_missing_kernels(build_info())
    try:
        torch.ops.load_library(library_path())
    except OSError as error:  # such as an undefined symbol: a pre-release of torch differs from the release
        raise ImportError(
            f"megatron_sb was built with torch {build_info()['torch']}, and its library does not load with torch "
            f"{torch.__version__}: {error}. To fix this, {_BUILD_AGAIN}."
        ) from error
