"""Jobs with report.wandb, and a fake wandb that records its calls."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support import fake_wandb
from support.fork_server import run_python
from support.jobs import FORKED_TRAIN, SMALL_JOB, TIMEOUT_SECONDS, metrics
from support.messages import mentions

MODELS = ("stick_breaking", "softmax_rope")
STEPS = {"short": 4, "extended": 3}
JOB = ["parallel.ranks=1", "report={wandb: attention, tensorboard: false, attention_interval: 2}"]
JOB += [f"stages.{index}.{field}" for index in (0, 1) for field in ("context_parallel_size=1", "warmup_steps=1")]
JOB += [f"stages.{index}.steps={steps}" for index, steps in enumerate(STEPS.values())]
JOB += ["evaluation={windows: 1, target_tokens: 16, length_factor: 1}", "attention={softmax_rope: {}}"]
# The trainer with forked ranks, which finds the fake wandb in a folder.
TRAIN_WITH_FAKE = """
import runpy
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[:2] = []
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Jobs:
    """Run jobs in a folder, with a module `wandb`."""

    def __init__(self, folder: Path) -> None:
        self.out, self._config, self._calls = folder / "out", folder / "small.yaml", folder / "calls"
        self._script, self._modules = folder / "train.py", folder / "modules"
        self._config.write_text(SMALL_JOB)
        self._script.write_text(TRAIN_WITH_FAKE)
        self._modules.mkdir()
        shutil.copy(fake_wandb.__file__, self._modules / "wandb.py")

    def replace_module(self, text):
        (self._modules / "wandb.py").write_text(text)

    def train(self, *arguments, **environment):
        """Return the status and the standard error."""
        script, module = FORKED_TRAIN
        command = [self._script, self._modules, script, module, self._config, *JOB, *arguments, "--out", self.out]
        environment["FAKE_WANDB_CALLS"] = str(self._calls)
        done = run_python(command, seconds=TIMEOUT_SECONDS, environment=environment)
        return done.returncode, done.stderr

    def calls(self, *names):
        """Return the recorded calls of some functions, or of all."""
        recorded = [json.loads(line) for line in self._calls.read_text().splitlines()]
        return [call for call in recorded if not names or call["call"] in names]


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path)


def values_by_step(jobs, model):
    """Return what wandb shows for a model: the values of each step. It merges the calls of one step."""
    (identity,) = {call["id"] for call in jobs.calls("init") if call["config"]["trained_model"] == model}
    shown, last = {}, -1
    for call in jobs.calls("log"):
        if call["id"] == identity:
            assert call["step"] >= last, "wandb ignores this call"
            last = call["step"]
            shown.setdefault(last, {}).update(call["data"])
    return shown


def assert_all_is_logged(jobs, model, steps_of_evaluations):
    shown, before = values_by_step(jobs, model), {"short": 0, "extended": STEPS["short"]}
    lines = [line for line in metrics(jobs.out) if line["model"] == model]
    assert len(lines) == sum(STEPS.values())
    for line in lines:
        values = shown[before[line["stage"]] + line["step"]]
        for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_second", "model_tflops"):
            assert values[f"{line['stage']}/{name}"] == line[name]
        if line["mean_remainder"] is not None:
            assert values[f"{line['stage']}/mean_remainder"] == line["mean_remainder"]
    for stage, step in steps_of_evaluations.items():
        results = json.loads((jobs.out / "evaluation" / f"{model}.{stage}.json").read_text())["results"]
        for result in results:
            assert shown[step][f"{stage}/nll_at_{result['context']}"] == result["nll"]


def test_each_model_has_a_run(jobs):
    status, errors = jobs.train()
    assert status == 0, errors
    first, second = jobs.calls("init")
    assert first["id"] != second["id"]
    for call, model in zip((first, second), MODELS, strict=True):
        assert (call["project"], call["name"], call["resume"]) == ("attention", f"out {model}", "allow")
        assert call["dir"] == str(jobs.out) and call["config"]["trained_model"] == model
        assert call["config"]["model"]["num_layers"] == 2
        assert_all_is_logged(jobs, model, {"short": 4, "extended": 7})
    names = [(call["call"], call["id"]) for call in jobs.calls() if call["call"] != "log"]
    assert names == [(name, call["id"]) for call in (first, second) for name in ("init", "finish")]


@pytest.mark.parametrize(
    ("stopped_after", "evaluations"),
    [(1, {"short": 4, "extended": 7}), (4, {"short": 5, "extended": 7}), (6, {"short": 4, "extended": 8})],
    ids=["at step 2", "in the evaluation of step 4", "at the last step, before its evaluation"],
)
def test_a_resumed_job_continues_its_run(jobs, stopped_after, evaluations):
    """An evaluation that the first job did not finish is logged with the next step."""
    compare = "compare=[stick_breaking]"
    status, errors = jobs.train(compare, FAKE_WANDB_STOP_AT=str(stopped_after))
    assert status == 130, errors
    assert [call["call"] for call in jobs.calls("init", "finish")] == ["init", "finish"]
    status, errors = jobs.train(compare, "--resume")
    assert status == 0, errors
    first, second = jobs.calls("init")
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert_all_is_logged(jobs, "stick_breaking", evaluations)


def test_a_job_that_lost_steps_logs_them_again(jobs):
    """wandb has steps after the newest checkpoint, and keeps their first values."""
    compare = "compare=[stick_breaking]"
    assert jobs.train(compare, FAKE_WANDB_STOP_AT="6")[0] == 130
    (jobs.out / "stick_breaking" / "checkpoints" / "latest").write_text("short-000004")
    status, errors = jobs.train(compare, "--resume")
    assert status == 0, errors
    assert sorted(values_by_step(jobs, "stick_breaking")) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("text", ["raise ModuleNotFoundError(\"No module named 'wandb'\")", ""], ids=["none", "folder"])
def test_without_wandb_no_job_starts(jobs, text):
    jobs.replace_module(text)
    status, errors = jobs.train("parallel.ranks=2")
    assert status == 2
    (line,) = errors.splitlines()
    assert re.search(mentions("report.wandb 'attention' pip install wandb"), line)
    assert not (jobs.out / "config.yaml").exists()


def test_an_error_of_wandb_ends_the_job_with_its_text(jobs):
    status, errors = jobs.train(FAKE_WANDB_ERROR="No API key configured.")
    assert status == 1 and "Traceback" not in errors
    assert "report.wandb = 'attention': wandb cannot start a run: No API key configured." in errors
    assert not metrics(jobs.out)
