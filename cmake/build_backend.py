"""The build backend: scikit-build-core, after a check that this machine can build the package.

pip asks for the metadata of a package before it downloads what the package depends on. At this point the checks of
CMakeLists.txt run: a missing or old torch, compiler or nvcc is an error before anything is installed. The same checks
give the local part of the version, such as 0.1.0+cu13.torch2.11 or 0.1.0+cpu.torch2.11. pip prints it in its last line.
The build that follows takes it from the metadata. If the system kills a compiler because memory runs out, the build
ends with a message that says how to compile fewer files at a time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scikit_build_core import build as scikit_build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "dynamic_metadata",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).parents[1]
# scikit-build-core may import this module a second time, as the provider of the version. Both copies see the variable.
LOCAL_VERSION = "SB_LOCAL_VERSION"
Settings = Mapping[str, Any]
# What g++, nvcc, the shell, ninja and make print if a compiler was killed.
KILLED = re.compile(
    rb"Killed signal terminated program|died due to signal 9\b|^Killed$|: +\d+ Killed |\[code=137\]|Error 137$",
    re.MULTILINE,
)


def dynamic_metadata(field: str, settings: Settings) -> str:
    """Return the version for scikit-build-core: that of CMakeLists.txt. Wheels have a local part, archives do not."""
    found = re.search(r"project\(megatron_sb VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    local = os.environ.get(LOCAL_VERSION)
    return f"{found[1]}+{local}" if local else found[1]


def check_machine(config_settings: Settings | None) -> str:
    """Run the checks of CMakeLists.txt with the settings of the build. Print CMake's messages if one fails.

    Args:
        config_settings: settings of pip's option -C.

    Returns:
        The local part of the version: the CUDA version of the build, or cpu, and the version of torch.

    Raises:
        SystemExit: If a check fails.
    """
    # The state of a wheel: CMake's definitions are the same for every way to build.
    reader = SettingsReader.from_file(ROOT / "pyproject.toml", config_settings or {}, state="wheel")
    cmake = reader.settings.cmake
    environment = {**os.environ, "PATH": os.pathsep.join([*_tool_folders(), os.environ.get("PATH", "")])}
    with tempfile.TemporaryDirectory(prefix="megatron_sb_check_") as folder:
        answer = Path(folder, "local_version.txt")
        # The user's own arguments come last, as in scikit-build-core.
        command = ["cmake", "-S", str(ROOT), "-B", folder, "-G", environment.get("CMAKE_GENERATOR", "Ninja")]
        command += [f"-DSB_LOCAL_VERSION_FILE={answer}", f"-DPython_EXECUTABLE={sys.executable}"]
        command += [f"-D{name}={value}" for name, value in cmake.define.items()]
        command += [*cmake.args, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        except FileNotFoundError:
            sys.exit("megatron_sb: there is no cmake. Run pip install 'cmake>=3.26' ninja, or build with isolation.")
        if done.returncode != 0:
            sys.exit(f"{done.stderr}\nmegatron_sb cannot be built here. Nothing was changed. The reason is above.")
        return answer.read_text().strip()


def _tool_folders() -> list[str]:
    """Return the folders of cmake and ninja, if Python packages brought them."""
    folders = [str(Path(sys.executable).parent)]
    for module, variable in (("cmake", "CMAKE_BIN_DIR"), ("ninja", "BIN_DIR")):
        try:
            folders.insert(0, str(getattr(importlib.import_module(module), variable)))
        except (ImportError, AttributeError):
            continue  # the tool of the system
    return folders


def _checked(hook: Callable[..., str]) -> Callable[..., str]:
    """Return a hook of scikit-build-core that first checks the machine, unless the hook of the metadata did it."""

    @functools.wraps(hook)
    def checked(directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None) -> str:
        if metadata_directory is None:
            os.environ[LOCAL_VERSION] = check_machine(config_settings)
            return hook(directory, config_settings)
        # The wheel must have these metadata, so its version is known.
        version = re.search(r"^Version: (.*)$", Path(metadata_directory, "METADATA").read_text(), re.MULTILINE)
        os.environ[LOCAL_VERSION] = version[1].partition("+")[2]
        return hook(directory, config_settings, metadata_directory)

    return checked


@contextlib.contextmanager
def _watched_output() -> Iterator[list[bytes]]:
    """Yield a list that gets the lines of this process and its children which say that a compiler was killed.

    The output goes on to where it went before. The list is complete after the block.
    """
    found: list[bytes] = []

    def forward(source: int, target: int) -> None:
        with open(source, "rb") as lines, open(target, "wb", buffering=0) as out:
            for line in lines:
                out.write(line)
                if KILLED.search(line):
                    found.append(line)

    threads, saved = [], []
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        saved.append((stream, descriptor, os.dup(descriptor)))
        read, write = os.pipe()
        os.dup2(write, descriptor)
        os.close(write)
        threads.append(threading.Thread(target=forward, args=(read, os.dup(saved[-1][2])), daemon=True))
        threads[-1].start()
    try:
        yield found
    finally:
        for stream, descriptor, original in saved:
            stream.flush()
            os.dup2(original, descriptor)
            os.close(original)
        for thread in threads:
            thread.join(timeout=5)  # a program that stays in the background, such as a cache, keeps the pipe open


def _too_little_memory() -> str:
    """Return the message for a compiler that was killed."""
    given = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    jobs = int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0)) + 2  # ninja's default
    message = "megatron_sb: a compiler was killed, most likely because memory ran out. "
    if jobs == 1:
        return message + (
            "CMAKE_BUILD_PARALLEL_LEVEL is 1 already. Add memory or swap, or build without GPU kernels: "
            "-C cmake.define.SB_WITH_CUDA=OFF."
        )
    return message + (
        f"Up to {jobs} compilers ran at a time. Use fewer: CMAKE_BUILD_PARALLEL_LEVEL={max(1, jobs // 4)} pip install "
        ". In a checkout, the next build keeps the files that are compiled already."
    )


def _explained(hook: Callable[..., str]) -> Callable[..., str]:
    """Return a hook that ends with an explanation if a compiler was killed."""

    @functools.wraps(hook)
    def explained(*arguments: Any, **options: Any) -> str:
        killed: list[bytes] = []
        try:
            with _watched_output() as killed:
                return hook(*arguments, **options)
        except (Exception, SystemExit):
            if not killed:
                raise
        sys.exit(_too_little_memory())

    return explained


prepare_metadata_for_build_wheel = _checked(scikit_build.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _checked(scikit_build.prepare_metadata_for_build_editable)
build_wheel = _checked(_explained(scikit_build.build_wheel))
build_editable = _checked(_explained(scikit_build.build_editable))
