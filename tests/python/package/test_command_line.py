"""Errors of `megatron-sb`: one line for what the user gave, a traceback for a defect. Standard output may be gone."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_sb import bench, cli, selfcheck
from megatron_sb.ops import library
from megatron_sb.processes import module_command
from megatron_sb.validation import InputError

TINY = str(Path(__file__).parents[3] / "configs/tiny_context_extension.yaml")
MODULE = module_command("megatron_sb.cli")


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def with_imports(commands):
    """Leave out the commands whose optional packages are missing."""
    return [pytest.param(*command, id=command[0]) for command in commands]


# Command -> where to raise an error within it: module and attribute.
INSIDE = with_imports(
    [
        ("info", [], library, "build_info"),
        ("check", [], selfcheck, "main"),
        ("bench", ["--device", "cpu"], bench, "run"),
        ("train", [TINY], "megatron_sb.training.config.loader", "check"),
        ("plan", ["--config", TINY, "--gpus", "1"], "megatron_sb.planning.command", "load_config"),
        ("generate", ["RUN", "--prompt", "x"], "megatron_sb.generation", "config_of"),
        ("eval", ["CHECKPOINT", "--tasks", "x"], "megatron_sb.checkpoints", "format_of"),
        ("experiment", ["extrapolation", TINY], "megatron_sb.training.config.loader", "check"),
        ("convert", ["SOURCE", "OUT", "--to", "fla"], "megatron_sb.checkpoints", "format_of"),
    ]
)


def break_in(monkeypatch, place, name, error):
    def fail(*args, **kwargs):
        raise error

    module = pytest.importorskip(place) if isinstance(place, str) else place
    monkeypatch.setattr(module, name, fail)


DEFECTS = [ValueError("value"), TypeError("type"), KeyError("key"), ImportError("name"), OSError("no name")]


@pytest.mark.parametrize("error", DEFECTS)
@pytest.mark.parametrize(("command", "rest", "place", "name"), INSIDE)
def test_a_defect_keeps_its_traceback(command, rest, place, name, error, monkeypatch):
    break_in(monkeypatch, place, name, error)
    with pytest.raises(type(error)):
        cli.main([command, *rest])


ERRORS_OF_THE_USER = [
    InputError("--x must be y, got z."),
    PermissionError(13, "--x must be", "a/file"),
    ImportError("megatron_sb has libraries for torch 2.8: --x must be y."),
]


@pytest.mark.parametrize("error", ERRORS_OF_THE_USER)
@pytest.mark.parametrize(("command", "rest", "place", "name"), INSIDE)
def test_an_error_of_the_user_is_one_line(command, rest, place, name, error, monkeypatch, capsys):
    break_in(monkeypatch, place, name, error)
    assert cli.main([command, *rest]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-sb") and "--x must be" in line
    assert error.args[0] != 13 or "a/file" in line


@pytest.mark.parametrize(("command", "rest", "place", "name"), INSIDE)
def test_an_interrupt_is_one_line(command, rest, place, name, monkeypatch, capsys):
    """As with Ctrl-C. `train` handles the signal itself once it trains, and saves first."""
    break_in(monkeypatch, place, name, KeyboardInterrupt())
    assert cli.main([command, *rest]) == 130
    assert capsys.readouterr().err.splitlines() == ["megatron-sb: interrupted"]


def print_to(output, *arguments, **variables):
    """Run a command with this standard output. Return its exit status and standard error."""
    variables = environment() | variables
    done = subprocess.run(
        [*MODULE, *arguments], stdout=output, stderr=subprocess.PIPE, text=True, env=variables, timeout=60
    )
    return done.returncode, done.stderr


ANOTHER_TORCH = "import sys, torch; torch.__version__ = '2.99.0'; from megatron_sb import cli; sys.exit(cli.main())"


@pytest.mark.parametrize(("command", "status"), [("info", 2), ("check", 2), ("--help", 0)])
def test_a_library_for_another_torch_is_one_line(command, status):
    """As after an update of torch."""
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_TORCH, command], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.returncode == status
    lines = done.stderr.splitlines()
    assert len(lines) == (1 if status else 0)
    assert all("megatron_sb has libraries for torch" in line and "2.99.0" in line for line in lines)


buffering = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])


@buffering
def test_the_reader_of_the_output_is_gone(unbuffered):
    """As with `megatron-sb info | head -1`: the command ends without a message."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as output:
        assert print_to(output, "info", PYTHONUNBUFFERED=unbuffered) == (141, "")
        assert print_to(output, "--help", PYTHONUNBUFFERED=unbuffered)[1] == ""


@buffering
def test_the_disk_of_the_output_is_full(unbuffered):
    with Path("/dev/full").open("wb") as output:
        found = print_to(output, "info", PYTHONUNBUFFERED=unbuffered)
    assert found == (2, "megatron-sb: standard output: No space left on device\n")


def test_standard_output_is_closed(tmp_path):
    """As with `megatron-sb info >&-`. A file that the command opens does not get the number of the closed stream."""
    program = "import sys; from megatron_sb import cli; status = cli.main(['info']); "
    program += f"file = open({str(tmp_path / 'file')!r}, 'w'); sys.exit(status or 10 * (file.fileno() < 3))"
    shell = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", program]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_standard_output_without_a_character(monkeypatch):
    """As in a locale that is not UTF-8, with a file name or a generated text."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(selfcheck, "main", lambda: print("caf\xe9"))
    cli.main(["check"])
    assert written.getvalue() == b"caf\\xe9\n"


WRITERS = with_imports(
    [
        ("bench", ["--device", "cpu", "--out"], "--out"),
        ("experiment", ["extrapolation", TINY, "--out"], "--out"),
        ("convert", ["SOURCE", "--to", "huggingface"], "out"),
    ]
)


@pytest.mark.parametrize(("command", "rest", "argument"), WRITERS)
@pytest.mark.parametrize("kind", ["a file", "in a file", "read-only"])
def test_a_folder_that_cannot_be_written(command, rest, argument, kind, tmp_path, monkeypatch, capsys):
    """The error comes before anything is measured, trained or read."""
    place = tmp_path / "place"
    if kind == "read-only":
        place.mkdir()
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != place and access(path, mode))  # also for root
    else:
        place.write_text("")
    out = place if kind == "a file" else place / "new" / "folder"
    if command == "convert":
        checkpoints = pytest.importorskip("megatron_sb.checkpoints")
        monkeypatch.setattr(checkpoints, "format_of", lambda source: "huggingface")
        rest = [rest[0], str(out), *rest[1:]]
    else:
        pytest.importorskip("matplotlib")
        rest = [*rest, str(out)]
    break_in(monkeypatch, bench, "time_in_turns", AssertionError("measured"))
    assert cli.main([command, *rest]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{argument} must be a " in line and repr(str(out)) in line
    assert (command, kind) == ("convert", "a file") or str(place) in line


def test_a_full_disk(tmp_path):
    """Files may have 1 KiB, which the plot exceeds."""
    pytest.importorskip("matplotlib")
    options = ["--device", "cpu", "--lengths", "16", "--repeats", "1", "--memory-length", "0", "--out", str(tmp_path)]
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "limited", *MODULE, "bench", *options]
    variables = environment() | {"PYTHONDONTWRITEBYTECODE": "1"}  # Python would cut off the modules that it caches
    done = subprocess.run(limited, capture_output=True, text=True, env=variables, timeout=120)
    assert (done.returncode, done.stderr) == (2, f"megatron-sb: {tmp_path}/bench_cpu.png: File too large\n")
