"""CMake finds the installed torch also in pip's isolated build, where environment variables hide it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.libtorch import write_libtorch
from support.messages import mentions

ROOT = Path(__file__).parents[3]
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
PROJECT = f"""
cmake_minimum_required(VERSION 3.20)
project(finds_torch NONE)
include("{ROOT / "cmake" / "SbTorch.cmake"}")
message(STATUS "torch ${{SB_TORCH_VERSION}} in ${{SB_TORCH_ROOT}}")
message(STATUS "minor ${{SB_TORCH_MINOR}}, CUDA '${{SB_TORCH_CUDA_VERSION}}'")
"""
TORCH = """
from types import SimpleNamespace
__version__, version, compiled_with_cxx11_abi = "2.11.7", SimpleNamespace(cuda=None), lambda: True
"""


def configure(folder, source):
    """Run CMake in the environment of pip's isolated build, for a user with a package torch of this source code.

    Returns:
        The exit status, the output, and the folder of the package.
    """
    (folder / "isolation").mkdir()
    (folder / "isolation" / "torch.py").write_text("raise ImportError('hidden by the isolation')")
    (folder / "CMakeLists.txt").write_text(PROJECT)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    package = folder / "home" / ".local" / "lib" / version / "site-packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    isolated = {"HOME": str(folder / "home"), "PYTHONNOUSERSITE": "1", "PYTHONPATH": str(folder / "isolation")}
    # The Python of a virtual environment never imports packages of the user's home. It is a link to one that does.
    command = [CMAKE, "-S", folder, "-B", folder / "build", f"-DPython_EXECUTABLE={Path(sys.executable).resolve()}"]
    done = subprocess.run(command, env=os.environ | isolated, capture_output=True, text=True, timeout=60)
    return done.returncode, " ".join((done.stdout + done.stderr).split()), package


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
def test_torch_in_the_users_home_is_found(tmp_path):
    status, output, package = configure(tmp_path, TORCH)
    assert status == 0, output
    assert f"torch 2.11.7 in {package}" in output


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
def test_the_minor_version_of_a_vendors_pre_release_is_found(tmp_path):
    source = TORCH.replace("2.11.7", "2.9.0a0+git-nv25.09").replace("cuda=None", "cuda='12.9'")
    status, output, _ = configure(tmp_path, source)
    assert status == 0, output
    assert "torch 2.9.0a0+git-nv25.09 in" in output
    assert "minor 2.9, CUDA '12.9'" in output


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
def test_what_a_module_prints_is_ignored(tmp_path):
    status, output, package = configure(tmp_path, f"print('a vendor; 1.0')\n{TORCH}")
    assert status == 0, output
    assert f"torch 2.11.7 in {package}" in output


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
def test_without_torch_the_error_says_what_to_install(tmp_path):
    status, output, _ = configure(tmp_path, r"raise ImportError('broken: C:\dir;\u')")
    assert status != 0 and "broken" in output
    assert re.search(mentions("no torch pip install torch Python_EXECUTABLE --no-build-isolation"), output)


def configure_with_root(folder, root):
    """Run CMake with SB_TORCH_ROOT=root. Return the exit status and the output."""
    (folder / "CMakeLists.txt").write_text(PROJECT)
    command = [CMAKE, "-S", folder, "-B", folder / "build", f"-DSB_TORCH_ROOT={root}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
def test_the_version_of_a_given_libtorch_is_found(tmp_path):
    root = Path(torch.__file__).parent
    status, output = configure_with_root(tmp_path, root)
    assert status == 0, output
    assert f"torch {torch.__version__.partition('+')[0]} in {root}" in output
    assert f"CUDA '{torch.version.cuda or ''}'" in output


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
@pytest.mark.parametrize("header", ["headeronly/version.h", "csrc/api/include/torch/version.h"])
def test_the_version_is_read_from_the_header_of_each_release(header, tmp_path):
    """The header moved in torch 2.10. A LibTorch archive has no version.py, so its CUDA version is unknown."""
    write_libtorch(tmp_path / "libtorch", "2.9.3", header=header)
    status, output = configure_with_root(tmp_path, tmp_path / "libtorch")
    assert status == 0, output
    assert f"torch 2.9.3 in {tmp_path / 'libtorch'}" in output
    assert "minor 2.9, CUDA 'unknown'" in output


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
def test_a_folder_without_libtorch_is_an_error(tmp_path):
    status, output = configure_with_root(tmp_path, tmp_path)
    assert status != 0
    assert re.search(mentions(f"SB_TORCH_ROOT include/ lib/ {tmp_path}"), output)


def find_package(folder, definition, required="", cuda=""):
    """Run CMake in a project that finds the package megatron_sb in `folder`. Return the exit status and the output.

    cuda: version of nvcc that built the package. Empty for a package without CUDA kernels.
    """
    package = folder / "lib" / "cmake" / "megatron_sb"
    (package / "torch2.11").mkdir(parents=True, exist_ok=True)
    (package / "torch2.11" / "megatron_sb_targets.cmake").write_text("add_library(megatron_sb::ops INTERFACE IMPORTED)")
    shutil.copy(ROOT / "cmake" / "SbTorch.cmake", package)
    config = (ROOT / "cmake" / "megatron_sbConfig.cmake.in").read_text().replace("@PACKAGE_INIT@", "")
    (package / "megatron_sbConfig.cmake").write_text(config.replace("@sb_cuda_version@", cuda))
    (folder / "CMakeLists.txt").write_text(f"""
        cmake_minimum_required(VERSION 3.20)
        project(uses_the_package NONE)
        find_package(megatron_sb {required})
        message(STATUS "found: ${{megatron_sb_FOUND}}")
        if(megatron_sb_FOUND)
            get_target_property(options megatron_sb::ops INTERFACE_LINK_OPTIONS)
            message(STATUS "options: ${{options}}")
        endif()
    """)
    command = [CMAKE, "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={folder}", definition]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
@pytest.mark.parametrize(
    ("definition", "reason"),
    [("-DSB_TORCH_ROOT={folder}", "SB_TORCH_ROOT include/ lib/"), ("-DPython_EXECUTABLE={folder}/python", "no torch")],
)
def test_a_project_can_do_without_the_package_if_there_is_no_torch(definition, reason, tmp_path):
    """find_package without REQUIRED continues. With REQUIRED its error has the reason."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    for required, works in (("", True), ("REQUIRED", False)):
        status, output = find_package(tmp_path, definition.format(folder=tmp_path), required)
        assert (status == 0) == works and ("found: 0" in output) == works, output
        assert re.search(mentions(reason), output)


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
@pytest.mark.parametrize("cuda", ["13.0", None])
def test_a_program_loads_the_cuda_part_of_its_own_torch(cuda, tmp_path):
    """Otherwise it would load that of a torch that pip installed next to the package, or find none."""
    root = write_libtorch(tmp_path / "libtorch", "2.11.0", cuda=cuda)
    status, output = find_package(tmp_path, f"-DSB_TORCH_ROOT={root}", "REQUIRED", cuda="13.0.88")
    assert status == 0, output
    assert f"{root}/lib/libtorch_cuda.so" in output.partition("options: ")[2]
    status, output = find_package(tmp_path, f"-DSB_TORCH_ROOT={root}", "REQUIRED")
    assert status == 0 and "options: options-NOTFOUND" in output, output


@pytest.mark.skipif(not CMAKE, reason="needs cmake")
@pytest.mark.parametrize(("cuda", "found"), [("12.8", "CUDA 12.8"), (None, "no CUDA")])
def test_a_program_needs_a_torch_for_the_cuda_of_the_package(cuda, found, tmp_path):
    root = write_libtorch(tmp_path / "libtorch", "2.11.0", cuda=cuda)
    if cuda is None:
        (root / "lib" / "libtorch_cuda.so").unlink()
    status, output = find_package(tmp_path, f"-DSB_TORCH_ROOT={root}", "REQUIRED", cuda="13.0.88")
    assert status != 0
    assert re.search(mentions(f"13.0.88 2.11.0 {root} {found} CUDA 13"), output)
