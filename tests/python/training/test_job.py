"""One small job as a user runs it: what it writes, and how it resumes after a kill, a signal and a failed save."""

import json
import platform
import re
import shlex
import signal
from pathlib import Path

import psutil
import pytest
import torch
from support.fork_server import run_python
from support.jobs import (
    FORKED_TRAIN,
    SMALL_JOB,
    TIMEOUT_SECONDS,
    TRAIN,
    kill_while_it_saves,
    metrics,
    run_command,
    started_forks,
    state,
    train,
    wait_for_step,
)

from megatron_sb.training.config import load_config
from megatron_sb.training.directory import hold, prepare_directory


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(SMALL_JOB)
    return path


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """A run from start to end, by the command that users type: (its directory, its standard output and error)."""
    out = tmp_path_factory.mktemp("straight") / "out"
    status, output, errors = run_command(TRAIN, config, "--out", out)
    assert status == 0, errors
    return out, output, errors


def test_files_and_output_of_a_run(straight):
    out, output, errors = straight
    data = json.loads((out / "data.json").read_text())
    assert data["description"] in output and data["fingerprint"]["train_documents"] > 5
    assert re.search(r"; left out: (.*, )?\d+ by data\.include", data["description"]), "compiled files"
    lines = metrics(out)
    assert [(line["model"], line["stage"], line["step"]) for line in lines] == [
        (model, stage, step)
        for model in ("stick_breaking", "softmax_rope")
        for stage, steps in (("short", 30), ("extended", 30))
        for step in range(1, steps + 1)
    ]
    for line in lines:  # a micro-batch of each tenth step, over two context-parallel ranks
        assert line["model_tflops"] > 0 and line["peak_gib"] is None and line["skipped_tiles"] is None
        looked = line["model"] == "stick_breaking" and line["step"] % 10 == 0
        assert (line["mean_remainder"] is not None) == looked and (not looked or 0 < line["mean_remainder"] < 1)
        layers = line.get("remainder_by_layer", [])
        assert len(layers) == (2 if looked else 0) and "skipped_tiles_by_layer" not in line
        assert not looked or sum(layers) / 2 == pytest.approx(line["mean_remainder"], rel=1e-12)
    for model in ("stick_breaking", "softmax_rope"):
        losses = [line["loss"] for line in lines if line["model"] == model]
        assert losses[0] == pytest.approx(5.55, abs=0.1) and sum(losses[-5:]) / 5 < 3.6, "the loss does not decrease"
        assert sorted(path.name for path in (out / model / "checkpoints").iterdir()) == [
            "extended-000028",
            "extended-000030",
            "latest",
            "short-000028",
            "short-000030",
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
    assert re.search(r"stick-breaking / extended \(64\): .*30/30 \[\d\d:\d\d<.*loss \d\.\d+, [\d,]+ tokens/s", bar)


def test_a_job_that_was_killed_and_stopped_resumes_to_the_same_bits(straight, config, tmp_path):
    """A rank is killed in the first stage, the job gets SIGINT in the second, and is resumed after each.

    The ranks are forks. `straight` and test_job_options.py start them as users do.
    """
    out, renamed = tmp_path / "out", "name=renamed"
    with started_forks(config, renamed, "--out", out) as job:
        wait_for_step(job, out, "stick_breaking", "short", 9)
        ranks = psutil.Process(job.pid).children()
        assert len(ranks) == 2
        ranks[1].kill()
        assert job.wait(40) == 1
        how = r"rank \d \(process \d+\) (was killed by SIGKILL|ended with status 1); ending the job"
        assert re.search(how, job.stderr)
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    before = (out / "stick_breaking" / "checkpoints" / "latest").read_text()
    assert re.fullmatch(r"short-0000\d\d", before)

    with started_forks(config, renamed, "--out", out, "--resume") as job:
        wait_for_step(job, out, "stick_breaking", "extended", 2)
        job.send_signal(signal.SIGINT)
        assert job.wait(40) == 130
        output = job.stdout + job.stderr
    stopped = re.search(
        r"stopped by SIGINT at step (\d+) of stick_breaking / extended; saved (\S+)\. Resume with: megatron-sb (.*)",
        output,
    )
    assert stopped and Path(stopped[2]).is_dir() and int(stopped[1]) < 30
    assert metrics(out)[-1]["step"] == int(stopped[1])

    script, _ = FORKED_TRAIN
    done = run_python([script, "megatron_sb.cli", *shlex.split(stopped[3])], seconds=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    expected, _, _ = straight
    exact = ("model", "stage", "step", "tokens", "loss", "gradient_norm", "learning_rate")
    assert [[line[name] for name in exact] for line in metrics(out)] == [
        [line[name] for name in exact] for line in metrics(expected)
    ]
    for path in (expected / "evaluation").iterdir():
        assert (out / "evaluation" / path.name).read_text() == path.read_text()
    for model in ("stick_breaking", "softmax_rope"):
        checkpoint = Path(model) / "checkpoints" / "extended-000030"
        ours, theirs = state(out / checkpoint, tmp_path), state(expected / checkpoint, tmp_path)
        assert ours.keys() == theirs.keys() and any("exp_avg_sq" in name for name in ours)
        for name, value in theirs.items():
            same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
            assert same, name

    status, output, _ = train(config, renamed, "--out", out, "--resume")
    assert status == 0 and "by context length" in output, "resuming a finished run prints its results"


def test_a_job_that_was_killed_while_it_saved_resumes(config, tmp_path):
    """Every rank is killed with a checkpoint half written. The run resumes from the checkpoint before it."""
    out = tmp_path / "out"
    checkpoints = out / "stick_breaking" / "checkpoints"
    short = ["compare=[stick_breaking]", "checkpoint.interval=1", "stages.0.steps=20", "stages.1.steps=5"]
    with started_forks(config, *short, "--out", out) as job:
        wait_for_step(job, out, "stick_breaking", "short", 5)
        kill_while_it_saves(job, checkpoints)
    half = next(checkpoints.glob(".*.tmp"))
    latest = (checkpoints / "latest").read_text()
    assert half.name != f".{latest}.tmp" and (checkpoints / latest / "progress.json").exists()
    status, _, errors = train(config, *short, "--out", out, "--resume")
    assert status == 0 and not half.exists(), errors
    status, _, errors = train(config, *short, "--out", tmp_path / "straight")
    assert status == 0, errors
    assert [line["loss"] for line in metrics(out)] == [line["loss"] for line in metrics(tmp_path / "straight")]


def test_a_run_is_not_overwritten_or_resumed_with_another_configuration(straight, config, tmp_path, monkeypatch):
    out, _, _ = straight
    status, _, errors = train(config, "--out", out)
    assert status == 2 and "holds a run already" in errors and "--resume" in errors and "Traceback" not in errors, (
        errors
    )

    with pytest.raises(ValueError, match=r"stages\.0\.steps must be 30, .*, got 31"):
        prepare_directory(load_config(config, ["stages.0.steps=31"]), str(out), resume=True)
    with hold(out), pytest.raises(ValueError, match=f"another job is writing to {out}"):
        prepare_directory(load_config(config), str(out), resume=False)


def test_a_run_is_not_resumed_with_another_padding(straight, config):
    out, _, _ = straight
    with pytest.raises(ValueError, match=r"^stages\.0\.pad_multiple must be 4, .*, got 1\. Set it to 4, or"):
        prepare_directory(load_config(config, ["stages.0.context_parallel_size=1"]), str(out), resume=True)
    same_rows = load_config(config, ["stages.0.context_parallel_size=1", "stages.0.pad_multiple=4"])
    directory, lock = prepare_directory(same_rows, str(out), resume=True)
    lock.close()
    assert directory == out


def test_a_run_starts_from_the_checkpoint_of_another(straight, config, tmp_path):
    out, _, _ = straight
    short = ["compare=[stick_breaking]", "stages.0.steps=5", "stages.1.steps=5", "evaluation.windows=1"]
    start = out / "stick_breaking" / "checkpoints" / "extended-000030"
    status, _, errors = train(config, f"initial_checkpoint={start}", *short, "--out", tmp_path / "out")
    assert status == 0, errors
    first, before = metrics(tmp_path / "out")[0], metrics(out)
    assert first["loss"] < 4 < before[0]["loss"] and first["tokens"] < before[59]["tokens"]
    status, _, errors = train(config, "initial_checkpoint=nowhere", *short, "--out", tmp_path / "none")
    assert status == 2 and "initial_checkpoint must be" in errors and "got 'nowhere'" in errors, errors
    assert not (tmp_path / "none" / "config.yaml").exists()
