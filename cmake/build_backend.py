"""The build backend: scikit-build-core, after a check that this machine can build the package.

pip asks for the metadata of a package before it downloads what the package depends on. At this point the checks of
CMakeLists.txt run: a missing or old torch, compiler or nvcc is an error before anything is installed. The same checks
give the local part of the version, such as 0.1.0+cu13.torch2.11 or 0.1.0+cpu.torch2.11. pip prints it in its last line.
The build that follows takes it from the metadata.
"""

import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
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
            sys.exit("megatron_sb: there is no cmake. Run pip install 'cmake>=3.25' ninja, or build with isolation.")
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


prepare_metadata_for_build_wheel = _checked(scikit_build.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _checked(scikit_build.prepare_metadata_for_build_editable)
build_wheel = _checked(scikit_build.build_wheel)
build_editable = _checked(scikit_build.build_editable)
