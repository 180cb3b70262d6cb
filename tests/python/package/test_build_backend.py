"""The build backend checks the machine before pip downloads anything, and puts the result into the version."""

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from support.build_backend import CPU, call_hook
from support.cmake import CMAKE, needs_cmake, run_script
from support.messages import mentions
from support.project import project_table, pyproject

from megatron_sb import torch_version

pytest.importorskip("scikit_build_core")
ROOT = Path(__file__).parents[3]
TORCH = ".".join(map(str, torch_version.major_minor(torch.__version__)))


def metadata_in(folder: Path) -> email.message.Message:
    (path,) = folder.glob("*.dist-info/METADATA")
    return email.message_from_string(path.read_text())


@needs_cmake
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_the_version_of_a_cpu_build_says_so(kind, tmp_path):
    """pip prints the version in its last line. Nothing but torch and numpy is required, of any version."""
    done = call_hook(f"prepare_metadata_for_build_{kind}", tmp_path, CPU)
    assert done.returncode == 0, done.stderr
    metadata = metadata_in(tmp_path)
    assert re.fullmatch(rf"[\d.]+\+cpu\.torch{re.escape(TORCH)}", metadata["Version"])
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(required) == ["numpy", "torch"]


@needs_cmake
def test_settings_in_the_environment_count(tmp_path):
    """Without the variable, a machine with nvcc would get the version of a CUDA build."""
    done = call_hook("prepare_metadata_for_build_wheel", tmp_path, {}, CMAKE_ARGS="-DSB_WITH_CUDA=OFF")
    assert done.returncode == 0, done.stderr
    assert "+cpu." in metadata_in(tmp_path)["Version"]


@needs_cmake
@pytest.mark.parametrize("hook", ["prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable"])
def test_an_old_torch_is_an_error_before_anything_is_built(hook, tmp_path):
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace\n"
        "__version__, version, compiled_with_cxx11_abi = '2.7.1', SimpleNamespace(cuda=None), lambda: True\n"
    )
    (tmp_path / "out").mkdir()
    done = call_hook(hook, tmp_path / "out", CPU, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0 and not list((tmp_path / "out").iterdir())
    assert re.search(mentions("torch 2.8 2.7.1 changed"), done.stderr)


@needs_cmake
def test_a_missing_compiler_is_an_error_before_anything_is_built(tmp_path):
    done = call_hook("prepare_metadata_for_build_wheel", tmp_path, CPU, CXX=str(tmp_path / "no-compiler"))
    assert done.returncode != 0 and not list(tmp_path.iterdir())
    assert re.search(mentions("no-compiler CXX"), done.stderr)


@needs_cmake
def test_an_archive_of_the_sources_has_what_a_build_needs(tmp_path):
    """Its version has no local part. It has no environment and no build of this checkout, and can be checked itself."""
    done = call_hook("build_sdist", tmp_path, {})
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    assert re.fullmatch(r"megatron_sb-[\d.]+\.tar\.gz", archive.name)
    with tarfile.open(archive) as file:
        file.extractall(tmp_path)
    root = tmp_path / archive.name.removesuffix(".tar.gz")
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    assert folders == {"cmake", "csrc", "megatron_sb", "tests"} and not list(root.rglob("*.pyc"))
    for folder, pattern in (("csrc", "*.*"), ("cmake", "*.*"), ("megatron_sb", "*.py")):
        tracked = {path.relative_to(ROOT) for path in (ROOT / folder).rglob(pattern) if "__pycache__" not in path.parts}
        assert tracked and not [path for path in tracked if not (root / path).is_file()], folder
    assert (root / "megatron_sb" / "py.typed").is_file()  # type checkers ignore the annotations of others
    (tmp_path / "out").mkdir()
    done = call_hook("prepare_metadata_for_build_wheel", tmp_path / "out", CPU, root)
    assert done.returncode == 0, done.stderr
    assert "+cpu." in metadata_in(tmp_path / "out")["Version"]


def test_the_build_takes_the_version_from_the_metadata(monkeypatch, tmp_path):
    """pip asks for the metadata first, and gives them to the build. The machine is not checked a second time."""
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "cmake" / "build_backend.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    monkeypatch.setenv(backend.LOCAL_VERSION, "")  # restores the environment after the test
    monkeypatch.setattr(backend, "check_machine", lambda _: "cpu.torch2.11")
    build = backend._checked(lambda *arguments: (os.environ[backend.LOCAL_VERSION], *arguments))
    assert build("out", CPU) == ("cpu.torch2.11", "out", CPU)
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-sb\nVersion: 0.1.0+cu13.torch2.9\n")
    assert build("out", CPU, str(tmp_path)) == ("cu13.torch2.9", "out", CPU, str(tmp_path))


KILLED_COMPILER = """#!/bin/sh
case "$*" in *csrc*) kill -9 $$;; esac
exec ${REAL_CXX:-c++} "$@"
"""
# What compilers and build tools print if the system kills a compiler, and lines that only look like it.
KILLED = (
    "g++: fatal error: Killed signal terminated program cc1plus",
    "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
    "Killed",
    "/bin/sh: line 1: 4711 Killed                  nvcc -c fwd.cu",
    "FAILED: [code=137] CMakeFiles/sb.dir/fwd.cpp.o ",
    "make[2]: *** [CMakeFiles/sb.dir/build.make:76: fwd.cpp.o] Error 137",
)
NOT_KILLED = ("error: 'Killed' was not declared", "FAILED: [code=1] fwd.cpp.o", "make: *** [fwd.cpp.o] Error 1", "died")
WATCH = """
import subprocess, sys
sys.path.insert(0, "cmake")
import build_backend

def hook(line, status):
    print("before", flush=True)
    subprocess.run([sys.executable, "-c", "import sys; print(sys.argv[1], file=sys.stderr)", line])
    if status:
        raise SystemExit(status)
    return "wheel"

print(build_backend._explained(hook)(sys.argv[1], int(sys.argv[2])))
"""


def run_watched(line, status, **environment):
    """Call a hook that prints a line, in a child as compilers do, and exits with a status if it is not 0."""
    command = [sys.executable, "-c", WATCH, line, str(status)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("line", [*KILLED, *NOT_KILLED])
def test_a_killed_compiler_is_explained(line):
    """The last line says what to do. All output is passed on, in its stream."""
    done = run_watched(line, 7, CMAKE_BUILD_PARALLEL_LEVEL="8")
    assert done.stdout == "before\n" and done.stderr.splitlines()[0] == line
    if line in NOT_KILLED:
        assert done.returncode == 7 and len(done.stderr.splitlines()) == 1
    else:
        assert done.returncode == 1
        assert re.search(mentions("killed memory 8 CMAKE_BUILD_PARALLEL_LEVEL=2"), done.stderr.splitlines()[-1])


def test_a_build_that_succeeds_is_not_explained():
    """A build tool may have started the compiler again."""
    done = run_watched(KILLED[0], 0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "before\nwheel\n", KILLED[0] + "\n")


def test_one_compiler_that_needs_too_much_memory():
    done = run_watched("Killed", 7, CMAKE_BUILD_PARALLEL_LEVEL="1")
    assert re.search(mentions("killed CMAKE_BUILD_PARALLEL_LEVEL SB_WITH_CUDA=OFF"), done.stderr.splitlines()[-1])


@needs_cmake
def test_a_build_whose_compilers_are_killed(tmp_path):
    """The compiler works for CMake's checks. Each file of the project kills it, as the system does without memory."""
    compiler = tmp_path / "compiler"
    compiler.write_text(KILLED_COMPILER)
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "REAL_CXX": os.environ.get("CXX", "c++")}
    (tmp_path / "out").mkdir()
    settings = CPU | {"build-dir": str(tmp_path / "build")}
    done = call_hook("build_wheel", tmp_path / "out", settings, **environment, CMAKE_BUILD_PARALLEL_LEVEL="2")
    assert done.returncode != 0 and not list((tmp_path / "out").iterdir())
    assert re.search(mentions("killed memory CMAKE_BUILD_PARALLEL_LEVEL=1"), done.stderr.splitlines()[-1]), done.stderr


def test_pyproject_uses_this_backend():
    """Installers ask the backend for the version only if pyproject.toml has none."""
    build_system = pyproject()["build-system"]
    assert build_system["build-backend"] == "build_backend" and build_system["backend-path"] == ["cmake"]
    assert project_table()["dynamic"] == ["version"] and "version" not in project_table()


@needs_cmake
@pytest.mark.parametrize(("nvcc", "local"), [("13.0.88", "cu13.torch2.11"), ("12.8.93", "cu12.torch2.11"), ("", "cpu")])
def test_the_local_version_names_cuda_and_torch(nvcc, local, tmp_path):
    code = f'sb_local_version(local "{nvcc}" "2.11")\nmessage(STATUS "local ${{local}}")'
    status, output = run_script(tmp_path, "SbVersions", code)
    assert status == 0
    assert f"local {local}" in output


def configure_compiler(folder: Path, **defined: str) -> tuple[int, str]:
    """Check the compiler in a new project. Return the exit status and the output.

    defined: variables of CMake, such as results of the compiler's tests.
    """
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(compiler CXX)\n"
        f'include("{ROOT / "cmake" / "SbCompiler.cmake"}")\nmessage(STATUS "options: ${{sb_float16_options}}.")\n'
    )
    definitions = [f"-D{name}={value}" for name, value in defined.items()]
    done = subprocess.run([CMAKE, "-S", folder, "-B", folder / "build", *definitions], capture_output=True, text=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


AARCH64 = {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64"}
X86 = AARCH64 | {"CMAKE_SYSTEM_PROCESSOR": "x86_64"}


@needs_cmake
@pytest.mark.parametrize(
    ("processor", "older_name"),
    [(AARCH64, "OFF"), (X86, "OFF"), (X86, "ON")],
    ids=["g++ 11 for aarch64", "g++ 11", "clang++ 14"],
)
def test_a_compiler_without_the_type_of_fp16_is_an_error(processor, older_name, tmp_path):
    status, output = configure_compiler(tmp_path, **processor, SB_HAS_FLOAT16="OFF", SB_HAS_FP16=older_name)
    assert status != 0
    assert re.search(mentions("_Float16 g++ 12 CXX CUDAHOSTCXX"), output)


@needs_cmake
def test_the_older_name_of_the_type_is_used_only_where_it_is_needed(tmp_path):
    status, output = configure_compiler(tmp_path)
    assert status == 0 and "options: ." in output
    (tmp_path / "older").mkdir()
    status, output = configure_compiler(tmp_path / "older", **AARCH64, SB_HAS_FLOAT16="OFF", SB_HAS_FP16="ON")
    assert status == 0 and "options: -D_Float16=__fp16." in output
