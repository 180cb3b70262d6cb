"""An installed package, used in a checkout that is not built: the README's own way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_sb.ops import library

ROOT = Path(__file__).parents[3]
COMPILED = ("lib", "_C")  # what their names begin with


def links_to_package(folder: Path, compiled: bool) -> Path:
    """A package megatron_sb in `folder`, of links to the files of this one, with or without what is compiled."""
    package = folder / "megatron_sb"
    package.mkdir(parents=True)
    for source in library.package_folders():
        for path in source.iterdir():
            if path.name != "__pycache__" and (compiled or not path.name.startswith(COMPILED)):
                (package / path.name).symlink_to(path)
    return package


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs Python in a checkout that is not built, with the package and what it needs in other folders, as a wheel puts
    them: (the checkout, a function that takes arguments). Not .venv's Python: its editable install comes before all.
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


def test_the_command_in_a_checkout(installed):
    folder, run = installed
    done = run(folder / "bin" / "megatron-sb", "info")
    assert done.returncode == 0, done.stderr
    assert str(folder / "site" / "megatron_sb" / "lib") in done.stdout


def test_training_in_a_checkout(installed, tmp_path):
    """A rank starts, as far as it looks at the folder of its run."""
    pytest.importorskip("megatron", reason="[train] is not installed")
    folder, run = installed
    (tmp_path / "config.yaml").touch()
    config = ROOT / "configs" / "tiny_context_extension.yaml"
    settings = ["--set=parallel.ranks=1", "--set=parallel.device=cpu", "--set=stages.1.context_parallel_size=1"]
    done = run(folder / "bin" / "megatron-sb", "train", config, *settings, "--out", tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"{tmp_path} holds a run already" in done.stderr


def test_benchmark_in_a_checkout(installed):
    """Peak memory is measured by a process of its own."""
    folder, run = installed
    sizes = ["--device", "cpu", "--dtype", "fp32", "--lengths", "8", "--heads", "1", "--head-dim", "8"]
    done = run(folder / "bin" / "megatron-sb", "bench", *sizes, "--repeats", "1", "--memory-length", "16")
    assert done.returncode == 0, done.stderr
    assert "peak memory over the inputs at length 16" in done.stdout


def test_sources_that_hide_the_package_say_so(installed):
    folder, run = installed
    done = run("-c", "import megatron_sb.ops")
    assert done.returncode == 1
    last, checkout = done.stderr.splitlines()[-1], folder / "checkout"
    assert last.startswith(f"ImportError: megatron_sb was imported from {checkout / 'megatron_sb'}, which has no comp")
    assert f"Python runs in {checkout}." in last and "another folder or with -P" in last and "pip install -e ." in last
    assert run("-P", "-c", "import megatron_sb.ops").returncode == 0


def test_a_package_in_the_current_folder_is_found_there(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert library.module_command("megatron_sb.training")[1:] == ["-P", "-m", "megatron_sb.training"]
    monkeypatch.chdir(Path(library.__file__).parents[2])
    assert library.module_command("megatron_sb.training")[1:] == ["-m", "megatron_sb.training"]
