"""The swap of attention: the runs and their stages, the tables, and the command with real runs."""

import argparse
import json
import re
import sysconfig
from pathlib import Path

import pytest
from support.markdown import tables_of
from support.sweeps import forked_runs

from megatron_sb import cli
from megatron_sb.experiments import swap, sweep
from megatron_sb.experiments.swap import Swap
from megatron_sb.training.config import SoftmaxAttentionConfig, load_config, to_yaml

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = str(CONFIGS / "swap_small.yaml")


def options_of(*words, overrides=(), config=SMALL):
    parser = argparse.ArgumentParser()
    swap.add_arguments(parser)
    return argparse.Namespace(config=config, set=[*overrides], **vars(parser.parse_args(words)))


class Trainer:
    """Writes what a run would have measured: the better, the more tokens, and with twice the rate."""

    def __init__(self):
        self.trained = []

    def __call__(self, path, trials, out, jobs=1, limit=sweep.NO_LIMIT, keep_checkpoints=True):
        for trial in trials:
            config, folder = load_config(path, trial.overrides), out / trial.name
            if sweep.is_done(config, folder):
                continue
            self.trained.append((trial.name, keep_checkpoints))
            (folder / "evaluation").mkdir(parents=True)
            (folder / "config.yaml").write_text(to_yaml(config))
            (model,), stage = config.compare, config.stages[-1]
            checkpoints = folder / model / "checkpoints"
            if keep_checkpoints:
                checkpoints.mkdir(parents=True)
                (checkpoints / "latest").write_text(f"{stage.name}-{stage.steps:06d}")
            nll = 2.0 + 1 / sum(each.steps for each in config.stages) + abs(stage.learning_rate - 0.01)
            results = [
                {"context": length, "nll": nll, "standard_error": 0.125, "windows": 8}
                for length in config.evaluation_lengths(stage)
            ]
            ruler = {task: {"accuracy": 0.5, "standard_error": 0.03, "bytes": 0.75} for task in ("one", "two")}
            results[-1]["ruler"] = ruler
            for scaling in config.evaluated_scalings(model):
                entry = {"model": model, "stage": stage.name, "trained_context": stage.context_length}
                entry |= {"scaling": scaling, "device": "a GPU", "results": results}
                sweep.evaluation_path(folder, config, model, scaling).write_text(json.dumps(entry))


@pytest.fixture
def trainer(monkeypatch):
    trainer = Trainer()
    monkeypatch.setattr(sweep, "train_all", trainer)
    return trainer


def test_runs_start_from_the_base(trainer, tmp_path):
    experiment = Swap(options_of(), tmp_path)
    assert experiment.known_runs() == [], "the base is not trained"
    experiment.train(1, sweep.NO_LIMIT)
    names = [name for name, _ in trainer.trained]
    sticks = [f"{recipe}-{arm}" for recipe in swap.RECIPES for arm in ("stick_breaking", "stick_breaking_reach")]
    expected = ["rope", "drope", *sticks[4:]]
    assert names == ["base", *(f"{name}-share{share}-rate1" for share in ("0.01", "0.05") for name in expected)]
    assert [keep for _, keep in trainer.trained] == [True] + [False] * 20
    runs = {run.trial.name: run.config for run in experiment.known_runs()}
    checkpoint = str(tmp_path / "base" / "softmax_rope" / "checkpoints" / "decayed-000100")
    assert {config.initial_checkpoint for config in runs.values()} == {checkpoint}
    for name, config in runs.items():
        base = experiment.config
        assert (config.seed, config.data, config.model) == (base.seed, base.data, base.model)
        distilled = name.startswith("layers") or "distilled" in name
        assert (config.teacher, config.is_distilled) == (("softmax_rope" if distilled else None), distilled)
        assert config.initial_attention == (None if "rope" in name else "softmax")
    assert runs["drope-share0.05-rate1"].attention["drope"] == SoftmaxAttentionConfig(position="none")
    Swap(options_of(), tmp_path).train(1, sweep.NO_LIMIT)
    assert len(trainer.trained) == 21, "finished runs are not repeated"


def test_stages(trainer, tmp_path):
    """A twentieth of the 500 steps; with two stages, two fifths of it layer by layer."""
    experiment = Swap(options_of("--shares", "0.05", "1e-4", "--rate-factors", "2"), tmp_path)
    experiment.train(1, sweep.NO_LIMIT)
    runs = {run.trial.name: run.config for run in experiment.known_runs()}

    def described(name):
        return [(stage.name, stage.loss, stage.steps, stage.warmup_steps) for stage in runs[name].stages]

    assert described("rope-share0.05-rate2") == [("recalibrated", "tokens", 25, 3)]
    assert described("whole_distilled-stick_breaking-share0.05-rate2") == [("recalibrated", "logits", 25, 3)]
    for recipe, loss in (("layers", "tokens"), ("layers_distilled", "logits")):
        expected = [("layers", "layers", 10, 1), ("recalibrated", loss, 15, 2)]
        assert described(f"{recipe}-stick_breaking-share0.05-rate2") == expected
        expected = [("layers", "layers", 1, 0), ("recalibrated", loss, 1, 0)]
        assert described(f"{recipe}-stick_breaking-share0.0001-rate2") == expected
    for stage in (stage for config in runs.values() for stage in config.stages):
        assert (stage.learning_rate, stage.schedule, stage.context_length) == (0.01, "exponential", 64)


def test_tables(trainer, tmp_path):
    words = ["--recipes", "rope", "layers", "--arms", "stick_breaking", "--rate-factors", "1", "2", "4"]
    assert cli.main(["experiment", "swap", SMALL, "--out", str(tmp_path), *words]) == 0
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("13 of 13 known runs are finished.")
    sections = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", text))
    header, *rows = tables_of(sections["Likelihood"])[0]
    about = ["recipe", "attention", "share", "rate", "tokens"]
    assert header == [*about, *(str(32 * 2**i) for i in range(7))]
    assert [row[:6] for row in rows] == [
        ["base", "softmax + RoPE", "1", "0.005", "0.256 M", "2.007 ± 0.125"],
        ["base", "softmax + RoPE, YaRN", "1", "0.005", "0.256 M", "2.007 ± 0.125"],
        ["rope", "softmax + RoPE", "0.01", "0.01", "0.00256 M", "2.200 ± 0.125"],
        ["rope", "softmax + RoPE, YaRN", "0.01", "0.01", "0.00256 M", "2.200 ± 0.125"],
        ["layers", "stick-breaking", "0.01", "0.01", "0.00256 M", "2.200 ± 0.125"],
        ["rope", "softmax + RoPE", "0.05", "0.01", "0.0128 M", "2.040 ± 0.125"],
        ["rope", "softmax + RoPE, YaRN", "0.05", "0.01", "0.0128 M", "2.040 ± 0.125"],
        ["layers", "stick-breaking", "0.05", "0.01", "0.0128 M", "2.040 ± 0.125"],
    ]
    assert tables_of(sections["RULER"])[0][0] == [*about, "2048"] and "50.0% ± 2.1% (75.0%)" in sections["RULER"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["factor"] for run in results["recalibrated"] if run["best"]] == [2.0] * 4


def test_a_stop_writes_what_is_finished(trainer, tmp_path, monkeypatch):
    command = ["experiment", "swap", SMALL, "--out", str(tmp_path), "--arms", "stick_breaking"]
    assert cli.main([*command, "--recipes", "rope", "--shares", "0.01"]) == 0

    def stop(*args, **kwargs):
        raise sweep.SweepStopped("enough", sweep.UNFINISHED)

    monkeypatch.setattr(sweep, "train_all", stop)
    assert cli.main(command) == sweep.UNFINISHED
    assert (tmp_path / "table.md").read_text().startswith("2 of 13 known runs are finished.")


MIXED = ["--recipes", "whole", "--arms", "hybrid"]
HYBRID = ["attention.near={kind: stick_breaking}", "attention.hybrid={kind: mixed, layers: [softmax_rope, near]}"]
HYBRID += ["parallel.device=auto"]
YARN_ONLY = "attention.softmax_rope.evaluated_scalings=[yarn]"


@pytest.mark.parametrize(
    ("words", "overrides", "message"),
    [
        (["--arms", "softmax_rope"], [], "--arms must name entries of attention of other kinds .* got 'softmax_rope'"),
        (["--shares", "0"], [], r"--shares must be above 0 and at most 1, got \[0.0\]"),
        (["--jobs", "0"], [], "--jobs must be at least 1, got 0"),
        (["--rate-factors", "0"], [], "--rate-factors must be above 0"),
        (["--rate-factors", "nan"], [], "--rate-factors must be above 0 and finite"),
        (["--rate-factors", "1", "1.0000001"], [], "--rate-factors must be numbers that differ in six digits"),
        (["--shares", "0.1", "0.10000001"], [], r"--shares must .* in six digits, got 0\.1 and 0\.10000001"),
        ([], ["parallel.ranks=2"], r"'logits' contradicts parallel\.ranks = 2"),
        ([], ["attention.stick_breaking.head_norm=true"], r"attention\.stick_breaking\.head_norm must be False"),
        (MIXED, [*HYBRID, "attention.near={kind: stick_breaking, forget_gate: true}"], "near.forget_gate must"),
        (MIXED, [*HYBRID, "attention.near={kind: softmax, position: fire}"], "near.position must be other than 'fire'"),
        (MIXED, [*HYBRID, "attention.near={kind: gated_delta_net}"], r"attention\.near\.kind must .*'gated_delta_net'"),
        (MIXED, [*HYBRID, YARN_ONLY], r"evaluated_scalings of hybrid must have the item none, got \['yarn'\]"),
        ([], [YARN_ONLY], r"evaluated_scalings of softmax_rope must have the item none, got \['yarn'\]"),
        (["--layers-share", "1"], [], "--layers-share must be between 0 and 1, got 1.0"),
        ([], ["compare=[stick_breaking]"], "compare must name one softmax model with rotary positions"),
        ([], ["evaluation.target_tokens=48"], "the context_length of stage decayed must be"),
    ],
)
def test_invalid_options(words, overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Swap(options_of(*words, overrides=overrides), tmp_path)


def test_softmax_recipes_need_no_arms(tmp_path):
    options = options_of("--recipes", "rope", "--arms", "nothing", overrides=["parallel.ranks=2"])
    assert Swap(options, tmp_path).known_runs() == []


def test_both_configurations_have_the_arms():
    for name in ("swap", "swap_small"):
        experiment = Swap(options_of(config=str(CONFIGS / f"{name}.yaml")), Path("unused"))
        assert experiment.config.evaluated_scalings("softmax_rope") == ("none", "yarn")
    full = load_config(CONFIGS / "swap.yaml")
    assert full.data.ruler_lengths(full, full.stages[-1]) == [1024 * factor for factor in (1, 2, 4, 8, 16)]


TINY = ["model.hidden_size=16", "model.ffn_hidden_size=16", "model.num_layers=2", "stages.0.steps=5"]
TINY += ["stages.0.warmup_steps=1", "stages.1.steps=3", "stages.0.rows_per_step=2", "stages.1.rows_per_step=2"]
TINY += ["evaluation.windows=2", "evaluation.length_factor=2"]
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
TINY += [f"data.paths={[str(_LIBRARY / name) for name in ('json', 'email')]}"]  # quickly read


def test_the_command(tmp_path):
    """Real runs. Only the base keeps checkpoints."""
    overrides = [word for override in TINY for word in ("--set", override)]
    command = ["experiment", "swap", SMALL, "--out", str(tmp_path), *overrides, "--shares", "0.5", "--jobs", "2"]
    command += ["--recipes", "drope", "layers_distilled", "--arms", "stick_breaking_reach"]
    with forked_runs():
        assert cli.main(command) == 0
    assert [path.parent.parent.name for path in tmp_path.glob("*/*/checkpoints")] == ["base"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["recipe"] for run in results["recalibrated"]] == ["drope", "layers_distilled"]
    assert {run["tokens"] for run in results["recalibrated"]} == {4 * 2 * 64}
    (path,) = tmp_path.glob("layers_distilled-stick_breaking_reach-share0.5-rate1/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["layers"] * 2 + ["recalibrated"] * 2
    assert all(0 < line["loss"] < 3 for line in lines), "the errors of layers, then small divergences"
    with forked_runs():
        assert cli.main(command) == 0
