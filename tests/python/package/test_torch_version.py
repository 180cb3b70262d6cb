"""The package works with each supported torch, and names what to do about any other: when it is built and imported."""

import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from support.cmake import configure, needs_cmake, run_script
from support.libtorch import write_libtorch
from support.messages import mentions
from support.project import project_table

from megatron_sb import torch_version
from megatron_sb.baselines.softmax import kernels
from megatron_sb.ops import library

ROOT = Path(__file__).parents[3]
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
CPU_BUILD = library.BuildInfo(
    version="0.1.0", cuda=None, cuda_architectures=[], fast_compile=False, compiler="GNU 12.2.0"
)
CUDA_BUILD = CPU_BUILD | {"cuda": "13.0.88", "cuda_architectures": [80, 90]}
LIBRARIES = {version: Path(f"lib/torch{version}/libmegatron_sb_ops.so") for version in ("2.9", "2.11")}


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.8.0", (2, 8)),
        ("2.11.0+cu130", (2, 11)),
        ("2.9.0a0+git-nv25.09", (2, 9)),
        ("2.10.0a0+b558c986e8.nv25.11", (2, 10)),
        ("2.16.0.dev20261101+cpu", (2, 16)),
        ("3.0", (3, 0)),
    ],
)
def test_major_and_minor_number_are_parsed(version, numbers):
    assert torch_version.major_minor(version) == numbers


def test_a_version_without_numbers_is_an_error():
    with pytest.raises(ValueError, match=mentions("torch 2.11 nightly")):
        torch_version.major_minor("nightly")


@pytest.mark.parametrize(
    ("installed", "version"), [("2.11.1+cu132", "2.11"), ("2.9.0a0+git-nv25.09", "2.9"), ("2.11.0+cpu", "2.11")]
)
def test_the_library_of_the_minor_version_is_chosen(installed, version):
    """Patch releases and the builds of vendors use the library of the release."""
    assert library.choose_library(LIBRARIES, installed) == LIBRARIES[version]


@pytest.mark.parametrize("installed", ["2.1.0", "2.10.0+cu130", "2.12.0+cu130", "2.90.0", "3.11.0"])
def test_a_torch_without_a_library_raises_an_error(installed):
    """The message names both versions and what to do."""
    with pytest.raises(ImportError, match=mentions(f"torch 2.9, 2.11 {installed} pip install --no-deps")):
        library.choose_library(LIBRARIES, installed)


def test_libraries_are_found_in_the_folders_of_versions(monkeypatch, tmp_path):
    """They are sorted by version. The first of two folders of the package hides the same version in the second."""
    for folder, version in (("a", "2.9"), ("b", "2.9"), ("b", "2.11"), ("b", "2.10")):
        path = tmp_path / folder / "lib" / f"torch{version}" / "libmegatron_sb_ops.so"
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(library, "package_folders", lambda: [tmp_path / "a", tmp_path / "b"])
    assert [*library.libraries()] == ["2.9", "2.10", "2.11"]
    assert library.libraries()["2.9"].is_relative_to(tmp_path / "a")
    monkeypatch.setattr(library, "package_folders", lambda: [tmp_path])
    with pytest.raises(ImportError, match=mentions(f"libmegatron_sb_ops.so {tmp_path} pip install")):
        library.library_path()


@pytest.mark.parametrize("cuda", ["12.8", None])
def test_another_major_version_of_cuda_raises_an_error(cuda):
    with pytest.raises(ImportError, match=mentions(f"CUDA 13.0.88 2.11.1 {cuda or 'no CUDA'} 13 pip install")):
        library.check_cuda(CUDA_BUILD, "2.11.1", cuda)


def test_minor_versions_of_cuda_are_accepted():
    library.check_cuda(CUDA_BUILD, "2.11.1+cu132", "13.2")


def test_a_cpu_build_accepts_a_torch_of_any_cuda():
    library.check_cuda(CPU_BUILD, "2.11.1+cpu", None)
    library.check_cuda(CPU_BUILD, "2.11.0+cu128", "12.8")


@pytest.mark.parametrize(
    ("build", "cuda", "num_gpus", "warns"),
    [
        (CPU_BUILD, "13.0", 2, True),
        (CPU_BUILD, "13.0", 0, False),
        (CPU_BUILD, None, 2, False),
        (CUDA_BUILD, "13.0", 2, False),
    ],
)
def test_the_import_of_a_cpu_build_warns_where_there_are_gpus(build, cuda, num_gpus, warns, monkeypatch):
    """A CPU build of torch has no use for the GPUs either, so there is nothing to warn of."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library.warn_of_missing_kernels(build)
    assert len(caught) == warns
    assert all(re.search(mentions("CPU build 2 nvcc pip install"), str(warning.message)) for warning in caught)


def test_loading_the_library_warns(monkeypatch):
    """`load` runs once in a process, so this calls the function behind the cache."""
    calls = []
    monkeypatch.setattr(library, "warn_of_missing_kernels", calls.append)
    library.load.__wrapped__()
    assert calls == [library.build_info()]


def test_a_library_that_does_not_load_raises_an_error(monkeypatch, tmp_path):
    """A pre-release of torch can lack a symbol of the release. The message has the linker's error and what to do."""
    broken = tmp_path / "libmegatron_sb_ops.so"
    broken.write_text("no library" * 100)
    monkeypatch.setattr(library, "library_path", lambda: broken)
    with pytest.raises(
        ImportError, match=mentions(f"torch {torch.__version__} {broken} invalid ELF header pip install")
    ):
        library.load.__wrapped__()


def test_what_an_older_torch_lacks_raises_an_error(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    with pytest.raises(ImportError, match=mentions("varlen_attn 2.11 2.10.0+cu128")):
        kernels.sdpa_varlen(*[torch.zeros(1, 1, 2, 8)] * 3, (1, 1), 1.0)
    assert torch_version.from_torch("torch.nn", "Linear", "2.10") is torch.nn.Linear


def check_torch(folder: Path, version: str, minor: str) -> tuple[int, str]:
    """Run sb_check_torch() for a torch. Return the exit status and the output."""
    settings = {"SB_TORCH_VERSION": version, "SB_TORCH_MINOR": minor, "SB_TORCH_ROOT": "/torch"}
    lines = [f'set({name} "{value}")' for name, value in settings.items()]
    return run_script(folder, "SbVersions", "\n".join([*lines, "sb_check_torch()"]))


@needs_cmake
@pytest.mark.parametrize(("version", "minor"), [("2.7.1+cu128", "2.7"), ("1.13.1", "1.13"), ("nightly", "")])
def test_cmake_refuses_an_older_torch(version, minor, tmp_path):
    status, output = check_torch(tmp_path, version, minor)
    assert status != 0 and "end of script" not in output
    assert re.search(mentions(f"2.8 {version} /torch"), output)


@needs_cmake
@pytest.mark.parametrize(("version", "minor"), [("2.8.0", "2.8"), ("2.9.0a0+git-nv25.09", "2.9"), ("2.11.0", "2.11")])
def test_cmake_accepts_a_supported_torch(version, minor, tmp_path):
    assert check_torch(tmp_path, version, minor) == (0, "-- end of script")


@needs_cmake
@pytest.mark.parametrize(("version", "minor"), [("2.99.0", "2.99"), ("3.0.0", "3.0")])
def test_cmake_warns_of_a_newer_torch(version, minor, tmp_path):
    status, output = check_torch(tmp_path, version, minor)
    assert status == 0 and "end of script" in output
    assert re.search(mentions(f"Warning tested {version}"), output)


@needs_cmake
@pytest.mark.parametrize(("nvcc", "cuda"), [("13.0.88", "13.2"), ("12.6.85", "12.8"), ("13.0.88", "unknown")])
def test_cmake_accepts_nvcc_of_torchs_major_version(nvcc, cuda, tmp_path):
    assert run_script(tmp_path, "SbVersions", f'sb_check_cuda("{nvcc}" "{cuda}")') == (0, "-- end of script")


@needs_cmake
@pytest.mark.parametrize(("nvcc", "cuda"), [("13.0.88", "12.8"), ("12.9.1", "13.0")])
def test_cmake_refuses_nvcc_of_another_major_version(nvcc, cuda, tmp_path):
    status, output = run_script(tmp_path, "SbVersions", f'sb_check_cuda("{nvcc}" "{cuda}")')
    assert status != 0
    assert re.search(mentions(f"nvcc {nvcc} {cuda} CUDACXX SB_WITH_CUDA=OFF"), output)


@needs_cmake
def test_cmake_refuses_an_old_nvcc(tmp_path):
    """CUDA 12.4 lacks a function of the runtime that the Hopper kernels call."""
    status, output = run_script(tmp_path, "SbVersions", 'sb_check_cuda("12.4.131" "12.8")')
    assert status != 0
    assert re.search(mentions("nvcc 12.5 12.4.131 CUDACXX SB_WITH_CUDA=OFF"), output)


@needs_cmake
@pytest.mark.parametrize(
    ("nvcc", "architectures", "warns"),
    [("12.5.82", "80;90", True), ("12.6.20", "80;90", False), ("13.0.88", "90", False), ("12.5.82", "80;89", False)],
)
def test_cmake_warns_of_an_nvcc_that_makes_slow_hopper_kernels(nvcc, architectures, warns, tmp_path):
    call = f'sb_warn_of_slow_hopper_kernels("{nvcc}" "{architectures}")'
    status, output = run_script(tmp_path, "SbVersions", call)
    assert status == 0 and "end of script" in output
    assert bool(re.search(mentions(f"Warning nvcc {nvcc} H100 CUDACXX 12.6"), output)) == warns


@needs_cmake
def test_the_project_refuses_an_older_torch(tmp_path):
    """It does so before it looks for nvcc."""
    root = write_libtorch(tmp_path / "libtorch", "2.7.1", cuda="12.8")
    status, output = configure(tmp_path, f"-DSB_TORCH_ROOT={root}", "-DSB_WITH_CUDA=ON")
    assert status != 0 and "CUDA compiler" not in output
    assert re.search(mentions(f"2.8 2.7.1 {root}"), output)


@needs_cmake
@pytest.mark.skipif(not NVCC, reason="needs nvcc")
@pytest.mark.parametrize("with_cuda", ["AUTO", "true", "OFF", "off", "0"])
def test_the_project_refuses_another_major_version_of_cuda(with_cuda, tmp_path):
    """A CPU build does not depend on torch's CUDA. CMake's other names of ON and OFF mean the same."""
    root = write_libtorch(tmp_path / "libtorch", "2.11.0", cuda="99.1")
    status, output = configure(tmp_path, f"-DSB_TORCH_ROOT={root}", f"-DSB_WITH_CUDA={with_cuda}")
    if with_cuda in ("OFF", "off", "0"):
        assert status == 0 and "CPU BUILD" in output, output
    else:
        assert status != 0
        assert re.search(mentions("nvcc 2.11.0 99.1"), output)


@needs_cmake
@pytest.mark.parametrize("with_cuda", ["", "12.8"])
def test_the_project_refuses_an_unknown_value_of_sb_with_cuda(with_cuda, tmp_path):
    root = write_libtorch(tmp_path / "libtorch", "2.11.0")
    status, output = configure(tmp_path, f"-DSB_TORCH_ROOT={root}", f"-DSB_WITH_CUDA={with_cuda}")
    assert status != 0
    assert re.search(mentions(f'SB_WITH_CUDA ON OFF AUTO "{with_cuda}"'), output)


def cmake_version(name: str) -> tuple[int, int]:
    """Return the major and minor number of a variable in SbVersions.cmake."""
    text = (ROOT / "cmake" / "SbVersions.cmake").read_text()
    return torch_version.major_minor(re.search(rf"set\({name} ([\d.]+)\)", text)[1])


def test_pip_keeps_an_installed_torch():
    """With a bound, pip would replace a torch outside of it. CMake refuses the versions that are too old."""
    assert [text for text in project_table()["dependencies"] if text.startswith("torch")] == ["torch"]


def test_the_documentation_lists_the_oldest_and_the_newest_version():
    """CMake warns of a version that is newer than those of the table."""
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \|", (ROOT / "docs/installation.md").read_text(), re.MULTILINE)
    tested = [torch_version.major_minor(row) for row in rows]
    assert min(tested) == cmake_version("SB_TORCH_OLDEST")
    assert max(tested) == cmake_version("SB_TORCH_NEWEST_TESTED")
