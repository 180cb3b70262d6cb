"""Associative recall as a user runs it: trained, not trained again, its table."""

import json
from pathlib import Path

import pytest

from megatron_sb import cli
from megatron_sb.experiments import mqrar

SMALL = str(Path(__file__).parents[3] / "configs" / "mqrar_small.yaml")
# Learned in two seconds: the current value of two keys out of two.
TINY = ["data.num_keys=2", "data.num_values=4", "model.hidden_size=32", "model.init_std=0.18"]
TINY += ["model.ffn_hidden_size=64", "stages.0.context_length=16", "stages.0.steps=120", "stages.0.rows_per_step=32"]
TINY += ["stages.0.warmup_steps=5", "evaluation.windows=64", "evaluation.target_tokens=8", "compare=[stick_breaking]"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A finished sweep over one point."""
    folder = tmp_path_factory.mktemp("mqrar") / "out"
    overrides = [word for override in TINY for word in ("--set", override)]
    command = ["experiment", "mqrar", SMALL, "--pairs", "2", "--learning-rates", "2e-2", "--out", str(folder)]
    assert cli.main([*command, *overrides]) == 0
    return folder, [*command, *overrides]


def test_learns_to_recall(out, capsys):
    folder, command = out
    (run,) = json.loads((folder / "results.json").read_text())["runs"]
    assert (run["model"], run["num_pairs"], run["learning_rate"]) == ("stick_breaking", 2, 0.02)
    assert run["accuracy"] > 0.6, "a guess is right 0.25 of the time"
    assert f"| 2 | {run['accuracy']:.1%} | 0.02 |" in (folder / "table.md").read_text()
    before = (folder / "pairs2-rate0.02" / "metrics.jsonl").stat().st_mtime_ns
    assert cli.main(command) == 0  # nothing is trained again
    assert (folder / "pairs2-rate0.02" / "metrics.jsonl").stat().st_mtime_ns == before
    assert "| 2 |" in capsys.readouterr().out


def test_the_best_learning_rate_counts():
    found = [
        {"model": "a", "num_pairs": pairs, "learning_rate": rate, "accuracy": accuracy}
        for pairs, rate, accuracy in ((2, 0.1, 0.3), (2, 0.2, 0.5), (4, 0.1, 0.2), (4, 0.2, 0.1))
    ]
    assert [mqrar.best_of(found, "a", pairs)["learning_rate"] for pairs in (2, 4)] == [0.2, 0.1]


def test_other_data_is_refused(capsys):
    tiny = str(Path(SMALL).with_name("tiny_context_extension.yaml"))
    assert cli.main(["experiment", "mqrar", tiny]) == 2
    assert "data.kind is 'text'; mqrar needs 'recall'" in capsys.readouterr().err
