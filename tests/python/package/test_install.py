"""The installed package works for a user in a checkout that is not built, as the README describes it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.messages import mentions

from megatron_sb import processes
from megatron_sb.ops import library

ROOT = Path(__file__).parents[3]
COMPILED = ("lib", "_C")  # the prefixes of the names of compiled files


def links_to_package(folder: Path, compiled: bool) -> Path:
    """Make a package megatron_sb in `folder` of links to the files of this one, with or without compiled files."""
    package = folder / "megatron_sb"
    package.mkdir(parents=True)
    for source in library.package_folders():
        for path in source.iterdir():
            if path.name != "__pycache__" and (compiled or not path.name.startswith(COMPILED)):
                (package / path.name).symlink_to(path)
    return package


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder, and a function that runs Python with some arguments in FOLDER/checkout.

    The checkout is not built. The package is in FOLDER/site, as if installed from a wheel. The function does not use
    the Python of the virtual environment, because its editable install would come first on sys.path.
    """
    folder = tmp_path_factory.mktemp("installed")
    links_to_package(folder / "checkout", compiled=False)
    links_to_package(folder / "site", compiled=True)
    script = folder / "bin" / "megatron-sb"
    script.parent.mkdir()
    script.write_text("import sys\nfrom megatron_sb.cli import main\nsys.exit(main())\n")
    modules = [folder / "site", Path(torch.__file__).parents[1]]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, modules)), "OMP_NUM_THREADS": "1"}

    def run(*arguments):
        return subprocess.run(
            [sys._base_executable, *map(str, arguments)],
            cwd=folder / "checkout",
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return folder, run


def test_the_command_uses_the_installed_package(installed):
    folder, run = installed
    done = run(folder / "bin" / "megatron-sb", "info")
    assert done.returncode == 0, done.stderr
    assert str(folder / "site" / "megatron_sb" / "lib") in done.stdout


def test_training_starts_a_rank(installed, tmp_path):
    """The rank gets so far that it rejects the directory of an existing run."""
    pytest.importorskip("megatron", reason="[train] is not installed")
    folder, run = installed
    (tmp_path / "config.yaml").touch()
    config = ROOT / "configs" / "tiny_context_extension.yaml"
    settings = ["--set=parallel.ranks=1", "--set=parallel.device=cpu", "--set=stages.1.context_parallel_size=1"]
    done = run(folder / "bin" / "megatron-sb", "train", config, *settings, "--out", tmp_path)
    assert done.returncode == 2, done.stderr
    assert re.search(mentions(f"{tmp_path} --resume --out"), done.stderr)


def test_benchmark_starts_the_process_that_measures_memory(installed):
    folder, run = installed
    sizes = ["--device", "cpu", "--dtype", "fp32", "--lengths", "8", "--heads", "1", "--head-dim", "8"]
    done = run(folder / "bin" / "megatron-sb", "bench", *sizes, "--repeats", "1", "--memory-length", "16")
    assert done.returncode == 0, done.stderr
    assert "peak memory over the inputs at length 16" in done.stdout


def test_sources_that_hide_the_package_raise_an_error(installed):
    """The error names the folder and both solutions. With -P Python imports the installed package."""
    folder, run = installed
    done = run("-c", "import megatron_sb.ops")
    assert done.returncode == 1
    checkout = folder / "checkout"
    assert re.search(mentions(f"ImportError {checkout / 'megatron_sb'} {checkout} -P pip install -e"), done.stderr)
    if sys.version_info >= (3, 11):
        assert run("-P", "-c", "import megatron_sb.ops").returncode == 0


def test_python_ignores_the_current_folder_unless_the_package_is_there(monkeypatch, tmp_path):
    monkeypatch.chdir(Path(processes.__file__).parents[1])
    assert processes.module_command("megatron_sb.training")[1:] == ["-m", "megatron_sb.training"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "version_info", (3, 11))
    assert processes.module_command("megatron_sb.training")[1:] == ["-P", "-m", "megatron_sb.training"]


def test_python_3_10_ignores_the_current_folder_without_an_option(monkeypatch, tmp_path):
    """The module runs as with -m: its name, its arguments, and its file in sys.argv[0]."""
    (tmp_path / "platform.py").write_text("raise SystemExit('the folder of the process was searched')")
    (tmp_path / "site").mkdir()
    module = tmp_path / "site" / "shows_itself.py"
    module.write_text("import platform, sys\nprint([__name__, *sys.argv])")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "version_info", (3, 10))
    command = processes.module_command("shows_itself")
    assert "-P" not in command
    environment = {**os.environ, "PYTHONPATH": str(module.parent)}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run([*command, "--flag", "x"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(["__main__", str(module), "--flag", "x"]), done.stderr
