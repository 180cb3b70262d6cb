"""The command's arguments, the runs of a sweep, and the files that an experiment writes."""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot
from pandas import DataFrame
from support.markdown import cells_of

from megatron_sb import cli, experiments
from megatron_sb.experiments import sweep, tables
from megatron_sb.experiments.sweep import Trial
from megatron_sb.processes import module_command
from megatron_sb.training.config import ConfigError, load_config, to_yaml
from megatron_sb.training.directory import hold
from megatron_sb.training.report import hardware

TINY = str(Path(__file__).parents[3] / "configs" / "tiny_context_extension.yaml")
ON_CPU = ("parallel.device=cpu",)  # it has two ranks, and runs at a time have one GPU each


def write_finished_run(folder, config):
    """Write the files by which a sweep recognises a finished run."""
    (folder / "evaluation").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    for model in config.compare:
        sweep.evaluation_path(folder, config, model).write_text(json.dumps({"results": [{"nll": 1.5}]}))


def test_the_error_of_an_invalid_configuration_names_the_run():
    with pytest.raises(ConfigError, match=r"^run fast: .*stages\.0\.learning_rate must be greater than 0, got -1"):
        Trial("fast", ("stages.0.learning_rate=-1",)).config(TINY)


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    trial = Trial("wide", ("model.hidden_size=64",))
    config = load_config(TINY, trial.overrides)
    assert not sweep.is_done(config, tmp_path / "wide")
    write_finished_run(tmp_path / "wide", config)
    started = []
    monkeypatch.setattr(sweep, "_start", lambda config_path, trial, *others: started.append(trial))
    sweep.train_all(TINY, [trial], tmp_path)
    assert started == [] and sweep.is_done(config, tmp_path / "wide")
    assert sweep.evaluation(tmp_path / "wide", config, "stick_breaking") == {"results": [{"nll": 1.5}]}
    with pytest.raises(ValueError, match=r"^model\.hidden_size must be 64.*wide.*got 32\. For .*--out"):
        sweep.train_all(TINY, [Trial("wide", ("model.hidden_size=32",))], tmp_path)


def test_invalid_sweeps(tmp_path):
    with pytest.raises(ValueError, match=r"--jobs .*got 0"):
        sweep.train_all(TINY, [], tmp_path, jobs=0)
    with pytest.raises(ValueError, match=r"trials .*got \['one', 'one'\]"):
        sweep.train_all(TINY, [Trial("one", ()), Trial("one", ("seed=1",))], tmp_path)
    with pytest.raises(ValueError, match=r"stages\.0\.stepz"):
        sweep.train_all(TINY, [Trial("one", ("stages.0.stepz=1",))], tmp_path)
    assert not list(tmp_path.iterdir())
    with hold(tmp_path), pytest.raises(ValueError, match=f"another job .*{tmp_path}"):
        sweep.train_all(TINY, [], tmp_path)


def test_runs_at_a_time_have_one_gpu_each(tmp_path, monkeypatch):
    """With more ranks than GPUs, a run would use the CPU, because parallel.device is auto."""
    started = []

    def start(config_path, trial, out, gpu, pipe):
        started.append(gpu)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(sweep, "_start", start)
    monkeypatch.setattr(sweep, "_count_gpus", lambda: 2)
    with pytest.raises(ValueError, match=r"parallel\.ranks must be 1 with --jobs 2, .* got 2\."):
        sweep.train_all(TINY, [Trial("one", ())], tmp_path, jobs=2)
    assert not started and not list(tmp_path.iterdir())
    one_rank = ("parallel.ranks=1", "stages.1.context_parallel_size=1")
    for jobs, overrides in ((2, one_rank), (2, ON_CPU), (1, ())):
        sweep.train_all(TINY, [Trial(f"{jobs}-{len(overrides)}", overrides)], tmp_path, jobs=jobs)
    assert started == [0, 0, None]
    monkeypatch.setattr(sweep, "_count_gpus", lambda: 0)
    sweep.train_all(TINY, [Trial("one", ())], tmp_path, jobs=2)


def replace_trainer(monkeypatch, code):
    """Run this Python code instead of the trainer. Return the list of the replaced commands."""
    command, commands = sweep._command, []

    def replacement(*arguments):
        commands.append(command(*arguments))
        return [sys.executable, "-c", code]

    monkeypatch.setattr(sweep, "_command", replacement)
    return commands


def test_a_failed_run_stops_the_sweep(tmp_path, monkeypatch):
    commands = replace_trainer(monkeypatch, "print('this is why'); raise SystemExit(3)")
    with pytest.raises(sweep.SweepStopped, match=r"^one .*status 3.*one\.log:\nthis is why$") as stop:
        sweep.train_all(TINY, [Trial("one", ("seed=3",)), Trial("two", ())], tmp_path)
    assert stop.value.status == 3
    assert commands == [[*module_command("megatron_sb.training"), TINY, "seed=3", "--out", str(tmp_path / "one")]]


def test_a_killed_run_gives_the_status_of_its_signal(tmp_path, monkeypatch):
    replace_trainer(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(sweep.SweepStopped, match=r"^one was killed by SIGKILL\. The end of .*one\.log:\n") as stop:
        sweep.train_all(TINY, [Trial("one", ())], tmp_path)
    assert stop.value.status == 128 + signal.SIGKILL


def test_interrupted_runs_are_resumed(tmp_path, monkeypatch):
    config = load_config(TINY)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.yaml").write_text(to_yaml(config))
    commands = replace_trainer(monkeypatch, "")
    sweep.train_all(TINY, [Trial("one", ON_CPU), Trial("two", ON_CPU)], tmp_path, jobs=2)
    assert sorted(command[-1] for command in commands) == ["--resume", str(tmp_path / "two")]  # they start together


@pytest.mark.parametrize(("keep", "started_to_keep"), [(True, True), (True, False), (False, True), (False, False)])
def test_checkpoints_of_finished_runs(keep, started_to_keep, tmp_path, monkeypatch):
    """They are deleted as soon as a run has ended, if they are not to be kept. An earlier call decided for its runs."""
    code = """
import sys
from pathlib import Path
name = sys.argv[1]
others = [path.exists() for path in Path().glob("*/*/checkpoints")]
checkpoints = Path(name, "stick_breaking", "checkpoints", "short-000001")
checkpoints.mkdir(parents=True)
(checkpoints / "weights").write_text("1 GB")
print(len(others))
if name == "failed": raise SystemExit(3)
"""
    config = load_config(TINY, [f"checkpoint.stage_ends={str(started_to_keep).lower()}"])
    earlier = tmp_path / "earlier"
    for model in config.compare:
        (earlier / model / "checkpoints").mkdir(parents=True)
        for scaling in config.evaluated_scalings(model):
            path = sweep.evaluation_path(earlier, config, model, scaling)
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}")
    (earlier / "config.yaml").write_text(to_yaml(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "_command", lambda path, trial, folder: [sys.executable, "-c", code, trial.name])
    trials = [Trial(name, ()) for name in ("earlier", "one", "two", "failed")]
    with pytest.raises(sweep.SweepStopped, match="failed ended with status 3"):
        sweep.train_all(TINY, trials, tmp_path, keep_checkpoints=keep)
    left = {str(path.relative_to(tmp_path).parent.parent) for path in tmp_path.glob("*/*/checkpoints")}
    is_kept = {"failed": True, "one": keep, "two": keep, "earlier": keep or started_to_keep}
    assert left == {name for name in is_kept if is_kept[name]}
    seen = len(config.compare) * is_kept["earlier"] + is_kept["one"]
    assert (tmp_path / "two.log").read_text() == f"{seen}\n"
    assert sweep.is_done(config, earlier), "its results are kept"


def test_parallel_runs_share_the_cores(tmp_path, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    for jobs, shares in ((1, [cores]), (2, [cores[::2], cores[1::2] or cores]), (3, None)):
        out, started = tmp_path / str(jobs), tmp_path / f"started-{jobs}"
        started.mkdir()
        # Each run waits for the others. Otherwise a quick thread takes several.
        replace_trainer(
            monkeypatch,
            f"import os, pathlib, time; started, end = pathlib.Path({str(started)!r}), time.time() + 60\n"
            f"(started / str(os.getpid())).touch()\n"
            f"while len([*started.iterdir()]) < {jobs} and time.time() < end: time.sleep(0.01)\n"
            "print(sorted(os.sched_getaffinity(0)))",
        )
        sweep.train_all(TINY, [Trial(str(i), ON_CPU) for i in range(jobs)], out, jobs=jobs)
        found = [json.loads((out / f"{i}.log").read_text()) for i in range(jobs)]
        assert all(found) and {core for share in found for core in share} == {*cores}
        assert shares is None or sorted(found) == sorted(shares)  # either thread may take the first run
    assert sorted(os.sched_getaffinity(0)) == cores


def test_a_signal_is_forwarded_to_the_runs(tmp_path, monkeypatch):
    """The runs save. The sweep reports the signal."""
    saves = (
        "import signal, time\ntry: print('began', flush=True), time.sleep(60)\nexcept KeyboardInterrupt: print('saved')"
    )
    replace_trainer(monkeypatch, saves)

    def interrupt():
        logs = [tmp_path / name for name in ("one.log", "two.log")]
        while not all(log.exists() and "began" in log.read_text() for log in logs):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(sweep.SweepStopped, match="SIGTERM") as stop:
        sweep.train_all(TINY, [Trial("one", ON_CPU), Trial("two", ON_CPU)], tmp_path, jobs=2)
    assert stop.value.status == 128 + signal.SIGTERM
    assert all((tmp_path / name).read_text().endswith("saved\n") for name in ("one.log", "two.log"))


@pytest.mark.parametrize("words", [["--time-limit", "nan"], ["--time-limit", "9", "--run-time", "-1"]])
def test_invalid_times(words):
    parser = argparse.ArgumentParser()
    sweep.add_time_limit_arguments(parser)
    with pytest.raises(ValueError, match=f"{words[-2]} must be at least 0 seconds, got {words[-1]}"):
        sweep.limit_of(parser.parse_args(words))


def test_a_time_limit_stops_the_runs_and_starts_none_that_it_is_too_short_for(tmp_path, monkeypatch):
    """The runs save. The sweep says how many are not finished."""
    saves = "import time\ntry: print('began', flush=True), time.sleep(60)\nexcept KeyboardInterrupt: print('saved')"
    commands = replace_trainer(monkeypatch, saves)
    trials = [Trial("one", ()), Trial("two", ())]
    began = time.monotonic()
    with pytest.raises(sweep.SweepStopped, match=r"2 of 2 runs are not finished\.") as stop:
        sweep.train_all(TINY, trials, tmp_path, limit=sweep.TimeLimit(began + 1.0))
    assert stop.value.status == sweep.UNFINISHED and time.monotonic() < began + 30
    assert (tmp_path / "one.log").read_text().endswith("saved\n") and len(commands) == 1
    with pytest.raises(sweep.SweepStopped, match="2 of 2 runs"):
        sweep.train_all(TINY, trials, tmp_path, limit=sweep.TimeLimit(time.monotonic() + 5, seconds_of_a_run=6))
    assert len(commands) == 1, "5 seconds are too short for a run of 6"
    for trial in trials:
        write_finished_run(tmp_path / trial.name, load_config(TINY))
    sweep.train_all(TINY, trials, tmp_path, limit=sweep.TimeLimit(began))


KILLED_SWEEP = """
import sys
from megatron_sb.experiments import sweep
rank = "import time\\ntry: print('began', flush=True), time.sleep(60)\\nexcept KeyboardInterrupt: print('saved')"
run = (
    "import sys\\nfrom megatron_sb.training.config import load_config\\n"
    "from megatron_sb.training.supervisor import start_ranks\\n"
    f"start_ranks(load_config(sys.argv[1]), [sys.executable, '-c', {rank!r}])"
)
sweep._command = lambda config_path, trial, folder: [sys.executable, "-c", run, config_path]
sweep.train_all(sys.argv[1], [sweep.Trial("one", ())], sweep.Path(sys.argv[2]))
"""


def test_runs_of_a_killed_sweep_save_and_exit(tmp_path):
    log = tmp_path / "one.log"

    def wait_for(word):
        deadline = time.monotonic() + 60
        while not (log.exists() and word in log.read_text()):
            assert time.monotonic() < deadline, word
            time.sleep(0.05)

    with subprocess.Popen([sys.executable, "-c", KILLED_SWEEP, TINY, str(tmp_path)]) as process:
        wait_for("began")
        process.kill()
    wait_for("saved")
    assert "SIGINT received; saving after this step" in log.read_text()


def test_an_experiment_continues_when_its_terminal_is_closed(monkeypatch):
    module = types.ModuleType("an_experiment", "Prints.")
    module.add_arguments = lambda parser: None
    module.run = lambda options: print("dropped", flush=True) or 3
    monkeypatch.setitem(sys.modules, "an_experiment", module)
    monkeypatch.setitem(experiments.EXPERIMENTS, "nothing", "an_experiment")
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        os.close(master)
        assert experiments.main(["nothing", "a.yaml"]) == 3


def test_the_command_passes_its_arguments(monkeypatch, capsys, tmp_path):
    got = {}
    module = types.ModuleType("an_experiment", "Shows 100% of nothing\nat all.\n\nMore.")
    module.add_arguments = lambda parser: parser.add_argument("--depth", type=int)
    module.run = lambda options: got.update(vars(options)) or 3
    monkeypatch.setitem(sys.modules, "an_experiment", module)
    monkeypatch.setitem(experiments.EXPERIMENTS, "nothing", "an_experiment")
    assert cli.main(["experiment", "nothing", "a/b.yaml", "--depth", "2", "--set", "seed=1", "--set", "name=x"]) == 3
    assert (got["config"], got["set"], got["depth"]) == ("a/b.yaml", ["seed=1", "name=x"], 2)
    assert sweep.output_folder(types.SimpleNamespace(**got)) == Path("runs/nothing-b")
    of_run = types.SimpleNamespace(out=None, experiment="nothing", config="runs/wide/config.yaml")
    assert sweep.output_folder(of_run) == Path("runs/nothing-wide")
    (tmp_path / "file").touch()
    for words, message in (
        (["a.yaml", "--out", str(tmp_path / "file")], f"--out .*{tmp_path / 'file'}"),
        (["a.yaml", "--out", ""], r"--out must be a folder, got ''\."),
        ([str(tmp_path)], f"CONFIG .*{tmp_path}"),
    ):
        assert cli.main(["experiment", "nothing", *words]) == 2
        assert re.search(message, capsys.readouterr().err)
    with pytest.raises(SystemExit):
        cli.main(["experiment", "--help"])
    assert "Shows 100% of nothing at all." in capsys.readouterr().out

    def stopped(options):
        raise sweep.SweepStopped("enough", 130)

    module.run = stopped
    assert cli.main(["experiment", "nothing", "a.yaml"]) == 130
    assert "megatron-sb experiment: enough" in capsys.readouterr().err


def test_the_device_counts_the_ranks(monkeypatch):
    """Visible devices that no rank uses are not counted."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Any GPU")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert [hardware("cuda", 2), hardware("cpu", 1)] == ["2 x Any GPU", f"{platform.machine()} CPU, 1 thread"]


def test_the_files_of_an_experiment(tmp_path, capsys):
    table = tables.to_markdown(DataFrame([["8", "0.50"]], columns=["pairs", "accuracy"]))
    header, alignment, row = table.splitlines()
    assert (cells_of(header), cells_of(row)) == (["pairs", "accuracy"], ["8", "0.50"])
    assert [(cell[0], cell[-1]) for cell in cells_of(alignment)] == [(":", "-"), ("-", ":")]
    figure, axes = pyplot.subplots()
    axes.plot([1, 2])
    tables.write_results(
        tmp_path / "out",
        {"accuracy": {"8": 0.5}, "nll": [float("nan"), (1.0, float("inf"))]},
        table,
        figure,
        "2 x Any GPU",
    )
    text = (tmp_path / "out" / "results.json").read_text()
    written = json.loads(text, parse_constant=pytest.fail)  # called for NaN and Infinity, which are not JSON
    assert written["nll"] == [None, [1.0, None]]  # of a model that has diverged
    assert written["accuracy"] == {"8": 0.5} and written["date"] > "2020" and written["device"] == "2 x Any GPU"
    assert (tmp_path / "out" / "table.md").read_text() == f"{table}\n{written['date']}, 2 x Any GPU\n"
    assert (tmp_path / "out" / "picture.png").read_bytes()[:4] == b"\x89PNG"
    assert table in capsys.readouterr().out
    assert len(list((tmp_path / "out").iterdir())) == 3
