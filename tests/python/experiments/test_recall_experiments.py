"""Associative recall: the sweep and its table, repeating a finished sweep, and the attention of the trained model."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.markdown import tables_of

from megatron_sb import cli
from megatron_sb.experiments import attention_picture, mqrar, sweep
from megatron_sb.megatron.statistics import AttentionInputs
from megatron_sb.training.config import load_config

SMALL = str(Path(__file__).parents[3] / "configs" / "mqrar_small.yaml")
# Two seconds of training on sequences with two keys.
TINY = ["data.num_keys=2", "data.num_values=4", "model.hidden_size=32", "model.init_std=0.18"]
TINY += ["model.ffn_hidden_size=64", "stages.0.context_length=16", "stages.0.steps=120", "stages.0.rows_per_step=32"]
TINY += [
    "stages.0.warmup_steps=5",
    "stages.0.schedule=exponential",
    "evaluation.windows=64",
    "compare=[stick_breaking]",
]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Run a sweep over one point, as users do: with a new process for the run. Return its folder and the command."""
    folder = tmp_path_factory.mktemp("mqrar") / "out"
    overrides = [word for override in TINY for word in ("--set", override)]
    command = ["experiment", "mqrar", SMALL, "--pairs", "2", "--learning-rates", "2e-2", "--out", str(folder)]
    assert cli.main([*command, *overrides]) == 0
    return folder, [*command, *overrides]


def test_the_model_learns_to_recall(out, capsys):
    folder, command = out
    (run,) = json.loads((folder / "results.json").read_text())["runs"]
    assert (run["model"], run["num_pairs"], run["learning_rate"]) == ("stick_breaking", 2, 0.02)
    assert run["accuracy"] > 0.6, "guessing is right 0.25 of the time"
    row = ["2", f"{run['accuracy']:.1%}", "0.02"]
    ((_, *rows),) = tables_of((folder / "table.md").read_text())
    assert rows == [row]
    before = (folder / "pairs2-rate0.02" / "metrics.jsonl").stat().st_mtime_ns
    assert cli.main(command) == 0  # a finished run is not repeated
    assert (folder / "pairs2-rate0.02" / "metrics.jsonl").stat().st_mtime_ns == before
    assert row in tables_of(capsys.readouterr().out)[0]


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        (["1e-3", "1.0000001e-3"], "--learning-rates must be numbers that differ in six digits, got 0.001 and 0.0010"),
        (["nan"], "stages.0.learning_rate must be a finite number, got 'nan'"),
    ],
)
def test_learning_rates_with_one_folder_or_none_are_an_error(rates, message, capsys, tmp_path):
    assert cli.main(["experiment", "mqrar", SMALL, "--out", str(tmp_path), "--learning-rates", *rates]) == 2
    assert message in capsys.readouterr().err


def test_the_attention_of_a_finished_run(out, tmp_path):
    """The trained model answers at least two of four questions, and one attention weight is large."""
    run = out[0] / "pairs2-rate0.02"
    command = ["experiment", "attention-picture", str(run / "config.yaml"), "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--sequence", "one 3 two 1 one 0 two 2 two 3 one 1"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["picture.png", "results.json", "table.md"]
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    queries = [(entry["position"], entry["key"], entry["right"]) for entry in written["queries"]]
    assert queries == [(4, "one", "3"), (6, "two", "1"), (8, "two", "2"), (10, "one", "0")]
    assert sum(entry["right"] == entry["answer"] for entry in written["queries"]) >= 2
    for name, head in written["attention"].items():
        rows = np.array(head)
        assert rows.shape == (12, 12) and (rows.sum(1) < 1.001).all() and (np.triu(rows) == 0).all(), name
    assert len(written["attention"]) == 2 and rows.max() > 0.5, "one weight is large"


def test_attention_weights_follow_the_definition():
    """Compare with a loop over keys that multiplies the remaining mass, for grouped heads."""
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(7, 4, 8, generator=generator), torch.randn(7, 2, 8, generator=generator)
    weights = attention_picture.attention_weights(AttentionInputs(query, key, 0.7, False))
    expected = np.zeros((4, 7, 7))
    for head in range(4):
        for row in range(7):
            mass = 1.0
            for at in range(row - 1, -1, -1):
                beta = 1 / (1 + math.exp(-0.7 * float(query[row, head].double() @ key[at, head // 2].double())))
                expected[head, row, at] = beta * mass
                mass *= 1 - beta
    np.testing.assert_allclose(weights, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ("A 1 B", "--sequence must .*got 3"),
        ("A 1 A 9", "--sequence must be from 0 to 7, got '9'"),
        ("A 1 A x", "--sequence must be from 0 to 7, got 'x'"),
        ("A 1 B 2", "--sequence must repeat a key, got 'A 1 B 2'"),
        ("A 1 B 2 C 3 D 1 E 1 F 1 G 1 H 1 I 1", "--sequence must .*data.num_keys = 8 .*got 9"),
    ],
)
def test_invalid_sequences(sequence, message):
    config = load_config(Path(SMALL).with_name("attention_picture.yaml"))
    with pytest.raises(ValueError, match=message):
        attention_picture.tokens_of(sequence.split(), config)


@pytest.mark.parametrize("model", ["softmax_rope", ""])
def test_other_models_are_an_error(model, capsys, monkeypatch):
    """An empty name, as of a shell's variable that is not set, chose the first model."""
    monkeypatch.setattr(sweep, "train_all", lambda *arguments: pytest.fail("nothing must be trained"))
    assert cli.main(["experiment", "attention-picture", SMALL, "--model", model]) == 2
    assert re.search(f"--model must be a stick-breaking model .*got '{model}'", capsys.readouterr().err)


def test_models_of_text_are_an_error(capsys):
    command = ["experiment", "attention-picture", str(Path(SMALL).with_name("tiny_context_extension.yaml"))]
    assert cli.main(command) == 2
    assert "data.kind must be 'recall' for attention-picture, got 'text'" in capsys.readouterr().err


def test_the_best_learning_rate_is_reported():
    results = [
        {"model": "a", "num_pairs": pairs, "learning_rate": rate, "accuracy": accuracy}
        for pairs, rate, accuracy in ((2, 0.1, 0.3), (2, 0.2, 0.5), (4, 0.1, 0.2), (4, 0.2, 0.1))
    ]
    best = mqrar.best_runs(results)
    assert [best.loc[("a", pairs), "learning_rate"] for pairs in (2, 4)] == [0.2, 0.1]


def test_text_data_is_an_error(capsys):
    tiny = str(Path(SMALL).with_name("tiny_context_extension.yaml"))
    assert cli.main(["experiment", "mqrar", tiny]) == 2
    assert re.search("data.kind must be 'recall' .*got 'text'", capsys.readouterr().err)
