"""What the scripts in benchmarks/ share, and their options and files, without a GPU."""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_sb.ops import library

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a script of benchmarks/, which is not a package, on the CPU."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module


def test_power_and_clocks_are_those_of_the_gpu_that_is_measured(script, monkeypatch, tmp_path):
    """nvidia-smi numbers all GPUs of the machine, CUDA only those of CUDA_VISIBLE_DEVICES."""
    timing = script("timing")
    tool, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    tool.write_text(f"#!/bin/sh\necho \"$@\" >> {asked}\necho '580.1, 700.00 W, 143771 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    pci = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0xAB, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: pci)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    with timing.Sensors():
        assert timing.machine()["driver"] == "580.1"
    commands = asked.read_text().splitlines()
    assert len(commands) == 2 and all("--id=00000000:ab:01.0" in command.split() for command in commands)


def test_files_are_checked_before_anything_is_measured(script, monkeypatch, tmp_path, capsys):
    output_file = script("report").output_file
    assert output_file(str(tmp_path / "new" / "out.json")) == tmp_path / "new" / "out.json"
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path, "it is a folder"), (tmp_path / "file" / "out.json", "its folder cannot be created")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be a file that can be written, got .*: {why}"):
            output_file(str(path))
    for name in ("head_output", "variants", "decode"):
        table = script(name)
        monkeypatch.setattr(table, "rows", lambda options: pytest.fail("it measured"))
        with pytest.raises(SystemExit):
            table.main(["--dry-run", "--json", str(tmp_path)])
        assert "argument --json: must be a file that can be written" in capsys.readouterr().err


def _suite_step(verdict: str):
    def run(step, options):
        step.verdict = verdict
        (options.out / f"{step.name}.log").write_text(verdict)
        if step.name == "bench" and verdict == "ok":
            (options.out / "bench.md").write_text("# Attention")

    return run


def test_a_second_run_of_the_suite_keeps_the_record_of_the_first(script, monkeypatch, tmp_path):
    suite = script("gpu_suite")
    monkeypatch.setattr(suite, "run", _suite_step("ok"))
    assert suite.main(["--out", str(tmp_path), "--stages", "bench"]) == 0
    assert suite.main(["--out", str(tmp_path), "--stages", "tests"]) == 0
    first, second = sorted(tmp_path.glob("*-suite*.md"), key=lambda path: len(path.name))
    assert "## Attention" in first.read_text() and "| bench | ok |" in first.read_text()
    assert "Attention" not in second.read_text() and "| tests | ok |" in second.read_text()


def test_a_benchmark_that_fails_in_the_suite_has_no_tables_of_an_earlier_run(script, monkeypatch, tmp_path):
    suite = script("gpu_suite")
    (tmp_path / "bench.md").write_text("# Attention")
    monkeypatch.setattr(suite, "run", _suite_step("FAILED (1)"))
    assert suite.main(["--out", str(tmp_path), "--stages", "bench"]) == 1
    assert "Attention" not in next(tmp_path.glob("*-suite.md")).read_text()


def test_a_stopped_suite_ends_its_step(script, monkeypatch, tmp_path):
    """A step has a process group of its own, which Ctrl-C does not reach. It would keep the GPU."""
    suite = script("gpu_suite")
    started: list[subprocess.Popen] = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is not None:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(suite.subprocess, "Popen", Interrupted)
    options = argparse.Namespace(out=tmp_path, python_path=[], library_from=None, limit_s=None)
    try:
        with pytest.raises(KeyboardInterrupt):
            suite.run(suite.Step("tests", ["sleep", "60"], 60), options)
        assert started[0].poll() == -signal.SIGKILL
    finally:
        started[0].kill()


def test_a_table_that_is_stopped_keeps_its_rows(script, tmp_path):
    def rows(options):
        yield {"ms": 1}
        raise torch.OutOfMemoryError("the second row")

    arguments = ["--dry-run", "--json", str(tmp_path / "out.json")]
    with pytest.raises(torch.OutOfMemoryError):
        script("table").table_main("A benchmark.", arguments, ["ms"], rows, str)
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == [{"ms": 1}]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--layouts", "CP2", "CP8"], r"--layouts must be some of '1 GPU', .*'CP2', .* with --model dense, got CP8"),
        ([], "torch sees no GPU"),
    ],
)
def test_layouts_that_cannot_run_are_an_error(script, monkeypatch, tmp_path, capsys, args, message):
    layouts = script("training_layouts")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("sys.argv", ["training_layouts.py", "record", str(tmp_path / "out.json"), *args])
    monkeypatch.setattr(layouts, "train", lambda *args: pytest.fail("it trained"))
    with pytest.raises(SystemExit) as stop:
        layouts.main()
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_losses_are_drawn_without_those_of_one_gpu(script, tmp_path):
    """As of a record with --layouts CP2. There is no distance to draw then."""
    layouts, record = script("training_layouts"), {"model": "dense", "set": []}
    rows = [{"length": 64, "layout": "CP2", "losses": [2.0, 1.0]}]
    (tmp_path / "record.json").write_text(json.dumps({"machine": record, "rows": rows}))
    files = {"json": tmp_path / "record.json", "picture": tmp_path / "losses.png"}
    layouts.draw(argparse.Namespace(more=[], **files))
    assert files["picture"].stat().st_size > 0


def test_a_mode_that_cannot_exchange_the_heads_is_a_row_with_an_error(script, monkeypatch):
    """As "a2a" with 12 heads on 8 GPUs. The benchmark goes on with the next row."""
    benchmark = script("context_parallel")
    monkeypatch.setattr(benchmark, "median_ms", lambda call, seconds: call())
    monkeypatch.setattr(benchmark.dist, "get_rank", lambda: 0)

    def refused():
        raise ValueError('comm = "a2a": the number of heads of q must be a multiple of 8, got 12')

    bench = benchmark.Benchmark(argparse.Namespace(exchanged=[], seconds=0.1, sustained=0.1))
    bench.measure("L=64", "a2a", {"forward": refused, "both": refused}, 1.0)
    assert "must be a multiple of 8, got 12" in bench.rows[0]["error"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "cpu"], "record needs the ranks of torchrun, or --device cpu --ranks NUMBER"),
        (["--device", "cuda"], "record needs the ranks of torchrun, or --device cpu --ranks NUMBER"),
        (["--device", "cpu", "--ranks", "0"], "argument --ranks: must be a whole number and at least 1, got 0"),
    ],
)
def test_errors_of_context_parallelism_need_ranks(script, monkeypatch, tmp_path, capsys, args, message):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["context_parallel_error.py", "record", str(tmp_path / "out.json"), *args])
    with pytest.raises(SystemExit) as stop:
        script("context_parallel_error").main()
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("decode", "--dry-run --lengths 100", "argument --lengths: must be a multiple of 64 and at least 64, got 100"),
        ("decode", "--dry-run --lengths 100000000", "--lengths must have a length whose cache fits in memory"),
        ("decode", "--dry-run --seconds nan", "argument --seconds: must be finite and at least 0, got nan"),
        ("attention", "--dry-run --sustained inf", "argument --sustained: must be finite and at least 0, got inf"),
        ("compare_builds", "BUILD --dry-run --seconds x", "argument --seconds: must be finite and at least 0, got x"),
        ("context_parallel", "", "needs the ranks of torchrun"),
        ("context_parallel", "--lengths 0", "argument --lengths: must be a whole number and at least 1, got 0"),
        ("context_parallel", "--grouped 12", "argument --grouped: must be HEADS:KV_HEADS, such as 32:8"),
        ("context_parallel", "--grouped 12:5", "argument --grouped: must be HEADS:KV_HEADS, such as 32:8"),
        ("context_parallel_timeline", "record OUT", "needs the ranks of torchrun"),
        ("context_parallel_timeline", "record OUT --modes ring", "argument --modes: invalid choice: 'ring'"),
        ("context_parallel_timeline", "draw OUT OUT", "argument json: must be a file that can be read"),
        ("context_parallel_error", "record OUT --device cpu --ranks 2 --modes ring", "invalid choice: 'ring'"),
        ("context_parallel_error", "record OUT --means 3", "argument --means: must be finite and at most 0, got 3"),
        ("context_parallel_error", "record OUT --head-dim 15", "must be a multiple of 8 and at least 8, got 15"),
        ("context_parallel_balance", "--streams 0", "argument --streams: must be a whole number and at least 1, got 0"),
        ("context_parallel_model", "compare OUT", "argument measured: must be a file that can be read"),
        ("context_parallel_model", "compare FILE", "argument measured: must be a JSON file, got"),
        ("context_parallel_model", "compare LIST", "argument measured: must be a JSON file of an object, got"),
        ("context_parallel_model", "compare RECORD --within nan", "--within: must be finite and at least 0, got nan"),
        ("context_parallel_model", "compare RECORD", "record.json must have dense rows of context_parallel.py"),
        ("context_parallel_timeline", "draw RECORD OUT", "of an object with 'machine' and 'traces', got"),
        ("training_layouts", "draw RECORD OUT --more FILE", "argument --more: must be a JSON file, got"),
        ("context_parallel_tables", "--ranks 0", "argument --ranks: must be a whole number and at least 1, got 0"),
        ("data_start", "OUT --documents 10", "argument --documents: must be a whole number and at least 1000, got 10"),
        ("data_start", "FILE", "argument FOLDER: must be a folder that can be created"),
        ("gpu_suite", "--out FILE", "argument --out: must be a folder that can be created"),
        ("data_start", "OUT --mean-tokens 2", "argument --mean-tokens: must be a whole number and at least 3, got 2"),
        ("gpu_suite", "--out OUT --part 3/2", "argument --part: must be K/N, the K-th of N parts, such as 2/4"),
        ("gpu_suite", "--out OUT --wheels FILE", "argument --wheels: must be a folder, got"),
        ("gpu_suite", "--out OUT --wheels OUT", "--wheels must be a folder with wheels, got"),
        ("gpu_suite", "--out EMPTY", "argument --out: must be a folder that can be created, got ''"),
        ("published_tests", "", "arguments are required: TESTS"),
        ("published_tests", "EMPTY", "TESTS must be a file or folder with tests, got ''"),
        ("training", "CONFIG --kernels 3", "--kernels needs a GPU"),
        ("training", "CONFIG", "CONFIG: No such file or directory"),
        ("training", "CONFIG --checkpoint OUT", "has no checkpoint: the file 'latest' does not exist"),
        ("megatron_training", "CONFIG --dry-run", "CONFIG: No such file or directory"),
        ("megatron_training", "CONFIG --dry-run --context-parallel 3", "must divide the number of ranks of torchrun"),
        ("training_layouts", "record OUT --layouts CP2", "torch sees no GPU"),
    ],
)
def test_wrong_arguments_are_named(script, name, args, message, monkeypatch, tmp_path, capsys):
    """They are not an exception in the middle of a measurement."""
    if name in ("training", "megatron_training"):
        pytest.importorskip("megatron", reason="[train] is not installed")
    (tmp_path / "file").touch()
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "record.json").write_text('{"machine": {}, "rows": [{"name": "a2a"}]}')
    names = {"OUT": "out", "FILE": "file", "LIST": "list.json", "RECORD": "record.json"}
    paths = {word: str(tmp_path / name) for word, name in names.items()} | {"EMPTY": ""}
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("sys.argv", [f"{name}.py", *(paths.get(word, word) for word in args.split())])
    with pytest.raises(SystemExit) as stop:
        script(name).main()
    assert stop.value.code not in (0, None)
    assert message in capsys.readouterr().err + str(stop.value.code)


@pytest.mark.parametrize(
    ("name", "args"), [("decode", "--lengths 64"), ("context_parallel_tables", "--rows-per-rank 128")]
)
def test_a_dry_run_works_with_small_sizes(script, name, args, monkeypatch):
    table = script(name)
    monkeypatch.setattr(
        table, "take_turns", lambda calls, seconds: {name: (call(), 1.0)[1] for name, call in calls.items()}
    )
    monkeypatch.setattr(table, "HEADS", ((2, 1, 16),) if name == "decode" else 2)
    table.main(["--dry-run", *args.split()])


def test_the_memory_of_a_start_is_that_of_its_process(script):
    """The process that writes the data set may need more memory than the starts that are measured."""
    held = torch.ones(2**28, dtype=torch.uint8)  # of this process, the parent
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import data_start; print(data_start._peak_mib())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < held.nbytes / 2**20


def test_a_build_without_a_module_still_has_facts_for_info(script, tmp_path):
    """gpu_suite.py --library-from takes a build without Python."""
    suite = script("gpu_suite")
    build = tmp_path / "torch{}.{}".format(*torch.__version__.split(".")[:2])
    build.mkdir()
    (build / "libmegatron_sb_ops.so").touch()
    package = suite.library_folder(tmp_path) / "megatron_sb"
    written: dict = {}
    exec((package / "_C.py").read_text(), written)
    shutil.rmtree(package.parent)
    assert written["build_info"]().keys() == library.BuildInfo.__annotations__.keys()
