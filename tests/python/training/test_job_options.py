"""Options of a job: other ranks, named attention, profiling, divergence, torchrun, and errors before the start."""

import dataclasses
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.jobs import (
    SMALL_JOB,
    TIMEOUT_SECONDS,
    TRAIN,
    metrics,
    run_command,
    started,
    started_forks,
    state,
    train,
    wait_for_step,
)
from support.launch import run_ranks
from support.messages import mentions

from megatron_sb import cli, training
from megatron_sb.processes import outliving_readers
from megatron_sb.training import main, plots, rank, report, supervisor
from megatron_sb.training.checkpoint import Progress
from megatron_sb.training.command import Command
from megatron_sb.training.config import load_config
from megatron_sb.training.directory import prepare_directory

ALONE = ["parallel.ranks=1", "stages.0.context_parallel_size=1", "stages.1.context_parallel_size=1"]
TORCHRUN = Path(__file__).parents[3] / "examples" / "train_torchrun.sh"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(SMALL_JOB)
    return path


def test_a_run_resumes_on_other_ranks(config, tmp_path):
    """Saved by two context-parallel ranks, resumed by one, and by two data-parallel ones: the same rows and losses."""
    padded = [f"stages.{stage}.pad_multiple=4" for stage in (0, 1)]
    short = ["compare=[stick_breaking]", "stages.0.steps=10", "stages.1.steps=5"]
    out = tmp_path / "out"
    status, _, errors = train(config, *short, *padded, "--out", out)
    assert status == 0, errors
    alone = [f"stages.{stage}.context_parallel_size=1" for stage in (0, 1)]
    for ranks in (1, 2):
        changes = [*short, *padded, *alone, f"parallel.ranks={ranks}"]
        other = tmp_path / str(ranks)
        shutil.copytree(out, other)
        (other / "stick_breaking" / "checkpoints" / "latest").write_text("short-000007")
        status, _, errors = train(config, *changes, "--out", other, "--resume")
        assert status == 0, errors
        losses, expected = ([line["loss"] for line in metrics(folder)] for folder in (other, out))
        assert losses == pytest.approx(expected, abs=2e-5) and losses[:7] == expected[:7] and losses != expected


def test_evaluation_during_a_stage(config, tmp_path):
    """It changes no step, and the results are those of a run that was resumed before, at and after such a step."""
    options = ["stages.0.steps=10", "stages.1.steps=5", "checkpoint={interval: 4, keep: 9}"]
    options += [
        "evaluation={windows: 2, target_tokens: 16, length_factor: 2}",
        "attention.softmax_rope.evaluated_scalings=[none, ntk]",
        "report.interval=3",
    ]
    plain, out, other = (tmp_path / name for name in ("plain", "out", "other"))
    status, _, errors = train(config, *options, "--out", plain)
    assert status == 0, errors
    status, output, errors = train(config, *options, "evaluation.interval=4", "--out", out)
    assert status == 0 and "softmax_rope / short, step 8: context 16, negative log-likelihood" in output, errors
    written = {path.name: json.loads(path.read_text()) for path in (out / "evaluation").iterdir()}
    ends = {path.name: json.loads(path.read_text()) for path in (plain / "evaluation").iterdir()}
    steps = ("short.000004", "short.000008", "extended.000004")
    kinds = (("stick_breaking", ""), ("softmax_rope", ""), ("softmax_rope", ".ntk"))
    within = {f"{model}.{step}{scaling}.json" for step in steps for model, scaling in kinds}
    assert written.keys() == ends.keys() | within and ends.items() <= written.items()
    assert all(f".{written[name]['step']:06d}." in name for name in within)
    assert [line["loss"] for line in metrics(out)] == [line["loss"] for line in metrics(plain)]

    shutil.copytree(out, other)
    (other / "softmax_rope" / "checkpoints" / "latest").write_text("short-000004")
    (other / "evaluation" / "softmax_rope.short.000004.ntk.json").unlink()
    later = other / "evaluation" / "softmax_rope.short.000008.json"
    later.write_text(json.dumps(written[later.name] | {"results": "of other weights"}))
    status, output, errors = train(config, *options, "evaluation.interval=4", "--out", other, "--resume")
    assert status == 0 and "short, step 4: context" in output, errors
    assert {path.name: json.loads(path.read_text()) for path in (other / "evaluation").iterdir()} == written


def test_only_the_last_stage_is_evaluated(config, tmp_path):
    options = ["compare=[stick_breaking]", "stages.0.steps=10", "stages.1.steps=5", "evaluation.interval=4"]
    last = "evaluation.last_stage_only=true"
    status, output, errors = train(config, *options, last, "--out", tmp_path / "out")
    assert status == 0 and "context | stick-breaking, extended\n" in output, errors
    found = {path.name for path in (tmp_path / "out" / "evaluation").iterdir()}
    assert found == {"stick_breaking.extended.000004.json", "stick_breaking.extended.json"}
    assert (tmp_path / "out" / "stick_breaking" / "checkpoints" / "short-000010").exists()
    # A run may be resumed with another value.
    _, lock = prepare_directory(load_config(config, options), str(tmp_path / "out"), resume=True)
    lock.close()


def test_a_stop_during_an_evaluation_within_a_stage_saves_its_step(config, tmp_path):
    """It would lose the steps since the last checkpoint."""
    options = ["compare=[stick_breaking]", "stages.0.steps=10", "stages.1.steps=5", "evaluation.interval=5"]
    long = ["evaluation={windows: 4000, target_tokens: 16, longest: 32, interval: 5}"]
    out = tmp_path / "out"
    with started_forks(config, *options, *long, "--out", out) as job:
        wait_for_step(job, out, "stick_breaking", "short", 5)
        time.sleep(0.5)
        job.send_signal(signal.SIGINT)
        status = job.wait(60)
        output = job.stdout + job.stderr
    assert status == 130, output
    stopped = re.search(r"stopped by SIGINT while evaluating step 5 of stick_breaking / short; saved (\S+)\.", output)
    assert stopped and stopped[1].endswith("short-000005"), output


def test_attention_named_in_the_configuration(config, tmp_path, monkeypatch):
    """Two kinds of attention that the file defines, and a built-in one, are trained, evaluated, drawn and resumed."""
    monkeypatch.setenv("SB_DRAW", "1")
    variants = {
        "near": {"kind": "softmax", "position": "alibi", "window": 24, "stable_mask_gamma": 0.5},
        "learned": {"kind": "softmax", "position": "fire"},
    }
    small = [f"attention={json.dumps(variants)}", "compare=[learned, near, stick_breaking]", "evaluation.windows=1"]
    small += ["stages.0.steps=3", "stages.0.warmup_steps=1", "stages.1.steps=5", "report.tensorboard=false"]
    status, output, errors = train(config, *small, "--out", tmp_path / "out")
    assert status == 0, errors
    lines = metrics(tmp_path / "out")
    assert [line["model"] for line in lines] == ["learned"] * 8 + ["near"] * 8 + ["stick_breaking"] * 8
    assert len({line["loss"] for line in lines if line["stage"] == "short" and line["step"] == 1}) == 3
    assert "learned, extended" in output and (tmp_path / "out" / "nll_by_length.png").stat().st_size > 1000

    checkpoints = tmp_path / "out" / "learned" / "checkpoints"
    saved = state(checkpoints / "extended-000005", tmp_path)
    learned = [name for name in saved if name.startswith("/model/") and "attention.fire" in name]
    assert len(learned) == 2 * 6, "two layers of six parameters"
    (checkpoints / "latest").write_text("short-000003")
    status, _, errors = train(config, *small, "--out", tmp_path / "out", "--resume")
    assert status == 0, errors
    losses, again = (
        {(line["model"], line["stage"], line["step"]): line["loss"] for line in written}
        for written in (lines, metrics(tmp_path / "out"))
    )
    assert again == losses


def test_profiled_steps_and_skipped_tiles(config, tmp_path, capsys):
    short = ["compare=[stick_breaking]", "stages.0.steps=10", "stages.1.steps=5", "report.attention_interval=5"]
    status, _, errors = train(config, *ALONE, *short, "--profile", "4:5", "--out", tmp_path)
    assert status == 0, errors
    traces = sorted((tmp_path / "profile").iterdir())
    assert [trace.name for trace in traces] == ["stick_breaking.extended.json", "stick_breaking.short.json"]
    names = [event.get("name", "") for event in json.loads(traces[1].read_text())["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    looked = [line for line in metrics(tmp_path) if line["mean_remainder"] is not None]
    assert [line["step"] for line in looked] == [5, 10, 5]
    assert all(line["skipped_tiles"] == 0 for line in looked), "documents of one tile have none to skip"
    assert all(line["skipped_tiles_by_layer"] == [0, 0] for line in looked)
    for window, sentence in {
        "5:4": "--profile must be FIRST:LAST",
        "": "--profile must be FIRST:LAST",
        "31:70": "--profile must start at step 30 or before",
    }.items():
        status = main(str(config), profile=window, out=str(tmp_path / "other"))
        errors = capsys.readouterr().err
        assert status == 2 and sentence in errors and f"got {window!r}" in errors, errors


def test_a_resumed_run_profiles_the_steps_that_are_left(config, tmp_path):
    small = [*ALONE, "compare=[stick_breaking]", "stages.0.steps=6", "stages.1.steps=5", "checkpoint.interval=3"]
    out = tmp_path / "out"
    status, _, errors = train(config, *small, "--out", out)
    assert status == 0, errors
    (out / "stick_breaking" / "checkpoints" / "latest").write_text("short-000003")
    status, output, errors = train(config, *small, "--out", out, "--resume", "--profile", "2:4")
    assert status == 0, errors
    steps = {}
    for trace in (out / "profile").iterdir():
        names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
        steps[trace.name] = sum(name.startswith("Optimizer.step") for name in names)
    assert steps == {"stick_breaking.short.json": 1, "stick_breaking.extended.json": 3}
    missed = [line for line in output.splitlines() if "--profile" in line]
    assert missed == [
        "  stick_breaking / short: steps 2 to 3 of --profile 2:4 had ended before this job and cannot be profiled"
    ]


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(config, tmp_path):
    """The second stage diverges."""
    out = tmp_path / "out"
    wild = ["compare=[stick_breaking]", "stages.0.steps=5", "stages.1.learning_rate=1e30", "evaluation.windows=1"]
    status, _, errors = train(config, *wild, "--out", out)
    (sentence,) = re.findall(r"(?:loss|norm) is (?:nan|inf) at step \d+ of stick_breaking / extended: .*", errors)
    checkpoints = out / "stick_breaking" / "checkpoints"
    assert status == 1 and sentence.endswith(
        f"ends without saving this step; the newest checkpoint is {checkpoints / 'short-000005'}"
    )
    assert "Traceback" not in errors and sorted(path.name for path in checkpoints.iterdir()) == [
        "latest",
        "short-000005",
    ]
    assert all(line["loss"] < 1e9 for line in metrics(out))


def test_a_damaged_file_of_the_run_is_named(config, tmp_path):
    out = tmp_path / "out"
    short = ["compare=[stick_breaking]", "stages.0.steps=5", "stages.1.steps=5", "checkpoint={interval: 4, keep: 9}"]
    status, _, errors = train(config, *short, *ALONE, "evaluation.windows=1", "--out", out)
    assert status == 0, errors
    damaged = out / "evaluation" / "stick_breaking.short.json"
    damaged.write_text("{")
    (out / "stick_breaking" / "checkpoints" / "latest").write_text("short-000004")
    status, _, errors = train(out, "--resume")
    assert status == 1 and f"rank 0 failed: {damaged} is damaged: " in errors and "Traceback" not in errors, errors


def test_bad_arguments_are_rejected_before_the_start(config, tmp_path, capsys):
    status, errors = main(str(config), ["stages.0.stepz=3"], out=str(tmp_path / "out")), capsys.readouterr().err
    assert status == 2 and "unknown field stages.0.stepz, got 3. Did you mean 'steps'?" in errors
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    status, _, errors = train(config, "--out", tmp_path / "file")
    assert status == 2 and f"--out must be a folder, got '{tmp_path / 'file'}'" in errors, errors
    status, errors = main(str(config), out=""), capsys.readouterr().err
    assert status == 2 and "--out must be a folder, got ''." in errors
    status, errors = main(str(config), out=str(tmp_path / os.fsdecode(b"caf\xe9"))), capsys.readouterr().err
    assert status == 2 and re.search(r"--out must be a folder whose name is text in UTF-8, got '.*/caf\\udce9'", errors)


def test_a_rank_prints_characters_that_its_output_lacks(monkeypatch):
    """As in a locale that is not UTF-8, with the name of a folder."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["megatron_sb.training", "small.yaml"])
    monkeypatch.setattr(training, "main", lambda *arguments, **options: print("caf\xe9"))
    with pytest.raises(SystemExit):
        runpy.run_module("megatron_sb.training", run_name="__main__")
    sys.stdout.flush()
    assert written.getvalue() == b"caf\\xe9\n"


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGHUP, signal.SIGHUP]])
def test_a_job_whose_output_nobody_reads_saves_after_a_signal(numbers, config, tmp_path):
    """As with `megatron-sb train CONFIG.yaml 2>&1 | tee FILE`, where Ctrl-C also ends tee, or in a closed terminal.

    A terminal sends SIGHUP, and its shell does.
    """
    command = ["env", "--default-signal=HUP", sys.executable, "-m", "megatron_sb.cli", "train"]  # not ignored, as here
    out = tmp_path / "out"
    with started(command, config, *ALONE, "checkpoint.interval=1000", "--out", out) as job:
        wait_for_step(job, out, "stick_breaking", "short", 1)
        job.stdout.close()
        for number in numbers:
            job.send_signal(number)
            time.sleep(0.2)  # the launcher must note each one
        assert job.wait(TIMEOUT_SECONDS) == 128 + numbers[0]
    assert (out / "stick_breaking" / "checkpoints" / "latest").exists()


@pytest.mark.parametrize(("handler", "noted"), [(signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])])
def test_a_closed_terminal_is_one_signal_and_none_under_nohup(handler, noted):
    """It sends SIGHUP several times, also after Ctrl-C. That is no second signal, which would end without saving."""
    received, before = [], signal.signal(signal.SIGHUP, handler)
    try:
        with supervisor.noting_signals(received):
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT, signal.SIGHUP):
                os.kill(os.getpid(), number)
        assert received == [*noted, signal.SIGINT] and signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_output_to_a_closed_terminal_is_dropped(monkeypatch):
    """As of a job in the background, when its terminal is closed."""
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        os.close(master)
        with outliving_readers():
            print("dropped", flush=True)


def test_a_job_whose_log_is_on_a_full_disk_continues(config, tmp_path):
    """The disk of the checkpoints can be another one. The line says why the log ends early."""
    short = ["compare=[stick_breaking]", "stages.0.steps=2", "stages.0.warmup_steps=1", "stages.1.steps=5"]
    command = shlex.join([*map(str, (*TRAIN, config, *ALONE, *short, "--out", tmp_path / "out"))])
    status, _, errors = run_command(["bash", "-c", f"{command} > /dev/full"])
    assert status == 0 and errors.count("megatron-sb: standard output: No space left on device; continuing") == 1
    assert metrics(tmp_path / "out")[-1]["step"] == 5


def test_the_port_of_a_job_is_reserved_while_its_ranks_start(config, tmp_path):
    """No other process can listen on MASTER_PORT before rank 0 does."""
    script = (
        "import errno, os, pathlib, socket\n"
        "try:\n"
        "    socket.socket().bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "except OSError as error:\n"
        f"    pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(errno.errorcode[error.errno])\n"
    )
    assert supervisor.start_ranks(load_config(config), [sys.executable, "-c", script]) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "EADDRINUSE", "1": "EADDRINUSE"}


def test_the_ranks_start_before_the_launcher_imports_torch(config, tmp_path):
    """The import takes seconds. A rank that connects earlier waits for the store."""
    rank = (
        "import os, pathlib, socket\n"
        "socket.create_connection(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch()\n"
    )
    launcher = (
        "import sys, time, types\n"
        "from pathlib import Path\n"
        "from megatron_sb.training import launch, supervisor\n"
        "from megatron_sb.training.config import load_config\n"
        "assert 'torch' not in sys.modules\n"
        "serve = supervisor._serve_store\n"
        "def wait_for_ranks(listener):\n"
        "    assert 'torch' not in sys.modules\n"
        "    deadline = time.monotonic() + 30\n"
        f"    while len(list(Path({str(tmp_path)!r}).iterdir())) < 2 and time.monotonic() < deadline:\n"
        "        time.sleep(0.01)\n"
        "    return serve(listener)\n"
        "supervisor._serve_store = wait_for_ranks\n"
        f"sys.exit(supervisor.start_ranks(load_config({str(config)!r}), [sys.executable, '-c', {rank!r}]))\n"
    )
    status, _, errors = run_command([sys.executable, "-c", launcher])
    assert status == 0, errors
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_torchrun(config, tmp_path, monkeypatch):
    """The example that starts torchrun. One of its ranks gets SIGTERM, and the printed command resumes the job."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name, value in {"PATH": path, "RANKS_PER_NODE": "2", "PORT": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    small = ["stages.1.steps=5", "compare=[stick_breaking]", "report.tensorboard=false"]
    with started([TORCHRUN], config, *small, "--out", tmp_path / "out", "--profile", "2:30") as job:
        wait_for_step(job, tmp_path / "out", "stick_breaking", "short", 2)
        psutil.Process(job.pid).children()[0].send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=40)
        assert (tmp_path / "out" / "profile" / "stick_breaking.short.json").exists()
    (resume,) = re.findall(r"Resume with: torchrun \.\.\. (.*)", output)
    run_ranks(2, shlex.split(resume), TIMEOUT_SECONDS)
    assert [line["step"] for line in metrics(tmp_path / "out")] == [*range(1, 31), *range(1, 6)]


def test_the_number_of_ranks_must_be_that_of_torchrun(config, tmp_path):
    alone = ["stages.0.context_parallel_size=1", "stages.1.context_parallel_size=1"]
    with pytest.raises(AssertionError, match=mentions("parallel.ranks WORLD_SIZE 2 1")):
        run_ranks(2, ["-m", "megatron_sb.training", config, *alone, "parallel.ranks=1"], TIMEOUT_SECONDS)


def test_likelihoods_that_are_nan_are_drawn(tmp_path):
    """A model whose last step diverged is evaluated too."""
    results = [{"context": context, "nll": math.nan} for context in (8, 16)]
    entry = {"model": "a", "stage": "short", "trained_context": 8, "scaling": "none", "results": results}
    plots.draw_nll_by_length([entry], {"a": "a"}, tmp_path / "nll.png")
    assert (tmp_path / "nll.png").stat().st_size > 1000


def test_the_plot_has_the_standard_errors():
    """A result without a standard error has no bar."""
    errors = [0.5, None, 0.25]
    results = [{"context": 8 << n, "nll": 3.0 - n, "standard_error": error} for n, error in enumerate(errors)]
    entry = {"model": "a", "stage": "short", "trained_context": 8, "scaling": "none", "results": results}
    (container,) = plots.nll_by_length([entry], {"a": "a"}).axes[0].containers
    (bars,) = container.lines[2]
    drawn = [[float(y) for _, y in segment] for segment in bars.get_segments() if len(segment)]
    assert drawn == [[2.5, 3.5], [0.75, 1.25]]


def test_training_seconds_continue_and_leave_out_evaluations(tmp_path, config, monkeypatch):
    """They count over stages and resumed runs. A line of an older version makes them unknown."""
    job, now = load_config(config, ["report.tensorboard=false", "report.interval=2"]), [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])

    def write(stage, steps, seconds):
        written = report.Report(tmp_path, job, "a CPU")
        progress = Progress(stage.name, steps[0] - 1, 100 * (steps[0] - 1), {}, {})
        written.start_stage("stick_breaking", stage, progress)
        for step in steps:
            now[0] += seconds
            progress = dataclasses.replace(progress, step=step, tokens=progress.tokens + 100)
            written.step("stick_breaking", stage, progress, report.Step(5.0, 1.0, 0.1, 1e9, None))
            now[0] += 50.0
            written.leave_out(50.0)
        written.end_stage()
        return [line["training_seconds"] for line in metrics(tmp_path)]

    assert write(job.stages[0], [1, 2, 3, 4], 1.5) == [3.0, 6.0]
    assert write(job.stages[0], [3, 4], 2.0) == [3.0, 7.0]
    assert write(job.stages[1], [1, 2], 1.0) == [3.0, 7.0, 9.0]
    assert [line["tokens_per_second"] for line in metrics(tmp_path)] == [66.7, 50.0, 100.0]
    lines = [{name: x for name, x in line.items() if name != "training_seconds"} for line in metrics(tmp_path)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = report.Report(tmp_path, job, "a CPU")
    progress = Progress(job.stages[1].name, 3, 300, {}, {})
    written.start_stage("stick_breaking", job.stages[1], dataclasses.replace(progress, step=2))
    now[0] += 1.0
    written.step("stick_breaking", job.stages[1], dataclasses.replace(progress, step=4), report.Step(5, 1, 0, 1, None))
    written.end_stage()
    assert metrics(tmp_path)[-1]["training_seconds"] is None


def test_metrics_after_the_resumed_checkpoint_are_dropped(tmp_path, config):
    """A run that died after its last checkpoint has reported steps that the resumed run repeats."""
    job = load_config(config, ["report.tensorboard=false"])
    written = report.Report(tmp_path, job, "a CPU")
    progress = Progress("short", 0, 0, {}, {})
    written.start_stage("stick_breaking", job.stages[0], progress)
    for step in range(1, 6):
        progress = dataclasses.replace(progress, step=step, tokens=100 * step)
        written.step("stick_breaking", job.stages[0], progress, report.Step(5.0 - step, 1.0, 0.1, 1e9, None))
    written.end_stage()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"cut off')
    again = report.Report(tmp_path, job, "a CPU")
    again.start_stage("stick_breaking", job.stages[0], dataclasses.replace(progress, step=3, tokens=300))
    again.end_stage()
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]


def test_later_stages_are_dropped_if_an_earlier_one_is_resumed(tmp_path, config):
    """As from an older checkpoint, if the newest one is damaged."""
    job = load_config(config, ["report.tensorboard=false"])
    lines = [("short", 30, 4.0), ("extended", 30, 9.0)]
    lines = [{"model": "stick_breaking", "stage": stage, "step": n, "training_seconds": s} for stage, n, s in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = report.Report(tmp_path, job, "a CPU")
    for stage in job.stages:
        written.evaluation("stick_breaking", stage, stage.steps, "none", [{"context": 16, "nll": 3.0}])
    written.start_stage("stick_breaking", job.stages[0], Progress("short", 30, 100, {}, {}))
    written.end_stage()
    assert metrics(tmp_path) == lines[:1]
    assert [path.name for path in (tmp_path / "evaluation").iterdir()] == ["stick_breaking.short.json"]


@pytest.mark.parametrize("overrides", [["--set", "stages.0.stepz=3"], ["stages.0.stepz=3"]])
@pytest.mark.parametrize("command", ["module", "megatron-sb"])
def test_both_commands_take_overrides_in_both_ways(command, overrides, config, capsys):
    """With options before and after them. Other arguments are rejected."""
    if command == "module":
        status, _, errors = train(config, "seed=1", "--resume", *overrides, "--set=seed=2", "compare=[a]")
        other, _, message = train(config, "--reset", "seed")
    else:
        status = cli.main(["train", str(config), "seed=1", "--resume", *overrides, "--set=seed=2", "compare=[a]"])
        errors = capsys.readouterr().err
        with pytest.raises(SystemExit) as end:
            cli.main(["train", str(config), "--reset", "seed"])
        other, message = end.value.code, capsys.readouterr().err
    assert status == 2 and "unknown field stages.0.stepz, got 3." in errors, errors
    assert other == 2 and "unrecognized arguments: --reset seed" in message, message


@pytest.mark.parametrize(
    "overrides",
    [
        ["--set", "seed=-1", "seed=-2"],
        ["seed=-1", "--set=seed=-2"],
        ["seed=-2", "seed=-1", "--set", "seed=-2"],
        ["--set=seed=-2", "seed=-1", "seed=-2"],
    ],
)
def test_the_last_override_of_a_field_counts(overrides, config, capsys):
    """In the order of the command line, with and without --set."""
    assert cli.main(["train", str(config), *overrides]) == 2
    message = capsys.readouterr().err
    assert "got -2" in message and "got -1" not in message, message


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_the_rank_that_prints_a_refusal_ends_first(local_rank, config, monkeypatch, capsys):
    """A launcher kills the other ranks when the first one has ended."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for name, value in {"LOCAL_RANK": local_rank, "RANK": local_rank, "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert rank._run(load_config(config), Command(str(config), (), None, False, (0, 0))) == supervisor.EXIT_REFUSED
    printed = "parallel.ranks must be WORLD_SIZE = 3" in capsys.readouterr().err
    assert printed == (local_rank == "0") and bool(waited) == (local_rank == "1")


def test_a_rank_that_dies_before_the_first_checkpoint(config, tmp_path):
    """There is nothing to continue from, and the message does not claim it."""
    with started_forks(config, "checkpoint.interval=100", "--out", tmp_path / "out") as job:
        wait_for_step(job, tmp_path / "out", "stick_breaking", "short", 1)
        psutil.Process(job.pid).children()[1].kill()
        job.wait(60)
        (line,) = re.findall(r"rank \d .* ending the job\. .*", job.stderr)
    saved = sorted((tmp_path / "out" / "stick_breaking").glob("checkpoints/short-*"))
    assert line.endswith(
        f"Use --resume to continue from {saved[-1]}." if saved else "This job has saved no checkpoint."
    ), line


def test_a_new_epoch_is_logged(config, tmp_path):
    """Of 60 documents of 100 tokens, the first stage reads most, and the second stage the rest and then all again."""
    (tmp_path / "texts").mkdir()
    for index in range(60):
        (tmp_path / "texts" / f"{index:02d}.txt").write_bytes(bytes([65 + index % 26]) * 99)
    short = ["compare=[stick_breaking]", "stages.0.steps=24", "stages.1.steps=10", "evaluation.longest=64"]
    short += [f"data.paths=[{tmp_path / 'texts'}]", "report.tensorboard=false"]
    status, output, errors = train(config, *short, "--out", tmp_path / "out")
    assert status == 0, errors
    assert re.findall(r"(\S+) / (\S+): epoch (\d) begins at step \d", output) == [("stick_breaking", "extended", "2")]


def test_a_finished_model_without_its_last_checkpoint_is_not_trained_again(config, tmp_path):
    """With checkpoint.stage_ends = false the newest checkpoint is older than the results. Other runs need the steps."""
    short = ["stages.0.steps=3", "stages.0.warmup_steps=1", "stages.1.steps=5", "evaluation.windows=2"]
    options = [config, *short, "compare=[stick_breaking, softmax_rope]", "checkpoint={interval: 100, keep: 1}"]
    out = tmp_path / "out"
    status, _, errors = train(*options, "checkpoint.stage_ends=false", "--out", out)
    assert status == 0, errors
    lines = metrics(out)
    other = out / "evaluation" / "softmax_rope.extended.json"
    other.unlink()  # as if the job had died in its evaluation
    status, _, errors = train(*options, "checkpoint.stage_ends=false", "--out", out, "--resume")
    assert status == 0 and other.exists(), errors
    of_model = {
        name: [[line for line in each if line["model"] == name] for each in (lines, metrics(out))]
        for name in ("stick_breaking", "softmax_rope")
    }
    assert of_model["stick_breaking"][0] == of_model["stick_breaking"][1]
    before, after = of_model["softmax_rope"]
    assert before != after and [line["loss"] for line in before] == [line["loss"] for line in after]
    status, _, errors = train(*options, "checkpoint.stage_ends=true", "--out", out, "--resume")
    assert status == 0 and (out / "stick_breaking" / "checkpoints" / "extended-000005").exists(), errors


def test_the_gate_loss_is_a_mean_over_all_tokens(tmp_path):
    """Not over the labels that count: 1 of 32 in the first stage, 49 of 128 in the second, with the same weights."""
    stage = {"steps": 1, "rows_per_step": 4, "learning_rate": 1e-12}
    job = {
        "name": "gates",
        "compare": ["gated"],
        "data": {"kind": "recall", "num_pairs": 15, "num_keys": 16, "num_values": 8},
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 32},
        "attention": {"gated": {"kind": "stick_breaking", "forget_gate": True, "forget_gate_loss": 1e4}},
        "stages": [stage | {"name": "few", "context_length": 32}, stage | {"name": "many", "context_length": 128}],
        "evaluation": {"windows": 2},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    status, _, errors = train(tmp_path / "job.yaml", "--set", "parallel.device=cpu", "--out", tmp_path / "out")
    assert status == 0, errors
    few, many = (line["gradient_norm"] for line in metrics(tmp_path / "out"))
    assert few > 10 and few == pytest.approx(many, rel=0.2)
