"""The whole job as a user runs it: what it leaves behind, stopping, dying, resuming, refusing."""

import contextlib
import dataclasses
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest
import torch
from support.jobs import kill_while_it_saves
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_sb.training import main, plots, report, supervisor
from megatron_sb.training.checkpoint import Progress
from megatron_sb.training.config import load_config
from megatron_sb.training.directory import hold, prepare_directory

TRAIN = [sys.executable, "-m", "megatron_sb.training"]
TIMEOUT_SECONDS = 120
LIBRARY = Path(sysconfig.get_paths()["stdlib"])

# Small enough for seconds; both stages with context parallelism, micro-batches in the first.
CONFIG = f"""
name: small
data: {{paths: ["{LIBRARY / "json"}", "{LIBRARY / "email"}"], validation_fraction: 0.3}}
model: {{num_layers: 2, hidden_size: 32, num_heads: 2, num_kv_heads: 1, ffn_hidden_size: 64}}
attention: {{softmax_rope: {{evaluated_scalings: [none, linear, ntk]}}}}
parallel: {{ranks: 2, device: cpu, threads_per_rank: 1, timeout_seconds: 60}}
stages:
  - {{name: short, context_length: 32, steps: 40, rows_per_step: 8, rows_per_micro_batch: 2, learning_rate: 1e-2,
      warmup_steps: 4, schedule: power, context_parallel_size: 2}}
  - {{name: extended, context_length: 64, steps: 60, rows_per_step: 4, learning_rate: 1e-2, warmup_steps: 4,
      schedule: exponential, context_parallel_size: 2}}
evaluation: {{windows: 4, target_tokens: 16, length_factor: 8}}
checkpoint: {{interval: 7, keep: 2}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(CONFIG)
    return path


def run(*arguments, command=TRAIN, **environment):
    """Run to the end: (status, standard output, standard error)."""
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


@contextlib.contextmanager
def started(*arguments, command=TRAIN):
    """A job in the background, killed at the end whatever happens."""
    process = subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()  # its ranks see it go and end
        process.wait()


def metrics(out):
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def wait_for_step(process, out, model, stage, step):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not any(line["step"] >= step and (line["model"], line["stage"]) == (model, stage) for line in metrics(out)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{stage} never reached step {step}"
        time.sleep(0.01)


def state(checkpoint, tmp_path):
    """Every tensor of a checkpoint by name."""
    dcp_to_torch_save(checkpoint, tmp_path / "state.pt")
    tensors = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, child in value.items():
                walk(child, f"{name}/{key}")
        elif isinstance(value, (list, tuple)):
            for index, child in enumerate(value):
                walk(child, f"{name}/{index}")
        else:
            tensors[name] = value

    walk(torch.load(tmp_path / "state.pt", weights_only=False), "")
    return tensors


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """A run from start to end: (its directory, its standard output)."""
    out = tmp_path_factory.mktemp("straight") / "out"
    status, output, errors = run(config, "--out", out)
    assert status == 0, errors
    return out, output, errors


def test_what_a_run_leaves_behind(straight):
    out, output, errors = straight
    lines = metrics(out)
    assert [(line["model"], line["stage"], line["step"]) for line in lines] == [
        (model, stage, step)
        for model in ("stick_breaking", "softmax_rope")
        for stage, steps in (("short", 40), ("extended", 60))
        for step in range(1, steps + 1)
    ]
    for line in lines:  # a micro-batch of each tenth step, over two context-parallel ranks
        assert line["model_tflops"] > 0 and line["peak_gib"] is None and line["skipped_tiles"] is None
        looked = line["model"] == "stick_breaking" and line["step"] % 10 == 0
        assert (line["mean_remainder"] is not None) == looked and (not looked or 0 < line["mean_remainder"] < 1)
    for model in ("stick_breaking", "softmax_rope"):
        losses = [line["loss"] for line in lines if line["model"] == model]
        assert losses[0] == pytest.approx(5.55, abs=0.1) and sum(losses[-5:]) / 5 < 3.6, "it does not learn"
        assert sorted(path.name for path in (out / model / "checkpoints").iterdir()) == [
            "extended-000056",
            "extended-000060",
            "latest",
            "short-000035",
            "short-000040",
        ]
        for stage, longest in (("short", 256), ("extended", 512)):
            evaluation = json.loads((out / "evaluation" / f"{model}.{stage}.json").read_text())
            contexts = [result["context"] for result in evaluation["results"]]
            assert contexts[0] == 16 and contexts[-1] == longest
            assert evaluation["device"] == f"{platform.machine()} CPU, 2 threads"
            assert all(2 < result["nll"] < 6 and result["standard_error"] > 0 for result in evaluation["results"])
            for result in evaluation["results"]:
                row = re.search(rf"^ *{result['context']} \|.*", output, re.M).group()
                assert f"{result['nll']:.4f}" in row
    for stage, trained in (("short", 32), ("extended", 64)):
        by_scaling = {
            scaling: json.loads((out / "evaluation" / f"softmax_rope.{stage}{suffix}.json").read_text())["results"]
            for scaling, suffix in (("none", ""), ("linear", ".linear"), ("ntk", ".ntk"))
        }
        for plain, *scaled in zip(*by_scaling.values(), strict=True):
            beyond = plain["context"] > trained
            assert len({plain["nll"], *(result["nll"] for result in scaled)}) == (3 if beyond else 1)
    assert re.search(r"\| softmax \+ RoPE, NTK scaling, extended$", output, re.M)
    for picture in ("loss.png", "nll_by_length.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert list(out.glob("tensorboard/stick_breaking/events*"))
    bar = errors.replace("\r", "\n")
    assert re.search(r"stick-breaking / extended \(64\): .*60/60 \[\d\d:\d\d<.*loss \d\.\d+, [\d,]+ tokens/s", bar)


def test_killed_stopped_and_resumed_is_the_straight_run(straight, config, tmp_path):
    """A rank killed in the first stage, SIGINT in the second, resumed after each, as it says: nothing differs."""
    out, renamed = tmp_path / "out", "name=renamed"
    with started(config, renamed, "--out", out) as job:
        wait_for_step(job, out, "stick_breaking", "short", 9)
        ranks = psutil.Process(job.pid).children()
        assert len(ranks) == 2
        ranks[1].kill()
        output, _ = job.communicate(timeout=40)
        assert job.returncode == 1
        assert re.search(r"rank \d \(process \d+\) (was killed by SIGKILL|ended with status 1); ending the job", output)
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    before = (out / "stick_breaking" / "checkpoints" / "latest").read_text()
    assert re.fullmatch(r"short-0000\d\d", before)

    with started(config, renamed, "--out", out, "--resume") as job:
        wait_for_step(job, out, "stick_breaking", "extended", 2)
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=40)
        assert job.returncode == 130
    stopped = re.search(
        r"stopped by SIGINT at step (\d+) of stick_breaking / extended; saved (\S+)\. Resume with: megatron-sb (.*)",
        output,
    )
    assert stopped and Path(stopped[2]).is_dir() and int(stopped[1]) < 60
    assert metrics(out)[-1]["step"] == int(stopped[1])

    status, _, errors = run(*shlex.split(stopped[3]), command=[sys.executable, "-m", "megatron_sb.cli"])
    assert status == 0, errors
    expected, _, _ = straight
    exact = ("model", "stage", "step", "tokens", "loss", "gradient_norm", "learning_rate")
    assert [[line[name] for name in exact] for line in metrics(out)] == [
        [line[name] for name in exact] for line in metrics(expected)
    ]
    for path in (expected / "evaluation").iterdir():
        assert (out / "evaluation" / path.name).read_text() == path.read_text()
    for model in ("stick_breaking", "softmax_rope"):
        checkpoint = Path(model) / "checkpoints" / "extended-000060"
        ours, theirs = state(out / checkpoint, tmp_path), state(expected / checkpoint, tmp_path)
        assert ours.keys() == theirs.keys() and any("exp_avg_sq" in name for name in ours)
        for name, value in theirs.items():
            same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
            assert same, name

    status, output, _ = run(config, renamed, "--out", out, "--resume")
    assert status == 0 and "by context length" in output, "a finished run has nothing left to do"


def test_the_directory_of_a_run_is_not_overwritten_nor_changed(straight, config, tmp_path, monkeypatch):
    out, _, _ = straight
    status, _, errors = run(config, "--out", out)
    assert status == 2 and "holds a run already" in errors and "--resume" in errors and "Traceback" not in errors, (
        errors
    )

    with pytest.raises(ValueError, match=r"stages\.0\.steps must be 40, .*, got 41"):
        prepare_directory(load_config(config, ["stages.0.steps=41"]), str(out), resume=True)
    with hold(out), pytest.raises(ValueError, match=f"another job is writing to {out}"):
        prepare_directory(load_config(config), str(out), resume=False)


def test_a_run_goes_on_over_other_ranks(config, tmp_path):
    """Saved by two context-parallel ranks, resumed by one, and by two data-parallel ones: the same rows and losses."""
    padded = [f"stages.{stage}.pad_multiple=4" for stage in (0, 1)]
    short = ["compare=[stick_breaking]", "stages.0.steps=10", "stages.1.steps=5"]
    out = tmp_path / "out"
    status, _, errors = run(config, *short, *padded, "--out", out)
    assert status == 0, errors
    alone = [f"stages.{stage}.context_parallel_size=1" for stage in (0, 1)]
    for ranks in (1, 2):
        other = tmp_path / str(ranks)
        shutil.copytree(out, other)
        (other / "stick_breaking" / "checkpoints" / "latest").write_text("short-000007")
        status, _, errors = run(config, *short, *padded, *alone, f"parallel.ranks={ranks}", "--out", other, "--resume")
        assert status == 0, errors
        losses, expected = ([line["loss"] for line in metrics(folder)] for folder in (other, out))
        assert losses == pytest.approx(expected, abs=2e-5) and losses[:7] == expected[:7] and losses != expected


def test_killed_while_it_saves(straight, config, tmp_path):
    """SIGKILL to every rank with a checkpoint half written: the one before is whole and the run goes on from it."""
    out = tmp_path / "out"
    checkpoints = out / "stick_breaking" / "checkpoints"
    short = ["compare=[stick_breaking]", "checkpoint.interval=1", "stages.1.steps=5"]
    with started(config, *short, "--out", out) as job:
        wait_for_step(job, out, "stick_breaking", "short", 5)
        kill_while_it_saves(job, checkpoints)
    half = next(checkpoints.glob(".*.tmp"))
    latest = (checkpoints / "latest").read_text()
    assert half.name != f".{latest}.tmp" and (checkpoints / latest / "progress.json").exists()
    status, _, errors = run(config, *short, "--out", out, "--resume")
    assert status == 0 and not half.exists(), errors
    expected = [line["loss"] for line in metrics(straight[0]) if line["model"] == "stick_breaking"]
    assert [line["loss"] for line in metrics(out)] == expected[:45]


def test_a_run_does_not_go_on_with_rows_cut_elsewhere(straight, config):
    out, _, _ = straight
    with pytest.raises(ValueError, match=r"--resume: stages\.0\.pad_multiple must be 4, .*, got 1"):
        prepare_directory(load_config(config, ["stages.0.context_parallel_size=1"]), str(out), resume=True)
    same_rows = load_config(config, ["stages.0.context_parallel_size=1", "stages.0.pad_multiple=4"])
    directory, lock = prepare_directory(same_rows, str(out), resume=True)
    lock.close()
    assert directory == out


def test_profiled_steps_and_skipped_tiles(config, tmp_path, capsys):
    alone = ["parallel.ranks=1", "stages.0.context_parallel_size=1", "stages.1.context_parallel_size=1"]
    short = ["compare=[stick_breaking]", "stages.0.steps=10", "stages.1.steps=5", "report.attention_interval=5"]
    status, _, errors = run(config, *alone, *short, "--profile", "4:5", "--out", tmp_path)
    assert status == 0, errors
    traces = sorted((tmp_path / "profile").iterdir())
    assert [trace.name for trace in traces] == ["stick_breaking.extended.json", "stick_breaking.short.json"]
    names = [event.get("name", "") for event in json.loads(traces[1].read_text())["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    looked = [line for line in metrics(tmp_path) if line["mean_remainder"] is not None]
    assert [line["step"] for line in looked] == [5, 10, 5]
    assert all(line["skipped_tiles"] == 0 for line in looked), "documents of one tile have none to skip"
    for window, sentence in {
        "5:4": "--profile must be FIRST:LAST",
        "61:70": "--profile must start at step 60 or before",
    }.items():
        status = main(str(config), profile=window, out=str(tmp_path / "other"))
        errors = capsys.readouterr().err
        assert status == 2 and sentence in errors and f"got {window}" in errors, errors


def test_another_runs_checkpoint_to_start_from(straight, config, tmp_path):
    out, _, _ = straight
    short = ["compare=[stick_breaking]", "stages.0.steps=5", "stages.1.steps=5", "evaluation.windows=1"]
    start = out / "stick_breaking" / "checkpoints" / "extended-000060"
    status, _, errors = run(config, f"initial_checkpoint={start}", *short, "--out", tmp_path / "out")
    assert status == 0, errors
    first, before = metrics(tmp_path / "out")[0], metrics(out)
    assert first["loss"] < 4 < before[0]["loss"] and first["tokens"] < before[99]["tokens"]
    status, _, errors = run(config, "initial_checkpoint=nowhere", *short, "--out", tmp_path / "none")
    assert status == 2 and "initial_checkpoint must be" in errors and "got 'nowhere'" in errors, errors
    assert not (tmp_path / "none" / "config.yaml").exists(), "what was refused is no run"


def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(config, tmp_path):
    """Its first stage goes well, its second does not."""
    out = tmp_path / "out"
    wild = ["compare=[stick_breaking]", "stages.0.steps=5", "stages.1.learning_rate=1e30", "evaluation.windows=1"]
    status, _, errors = run(config, *wild, "--out", out)
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


def test_models_by_name(config, tmp_path):
    """Attention that the file names, beside one that is there from the start: trained, evaluated, drawn, resumed."""
    variants = {
        "near": {"kind": "softmax", "position": "alibi", "window": 24, "stable_mask_gamma": 0.5},
        "learned": {"kind": "softmax", "position": "fire"},
    }
    small = [f"attention={json.dumps(variants)}", "compare=[learned, near, stick_breaking]", "evaluation.windows=1"]
    small += ["stages.0.steps=3", "stages.0.warmup_steps=1", "stages.1.steps=5", "report.tensorboard=false"]
    status, output, errors = run(config, *small, "--out", tmp_path / "out")
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
    status, _, errors = run(config, *small, "--out", tmp_path / "out", "--resume")
    assert status == 0, errors
    losses, again = (
        {(line["model"], line["stage"], line["step"]): line["loss"] for line in written}
        for written in (lines, metrics(tmp_path / "out"))
    )
    assert again == losses


def test_a_wrong_field_is_refused_before_anything_runs(config, tmp_path, capsys):
    status, errors = main(str(config), ["stages.0.stepz=3"], out=str(tmp_path / "out")), capsys.readouterr().err
    assert status == 2 and "unknown field stages.0.stepz, got 3. Did you mean 'steps'?" in errors
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    status, _, errors = run(config, "--out", tmp_path / "file")
    assert status == 2 and f"File exists: '{tmp_path / 'file'}'" in errors and "Traceback" not in errors, errors


def test_jobs_that_start_together_meet_at_ports_of_their_own(config, tmp_path):
    """While a job's ranks start, nobody else can listen where they are going to meet."""
    script = (
        "import errno, os, pathlib, socket\n"
        "try:\n"
        "    socket.socket().bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "except OSError as error:\n"
        f"    pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(errno.errorcode[error.errno])\n"
    )
    assert supervisor.start_ranks(load_config(config), [sys.executable, "-c", script]) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "EADDRINUSE", "1": "EADDRINUSE"}


def test_torchrun_starts_the_ranks_too(config, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small = ["stages.1.steps=5", "compare=[stick_breaking]", "report.tensorboard=false"]
    arguments = ["-m", "megatron_sb.training", config, *small, "--out", tmp_path / "out"]
    with started(*arguments, "--profile", "2:40", command=torchrun) as job:
        wait_for_step(job, tmp_path / "out", "stick_breaking", "short", 2)
        psutil.Process(job.pid).children()[0].send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=40)
        assert (tmp_path / "out" / "profile" / "stick_breaking.short.json").exists()
    (to_go_on,) = re.findall(r"Resume with: torchrun \.\.\. (.*)", output)
    status, _, errors = run(*shlex.split(to_go_on), command=torchrun, OMP_NUM_THREADS="1")
    assert status == 0, errors
    assert len(metrics(tmp_path / "out")) == 45
    status, _, errors = run(*arguments[:-1], tmp_path / "other", "parallel.ranks=1", command=torchrun)
    assert status != 0


def test_what_has_no_likelihood_is_drawn(tmp_path):
    """A model that a last step has spoilt has been evaluated all the same."""
    results = [{"context": context, "nll": math.nan} for context in (8, 16)]
    entry = {"model": "a", "stage": "short", "trained_context": 8, "scaling": "none", "results": results}
    plots.draw_nll_by_length([entry], {"a": "a"}, tmp_path / "nll.png")
    assert (tmp_path / "nll.png").stat().st_size > 1000


def test_bar_shows_time_left_and_lines_beyond_the_checkpoint_are_dropped(tmp_path, config):
    """A run that died after its last checkpoint has reported steps that a resumed one takes again."""
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
