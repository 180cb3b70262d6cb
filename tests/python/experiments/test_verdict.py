"""The verdict: which runs follow from which results, the tables, and the command with real runs."""

import argparse
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from support.markdown import tables_of
from support.sweeps import forked_runs

from megatron_sb import cli
from megatron_sb.experiments import sweep, verdict, verdict_tables
from megatron_sb.experiments.verdict import Verdict, family_of
from megatron_sb.training.config import StickBreakingAttentionConfig, load_config, to_yaml

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = str(CONFIGS / "verdict_small.yaml")
RECALL = str(CONFIGS / "mqrar_small.yaml")
SPEEDS = {"stick_breaking": 900, "stick_breaking_both": 700, "softmax_rope": 1000, "softmax_drope": 995}


def options_of(*words):
    parser = argparse.ArgumentParser()
    verdict.add_arguments(parser)
    return argparse.Namespace(config=SMALL, set=[], **vars(parser.parse_args(words)))


class Trainer:
    """Writes what a run would have measured. likelihood: (config, model) -> nats per token at the trained length."""

    def __init__(self, likelihood):
        self.likelihood, self.trained = likelihood, []

    def __call__(self, path, trials, out, jobs=1, limit=sweep.NO_LIMIT, keep_checkpoints=True):
        self.keep_checkpoints = keep_checkpoints
        for trial in trials:
            config, folder = load_config(path, trial.overrides), out / trial.name
            if sweep.is_done(config, folder):
                continue
            self.trained.append((trial.name, jobs))
            (folder / "evaluation").mkdir(parents=True)
            (folder / "config.yaml").write_text(to_yaml(config))
            lines = [
                {
                    "model": model,
                    "stage": stage,
                    "step": step,
                    "tokens_per_second": SPEEDS.get(model, 800) if late else 1,
                }
                for model in config.compare
                for stage in ("constant", "decayed")
                for step in range(1, 31)
                for late in [stage == "constant" and step > verdict.SPEED_WARM_UP]
            ]
            for line in (line for line in lines[9::10] if line["model"].startswith("stick")):
                line |= {"tokens": 1e6 * line["step"], "loss": 2.0, "remainder_by_layer": [0.25, 0.1234]}
                line["skipped_tiles_by_layer"] = [line["step"] / 100, 0.5]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            for model in config.compare:
                for scaling in config.evaluated_scalings(model):
                    entry = self.evaluation(config, model) | {"model": model, "scaling": scaling}
                    sweep.evaluation_path(folder, config, model, scaling).write_text(json.dumps(entry))

    def evaluation(self, config, model):
        stage = config.stages[-1]
        if config.data.kind == "recall":
            accuracy = 0.5 if model == "stick_breaking" else 0.25
            rate = config.stages[0].learning_rate
            results = [{"context": 192, "nll": 1.0, "accuracy": accuracy + rate, "accuracy_standard_error": 0.01}]
        else:
            results = [
                {"context": length, "nll": self.likelihood(config, model), "standard_error": 0.125, "windows": 8}
                for length in config.evaluation_lengths(stage)
            ]
        return {"stage": stage.name, "trained_context": stage.context_length, "device": "a GPU", "results": results}


def best_at_twice_the_rate(config, model):
    """RoPE is best at 0.01, sticks at 0.005. The more steps, the better."""
    rate = config.stages[0].learning_rate
    of_models = {"stick_breaking": 2.0, "stick_breaking_both": 1.5, "softmax_rope": 1.75, "softmax_drope": 1.8}
    best = 0.01 if model.startswith("softmax") else 0.005
    return of_models.get(model, 3.0) + abs(rate - best) + 1 / config.stages[0].steps + config.seed / 1e6


ARMS = ["--arms", *SPEEDS, "--learning-rates", "0.005", "0.01", "--seeds", "3"]


@pytest.fixture
def trainer(monkeypatch):
    trainer = Trainer(best_at_twice_the_rate)
    monkeypatch.setattr(sweep, "train_all", trainer)
    return trainer


def test_runs_follow_from_results(trainer, tmp_path):
    experiment = Verdict(options_of(*ARMS, "--recall", RECALL), tmp_path)
    experiment.train(3, sweep.NO_LIMIT)
    names = [name for name, _ in trainer.trained]
    assert trainer.trained[:4] == [(f"speed-{arm}", 1) for arm in SPEEDS]
    assert all(jobs == 3 for _, jobs in trainer.trained[4:])
    assert names[4:12] == [f"rate{rate}-{arm}" for arm in SPEEDS for rate in ("0.005", "0.01")]
    assert {name for name in names if name.startswith("final")} == {f"final-{arm}" for arm in SPEEDS}
    slow = ("stick_breaking", "stick_breaking_both")
    assert {name for name in names if name.startswith("seconds")} == {f"seconds-{arm}" for arm in slow}
    best = ("stick_breaking_both", "softmax_rope")  # DroPE is a variant of RoPE
    assert {name for name in names if name.startswith("seed")} == {f"seed{n}-{arm}" for n in (1, 2) for arm in best}
    recalled = ("stick_breaking", "stick_breaking_both", "softmax_rope")  # DroPE has no second stage there
    assert {name for name in names if name.startswith("recall")} == {
        f"recall{rate}-{arm}" for arm in recalled for rate in ("0.005", "0.01")
    }
    assert len(names) == len(set(names))
    Verdict(options_of(*ARMS, "--recall", RECALL), tmp_path).train(3, sweep.NO_LIMIT)
    assert len(trainer.trained) == len(names), "finished runs are not repeated"


def test_budgets(trainer, tmp_path):
    """A fifth of the steps for the learning rates, all of them in the end, fewer for a slow arm in equal time."""
    experiment = Verdict(options_of(*ARMS), tmp_path)
    experiment.train(1, sweep.NO_LIMIT)
    runs = {run.trial.name: run.config for run in experiment.known_runs()}

    def described(name):
        config = runs[name]
        steps = tuple(stage.steps for stage in config.stages)
        return steps, {stage.learning_rate for stage in config.stages}, config.seed, config.evaluation.length_factor

    assert described("rate0.005-softmax_rope") == ((8, 2), {0.005}, 1234, 1)
    assert described("final-softmax_rope") == ((40, 10), {0.01}, 1234, 32)
    assert described("final-stick_breaking") == ((40, 10), {0.005}, 1234, 32)
    assert described("seed2-stick_breaking_both") == ((40, 10), {0.005}, 1236, 32)
    assert described("seconds-stick_breaking") == ((36, 9), {0.005}, 1234, 32)
    assert described("seconds-stick_breaking_both") == ((28, 7), {0.005}, 1234, 32)
    for arm in SPEEDS:
        config = runs[f"final-{arm}"]
        assert (config.data, config.model, config.seed) == (experiment.config.data, experiment.config.model, 1234)


def test_speeds_are_measured_with_larger_steps(trainer, tmp_path):
    """The host, which is busy for a time that does not grow with the rows, must not decide which arm is fast."""
    experiment = Verdict(options_of(*ARMS), tmp_path)
    experiment.train(1, sweep.NO_LIMIT)
    speed = load_config(tmp_path / "speed-stick_breaking" / "config.yaml")
    assert speed.compare == ("stick_breaking",)
    assert [stage.rows_per_step for stage in speed.stages] == [32, 8] and speed.evaluation.windows == 1
    assert experiment.results()["speeds"] == SPEEDS


def test_default_rates_are_those_of_each_configuration(tmp_path):
    experiment = Verdict(options_of("--recall", RECALL), tmp_path)
    first = experiment.config.stages[0].learning_rate
    recall = load_config(RECALL).stages[0].learning_rate
    assert first != recall
    assert experiment.rates == (first / 2, first, 2 * first, 4 * first)
    assert experiment.recall_rates == (recall / 2, recall, 2 * recall, 4 * recall)
    assert {run.value for run in experiment.known_runs() if run.kind == "recall"} == {*experiment.recall_rates}


def test_tables(trainer, tmp_path):
    assert cli.main(["experiment", "verdict", SMALL, "--out", str(tmp_path), *ARMS, "--recall", RECALL]) == 0
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("24 of 24 known runs are finished.")
    sections = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", text))
    tokens = {row[0]: row for row in tables_of(sections["Equal tokens"])[0]}
    assert tokens["attention"] == ["attention", "rate", "tokens", *(str(32 * 2**i) for i in range(7))]
    assert tokens["stick-breaking"][1:4] == ["0.005", "0.0256 M", "2.026 ± 0.125"]
    assert list(tokens)[1:] == [
        "stick-breaking",
        "stick_breaking_both",
        "softmax + RoPE",
        "softmax + RoPE, YaRN",
        "softmax_drope",
    ]
    seconds = {row[0]: row for row in tables_of(sections["Equal GPU seconds"])[0]}
    assert seconds["stick_breaking_both"][1:4] == ["700", "0.0179 M", "1.537 ± 0.125"]
    assert seconds["softmax + RoPE"][1:4] == ["1,000", "0.0256 M", "1.776 ± 0.125"], "the fastest needs no other run"
    seeds = {row[0]: row for row in tables_of(sections["Seeds"])[0]}
    assert seeds["rope"][:3] == ["rope", "softmax + RoPE", "3"] and seeds["stick-breaking"][1] == "stick_breaking_both"
    header, *sticks = tables_of(sections["Sticks by layer"])[0]
    assert header == ["attention", "tokens", "loss", "tiles skipped", "mass that remains"]
    steps = ((10, "10 M"), (20, "20 M"), (30, "30 M"))
    expected = [["stick-breaking", tokens, "2.000", f"{step} 50", "25 12"] for step, tokens in steps]
    assert sticks[:3] == expected
    assert {row[0] for row in sticks} == {"stick-breaking", "stick_breaking_both"}
    recall = {row[0]: row for row in tables_of(sections["Associative recall"])[0]}
    assert recall["stick-breaking"] == ["stick-breaking", "0.01", "51.0% ± 1.0%"]
    rates = {row[0]: row for row in tables_of(sections["Learning rates"])[0]}
    assert rates["softmax_drope"] == ["softmax_drope", "1.931", "1.926"]
    assert "Not run yet." in sections["RULER"] and "Not run yet." in sections["By position"]
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == {"finished": 24, "known": 24}


@pytest.mark.parametrize(("steps", "shown"), [([], []), ([5], [5]), ([5, 10], [5, 10]), ([1, 2, 3, 4, 5], [1, 2, 5])])
def test_a_step_with_measured_sticks_has_one_row(steps, shown):
    lines = [
        {"tokens": 1e6 * step, "loss": 2.0, "remainder_by_layer": [0.5], "skipped_tiles_by_layer": [0.5]}
        for step in steps
    ]
    table = verdict_tables.sticks_by_layer({"finals": [{"arm": "a", "attention": lines}]}, {"a": "a"})
    assert ([] if table is None else table["tokens"].tolist()) == [f"{step} M" for step in shown]


@pytest.mark.parametrize(("error", "cell"), [(0.06, "75.0% ± 3.4% (50.0%)"), (None, "75.0% (50.0%)")])
def test_the_error_over_tasks_needs_that_of_each_task(error, cell):
    """One sample of a task has no error. The mean has none then, instead of a smaller one."""
    tasks = {
        "one": {"accuracy": 1.0, "standard_error": error, "bytes": 0.75},
        "two": {"accuracy": 0.5, "standard_error": 0.0316, "bytes": 0.25},
    }
    evaluation = {"model": "a", "scaling": "none", "results": [{"context": 1024, "ruler": tasks}]}
    table = verdict_tables.ruler({"finals": [{"evaluations": [evaluation]}]}, {"a": "a"})
    assert table.to_dict("records") == [{"attention": "a", "1024": cell}]


def test_a_best_rate_at_the_edge_is_named(trainer, tmp_path, capsys):
    """A better one may lie beyond. With three rates, the best one of RoPE lies within, and recall has best edges only.

    The command says so before the rate is used for longer runs, and the tables say so.
    """
    command = ["experiment", "verdict", SMALL, "--out", str(tmp_path), "--arms", "stick_breaking", "softmax_rope"]
    command += ["--learning-rates", "0.02", "0.01", "0.005", "--recall", RECALL]
    assert cli.main(command) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "was tried" in line]
    of_text = "stick-breaking: the best rate, 0.005, is the lowest that was tried."
    of_recall = [
        f"{label}: the best rate in associative recall, 0.02, is the highest that was tried."
        for label in ("stick-breaking", "softmax + RoPE")
    ]
    assert warnings == [f"megatron-sb experiment verdict: {text}" for text in (of_text, *of_recall)]
    text = (tmp_path / "table.md").read_text()
    sections = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", text))
    listed = {title: re.findall(r"(?m)^- (.*)", body) for title, body in sections.items()}
    assert {title: texts for title, texts in listed.items() if texts} == {
        "Associative recall": of_recall,
        "Learning rates": [of_text],
    }


@pytest.mark.parametrize("rates", [["0.005"], ["0.02", "0.03"]])
def test_one_rate_or_equal_ones_have_no_edge(rates, trainer, tmp_path):
    trainer.likelihood = lambda config, model: 2.0
    experiment = Verdict(options_of("--learning-rates", *rates, "--seeds", "1"), tmp_path)
    experiment.train(1, sweep.NO_LIMIT)
    assert experiment.rates_at_the_edge() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--rate-share", "0.5"],
            r"stages\.0\.steps must be 8, which .*rate0\.005-stick_breaking was started .* got 20",
        ),
        (["--set", "evaluation.windows=3"], r"evaluation\.windows must be .*, which .* was started with, got 3"),
    ],
)
def test_finished_runs_of_another_configuration_are_refused(words, message, trainer, tmp_path, capsys):
    """They are named before anything is trained, instead of being used as if they had the new options."""
    command = ["experiment", "verdict", SMALL, "--out", str(tmp_path), *ARMS]
    assert cli.main(command) == 0
    finished, table = len(trainer.trained), (tmp_path / "table.md").read_text()
    assert cli.main([*command, *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert len(trainer.trained) == finished and (tmp_path / "table.md").read_text() == table


def test_a_final_run_with_another_rate_is_refused(trainer, tmp_path):
    """A rate that is tried later can be better. The table would name it for a run that had the former best one."""
    arms = ["--arms", "softmax_rope", "--seeds", "1", "--learning-rates", "0.005"]
    Verdict(options_of(*arms), tmp_path).train(1, sweep.NO_LIMIT)
    later = Verdict(options_of(*arms, "0.01"), tmp_path)
    later.check_runs(1)
    with pytest.raises(ValueError, match=r"learning_rate must be 0\.005, which .*final-softmax_rope was .* got 0\.01"):
        later.train(1, sweep.NO_LIMIT)
    assert "rate0.01-softmax_rope" in [name for name, _ in trainer.trained]
    shutil.rmtree(tmp_path / "final-softmax_rope")
    later.train(1, sweep.NO_LIMIT)
    (final,) = later.results()["finals"]
    assert final["rate"] == 0.01 and trainer.trained[-1][0] == "final-softmax_rope"


def test_a_stop_writes_what_is_finished(trainer, tmp_path, monkeypatch):
    """The first call ends after the rates, the second one after one final run."""
    command = ["experiment", "verdict", SMALL, "--out", str(tmp_path), *ARMS]

    def until(last):
        def train_all(path, trials, out, jobs=1, limit=sweep.NO_LIMIT, keep_checkpoints=True):
            for trial in trials:
                trainer(path, [trial], out, jobs)
                if trial.name == last:
                    raise sweep.SweepStopped("enough", sweep.UNFINISHED)

        monkeypatch.setattr(sweep, "train_all", train_all)

    until("rate0.01-softmax_drope")
    assert cli.main(command) == sweep.UNFINISHED and not (tmp_path / "table.md").exists()
    until("final-stick_breaking")
    assert cli.main(command) == sweep.UNFINISHED
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("9 of 14 known runs") and text.count("Not run yet.") == 6
    monkeypatch.setattr(sweep, "train_all", trainer)
    assert cli.main(command) == 0 and "known runs are finished" in (tmp_path / "table.md").read_text()


def test_the_time_limit_reaches_the_runs(tmp_path, capsys):
    command = ["experiment", "verdict", SMALL, "--out", str(tmp_path), "--time-limit", "5", "--run-time", "10"]
    assert cli.main(command) == 75
    assert "11 of 11 runs are not finished" in capsys.readouterr().err and not list(tmp_path.glob("*.log"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms", "softmax_fire"], "--arms must name models of compare, .* got 'softmax_fire'"),
        (["--rate-share", "0"], "--rate-share must be above 0 and at most 1, got 0"),
        (["--seeds", "0"], "--seeds must be at least 1 .* got 0"),
        (["--learning-rates", "0.1", "0.10000001"], "--learning-rates must be numbers that differ in six digits"),
        (["--test-paths", "a/test"], "--test-paths needs data.kind = 'indexed', got 'text'"),
        (["--recall", SMALL], "--recall must be a configuration with data.kind 'recall'"),
    ],
)
def test_invalid_options(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Verdict(options_of(*words), tmp_path)


@pytest.mark.parametrize(
    ("words", "fields", "message"),
    [
        (["--rate-share", "0.02"], ["stages.0.schedule=power"], r"^run rate0\.005-stick_breaking: .*'power' con"),
        (["--recall", RECALL, "--learning-rates", "1e-3"], ["attention.stick_breaking.reach=[0.5, 9.0]"], None),
        (["--test-paths", "here/test", "here/tset"], ["data=DATA"], r"--test-paths must .* got 'here/tset': .*\.bin"),
        ([], ["evaluation.sentence_pairs=[pairs.jsonl]"], r"sentence_pairs must be files, got 'pairs\.jsonl'"),
        (["--jobs", "0"], [], "--jobs must be at least 1, got 0"),
    ],
)
def test_later_runs_are_checked_before_the_first_one(words, fields, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    for suffix in (".bin", ".idx"):
        Path(f"here/test{suffix}").touch()
    data = "{kind: indexed, paths: [train], validation_paths: [held-out], vocab_size: 257, end_of_document: 256}"
    options = options_of(*ARMS, *words)
    options.set, options.experiment = [field.replace("DATA", data) for field in fields], "verdict"
    options.out = str(tmp_path / "out")

    def first_run(*_, **__):
        raise RuntimeError("the first run")

    monkeypatch.setattr(sweep, "train_all", first_run)
    with pytest.raises(ValueError if message else RuntimeError, match=message or "the first run"):
        verdict.run(options)


def test_runs_are_compared_without_scaled_positions(tmp_path):
    options = options_of("--arms", "softmax_rope")
    options.set = ["attention.softmax_rope.evaluated_scalings=[yarn]"]
    with pytest.raises(ValueError, match=r"evaluated_scalings of softmax_rope must have the item none, got \['yarn'\]"):
        Verdict(options, tmp_path)


def test_only_final_runs_score_sentence_pairs(trainer, tmp_path):
    options = options_of(*ARMS)
    options.set = ["evaluation.sentence_pairs=[pairs.jsonl]"]
    experiment = Verdict(options, tmp_path)
    experiment.train(1, sweep.NO_LIMIT)
    pairs = {run.kind: run.config.evaluation.sentence_pairs for run in experiment.known_runs()}
    assert pairs.pop("rate") == () and set(pairs.values()) == {("pairs.jsonl",)}


@pytest.mark.parametrize("words", [[], ["--keep-checkpoints"]])
def test_checkpoints_are_kept_if_asked_for(words, trainer, tmp_path):
    experiment = Verdict(options_of(*ARMS, *words, "--recall", RECALL), tmp_path)
    experiment.train(1, sweep.NO_LIMIT)
    assert trainer.keep_checkpoints == bool(words)
    assert {run.config.checkpoint.stage_ends for run in experiment.known_runs()} == {bool(words)}


def test_mixed_layers_are_a_family_without_recall(trainer, tmp_path):
    """The configuration of recall has no entries for the layers."""
    options = options_of("--arms", "stick_breaking", "hybrid", "--recall", RECALL)
    options.set = ["attention.hybrid={kind: mixed, layers: [stick_breaking, softmax_rope]}"]
    options.set += ["compare=[stick_breaking, hybrid]"]
    experiment = Verdict(options, tmp_path)
    experiment.train(1, sweep.NO_LIMIT)
    arms = {kind: {run.arm for run in experiment.known_runs() if run.kind == kind} for kind in ("rate", "recall")}
    assert arms == {"rate": {"stick_breaking", "hybrid"}, "recall": {"stick_breaking"}}
    assert family_of(experiment.config.attention["hybrid"]) == "mixed"


def test_an_arm_can_have_a_name_that_yaml_reads_as_false(trainer, tmp_path):
    options = options_of("--arms", "off", "--recall", RECALL)
    options.set = ["attention={'off': {kind: softmax, position: none}}", "compare=['off']"]
    experiment = Verdict(options, tmp_path)
    experiment.train(1, sweep.NO_LIMIT)
    assert {run.config.compare for run in experiment.known_runs()} == {("off",)}


def test_both_configurations_have_the_same_arms():
    """But for the arms with gated delta nets, which need a GPU."""
    full, small = (load_config(CONFIGS / f"{name}.yaml") for name in ("verdict", "verdict_small"))
    assert full.compare == (*small.compare, "delta_net_and_nope", "delta_net_and_reach")
    for arm in small.compare:
        one, other = full.attention[arm], small.attention[arm]
        if not isinstance(one, StickBreakingAttentionConfig):
            one, other = (dataclasses.replace(each, window=None, global_interval=None) for each in (one, other))
        elif one.scale is not None:  # relative to that of dot products
            one, other = (
                dataclasses.replace(each, scale=each.scale * config.model.head_dim**0.5)
                for each, config in ((one, full), (other, small))
            )
        assert one == other
    families = {family_of(full.attention[arm]) for arm in full.compare}
    assert {"stick-breaking", "rope", "alibi", "windows", "mixed"} <= families
    assert full.evaluation_lengths(full.stages[-1])[-1] == 32 * 1024
    assert full.data.ruler_lengths(full, full.stages[-1]) == [1024 * factor for factor in (1, 2, 4, 8, 16)]
    assert full.stages[0].steps + full.stages[1].steps == 5 * full.stages[1].steps


def test_the_learning_rate_is_not_chosen_with_the_test_documents(trainer, tmp_path):
    options = options_of(*ARMS, "--test-paths", "a/test", "b/test")
    options.config = str(CONFIGS / "verdict.yaml")
    experiment = Verdict(options, tmp_path)
    experiment.train(1, sweep.NO_LIMIT)
    for run in experiment.known_runs():
        chosen = ("runs/corpus/bytes/validation",) if run.kind == "rate" else ("a/test", "b/test")
        assert run.config.data.validation_paths == chosen, run.trial.name
    kinds = {run.kind for run in experiment.known_runs()}
    assert kinds == {"rate", "final", "seconds", "seed"}


TINY = ["model.hidden_size=16", "model.ffn_hidden_size=16", "stages.0.steps=5", "stages.0.warmup_steps=1"]
TINY += ["stages.1.steps=2", "stages.0.rows_per_step=2", "stages.1.rows_per_step=2", "evaluation.windows=2"]
TINY += ["evaluation.length_factor=2", "compare=[stick_breaking, softmax_drope]"]


def test_the_command(tmp_path):
    """Real runs: every arm is trained, and DroPE drops its positions before the last stage."""
    pairs = tmp_path.with_suffix(".jsonl")
    pairs.write_text('{"sentence_good": "It runs.", "sentence_bad": "It run."}\n' * 2)
    tiny = [*TINY, f"evaluation.sentence_pairs=[{pairs}]"]
    overrides = [word for override in tiny for word in ("--set", override)]
    command = ["experiment", "verdict", SMALL, "--out", str(tmp_path), *overrides, "--learning-rates", "0.01"]
    with forked_runs():
        assert cli.main([*command, "--seeds", "1", "--rate-share", "0.5"]) == 0
    assert not list(tmp_path.glob("*/*/checkpoints")) and len(list(tmp_path.glob("*/config.yaml"))) >= 5
    results = json.loads((tmp_path / "results.json").read_text())
    assert [final["arm"] for final in results["finals"]] == ["stick_breaking", "softmax_drope"]
    assert all(speed > 0 for speed in results["speeds"].values()) and len(results["speeds"]) == 2
    evaluated = {path.name.split(".")[1] for path in tmp_path.glob("*/evaluation/*.json")}
    assert evaluated == {"decayed"}, "no table has the likelihood before the rate decays"
    positions = results["finals"][0]["evaluations"][0]["results"][1]["by_position"]
    assert [(place["begin"], place["end"]) for place in positions] == [(0, 16), (16, 32), (32, 64)]
    for final in results["finals"]:
        score = final["evaluations"][0]["results"][1]["sentence_pairs"]
        assert score["accuracy"] in (0, 1) and score["pairs"] == 2
    assert (tmp_path / "picture.png").stat().st_size > 1000
    with forked_runs():
        assert cli.main([*command, "--seeds", "1", "--rate-share", "0.5"]) == 0
