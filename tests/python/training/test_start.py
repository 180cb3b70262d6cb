"""What a run does at its start and between its stages."""

import importlib.util
import itertools
import json
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from support.jobs import SMALL_JOB, metrics, run_command, train

from megatron_sb.training import loop, main, plots, report
from megatron_sb.training.checkpoint import Progress
from megatron_sb.training.config import load_config
from megatron_sb.training.engine.engine import Engine
from megatron_sb.training.supervisor import EXIT_REFUSED


def test_the_engine_is_imported_without_flash_linear_attention(tmp_path):
    """It would take ten seconds. Another import finds the package afterwards. Garbage is not collected meanwhile."""
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise RuntimeError('imported')")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import gc\n"
        "from megatron_sb.training import loop\n"
        "collections = []\n"
        "gc.callbacks.append(lambda phase, info: collections.append(info))\n"
        "assert loop.import_engine().__name__ == 'Engine'\n"
        "gc.callbacks.clear()\n"
        "assert len(collections) <= 2 and gc.isenabled()\n"  # the start and the end of one, when they are enabled
        "try:\n"
        "    import fla\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    status, output, errors = run_command([sys.executable, "-c", script])
    assert (status, output) == (0, "imported\n"), errors


def test_a_rank_that_is_interrupted_while_it_starts_ends_without_a_traceback(tmp_path):
    """As with Ctrl-C in the first seconds: the supervisor forwards it to every rank."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL_JOB)
    script = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from megatron_sb.training import main\n"
        f"main({str(path)!r}, out={str(tmp_path / 'out')!r})\n"
    )
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert run_command([sys.executable, "-c", script], **rank) == (-signal.SIGINT, "", "")
    assert not (tmp_path / "out").exists()


def test_a_rank_needs_all_variables_of_torchrun(monkeypatch, tmp_path, capsys):
    """Some clusters set only RANK and WORLD_SIZE in every process."""
    (tmp_path / "small.yaml").write_text(SMALL_JOB)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert main(str(tmp_path / "small.yaml"), out=str(tmp_path / "out")) == EXIT_REFUSED
    assert "got RANK and WORLD_SIZE without LOCAL_RANK, MASTER_ADDR. Start the" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path, capsys):
    path = tmp_path / "small.yaml"
    assert main(str(path)) == EXIT_REFUSED
    assert capsys.readouterr().err == f"megatron-sb train: {path}: No such file or directory\n"


def test_a_refused_job_leaves_no_folder_of_its_own(tmp_path, monkeypatch):
    """Only rank 0 creates the folder of a run, before all ranks read the data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL_JOB)
    status, _, errors = train("small.yaml", "data.paths=[nowhere]")
    assert (status, [*(tmp_path / "runs").iterdir()]) == (EXIT_REFUSED, []), errors
    assert errors.startswith("megatron-sb train: small.yaml: data.paths must name files") and errors.count("\n") == 1


def test_a_missing_module_is_named_before_the_ranks_start(monkeypatch, tmp_path, capsys):
    """matplotlib was imported when the first stage had ended."""
    (tmp_path / "small.yaml").write_text(SMALL_JOB)
    find_spec = importlib.util.find_spec
    for missing in ("matplotlib", "megatron", "tensorboard"):

        def without(name, gone=missing):
            return None if name == gone else find_spec(name)

        monkeypatch.setattr(importlib.util, "find_spec", without)
        assert main(str(tmp_path / "small.yaml"), out=str(tmp_path / "out")) == EXIT_REFUSED
        assert f"the job needs the module {missing}, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


ONE_RANK = ["parallel.ranks=1", "report.tensorboard=false", "report.attention_interval=4", "evaluation.windows=2"]
STAGES = [
    f"{{name: {name}, context_length: 32, steps: {steps}, rows_per_step: 4, learning_rate: 1e-2}}"
    for name, steps in (("first", 6), ("second", 4))
]
ALIKE = [*ONE_RANK, f"stages=[{', '.join(STAGES)}]"]
DROPPED = "attention={dropped: {kind: softmax, dropped_in: second}}"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs a job of one rank in this process: (overrides, Engine or None) -> (its files, engines)."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL_JOB)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folders = (tmp_path / str(number) for number in itertools.count())

    def run(overrides, engine_class=None):
        built = []

        def build(*arguments):
            built.append((engine_class or Engine)(*arguments))
            return built[-1]

        monkeypatch.setattr(loop, "import_engine", lambda: build)
        config, out = load_config(path, overrides), next(folders)
        out.mkdir()
        loop.Job(config, out, torch.device("cpu"), report.Report(out, config, "a CPU")).run()
        return out, built

    yield run
    dist.destroy_process_group()


def test_plots_are_drawn_once_for_what_they_show(tmp_path, monkeypatch):
    """A short run ends with an evaluation, which draws them, and then draws them for its end."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL_JOB)
    config, drawn = load_config(path, ALIKE), []
    stage = config.stages[0]
    monkeypatch.setattr(plots, "draw_losses", lambda lines, labels, path: drawn.append(len(lines)))
    monkeypatch.setattr(plots, "draw_nll_by_length", lambda *arguments: None)
    written = report.Report(tmp_path, config, "a CPU")
    written.draw()
    written.start_stage("stick_breaking", stage, Progress("first", 0, 0, {}, {}))
    written.step("stick_breaking", stage, Progress("first", 1, 9, {}, {}), report.Step(1.0, 1.0, 1.0, 1.0, None))
    written.draw()
    written.draw()
    written.evaluation("stick_breaking", stage, 1, "none", [{"context": 16, "nll": 1.0, "standard_error": None}])
    written.draw()
    written.draw()
    written.close()
    assert drawn == [0, 1, 1]


def results(out):
    """Return the losses and the evaluations of a run."""
    written = {path.name: json.loads(path.read_text()) for path in (out / "evaluation").iterdir()}
    return [line["loss"] for line in metrics(out)], written


@pytest.mark.parametrize("model", ["stick_breaking", "softmax_rope"])
def test_stages_alike_share_an_engine(model, run):
    """The results are those of a second engine that loads the checkpoint of the first."""

    class NeverFits(Engine):
        def fits(self, stage):
            return False

    out, built = run([*ALIKE, f"compare=[{model}]"])
    other, built_anew = run([*ALIKE, f"compare=[{model}]"], NeverFits)
    assert (len(built), len(built_anew)) == (1, 2)
    assert results(out) == results(other) and len(results(out)[0]) == 10


@pytest.mark.parametrize(
    "overrides",
    [
        ["compare=[dropped]", DROPPED],
        ["compare=[stick_breaking]", "stages.1.context_length=64"],
        ["compare=[stick_breaking, softmax_rope]", "attention={softmax_rope: {}}"],
    ],
)
def test_other_models_and_lengths_need_an_engine_of_their_own(overrides, run):
    _, built = run([*ALIKE, *overrides])
    assert len(built) == 2


@pytest.mark.parametrize(
    ("overrides", "interval", "expected"),
    [
        (["compare=[stick_breaking]"], 100, set()),
        (["compare=[stick_breaking]"], 4, {"latest", "first-000004", "second-000004"}),
        (["compare=[dropped]", DROPPED], 100, {"latest", "first-000006"}),
    ],
)
def test_ends_of_stages_are_saved_only_where_they_are_needed(overrides, interval, expected, run):
    """The second stage of DroPE has another model, which loads the checkpoint."""
    options = [*ALIKE, *overrides, f"checkpoint.interval={interval}"]
    out, _ = run([*options, "checkpoint.stage_ends=false"])
    assert {path.name for path in out.glob("*/checkpoints/*")} == expected
    saved, _ = run(options)
    assert {path.name for path in saved.glob("*/checkpoints/*")} >= {"latest", "first-000006", "second-000004"}
    assert results(out) == results(saved)
