"""What a trained model skips, as a user asks for it."""

import json
import re
from pathlib import Path

import pytest
import torch
from support.messages import mentions

from megatron_sb import cli
from megatron_sb.experiments import skipping, stolen_attention

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = ["model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.num_kv_heads=2"]
TINY += ["model.ffn_hidden_size=64", "stages.0.steps=4", "stages.0.warmup_steps=1", "stages.0.context_length=128"]
TINY += ["evaluation.windows=2", "evaluation.target_tokens=128", "evaluation.length_factor=4", "model.init_std=0.3"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """What the command leaves behind, with the run that it trains first."""
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("skipping") / "out"
    command = ["experiment", "skipping", str(CONFIGS / "skipping_small.yaml"), "--out", str(folder)]
    command += ["--seconds", "0.01", *(word for override in TINY for word in ("--set", override))]
    try:
        assert cli.main(command) == 0
    finally:
        torch.set_num_threads(threads)
    return folder


def test_of_a_model_that_is_trained_first(out):
    results = json.loads((out / "results.json").read_text())
    found = [(entry["context"], entry["layer"], len(entry["skipped"])) for entry in results["entries"]]
    assert found == [(context, layer, 4) for context in (128, 256, 512) for layer in (1, 2)]
    for entry in results["entries"]:
        assert all(0 <= share < 1 for share in entry["skipped"])
        assert all(len(times) == 3 and min(times) > 0 for times in entry["milliseconds"].values())
    assert max(results["entries"][-1]["skipped"]) > 0.3, "the weights are large: sticks are used up soon"
    table = (out / "table.md").read_text()
    assert [line.split(" | ")[0] for line in table.splitlines() if line[:3] in ("| 1", "| 2", "| 5")] == [
        *("| 128", "| 256", "| 512"),
        *("| 1", "| 2"),
    ]
    assert "| layer, at 512 |" in table
    assert (out / "picture.png").stat().st_size > 1000


def test_keys_of_the_trained_model(out, tmp_path):
    """The same run, whose heads have 8 channels: the hulls of its layers' keys (stolen-attention)."""
    config = tmp_path / "hulls.yaml"
    config.write_text(f"head_dims: [2]\nnum_keys: [64]\nrun: {out / 'trained'}\n")
    assert cli.main(["experiment", "stolen-attention", str(config), "--out", str(tmp_path / "hulls")]) == 0
    drawn, *layers = json.loads((tmp_path / "hulls" / "results.json").read_text())["entries"]
    assert (drawn["head_dim"], drawn["num_keys"], drawn["key_mean"]) == (2, 64, 0.0)
    assert [(entry["layer"], entry["head_dim"]) for entry in layers] == [(1, 8), (2, 8)]
    assert 16 < layers[0]["num_keys"] < 64, "the same bytes make the same keys"
    assert layers[1]["num_keys"] == 64, "the context tells them apart"
    for entry in layers:
        assert entry["on_hull"] > 0.1
        interior = entry["attention"]["softmax"]["interior"]
        assert interior is None or interior["max"] <= 0.5
    assert "| 8 | 64 | layer 2 |" in (tmp_path / "hulls" / "table.md").read_text()


def test_a_run_with_larger_heads_has_no_hulls(out, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        (out / "trained" / "config.yaml").read_text().replace("head_dim: 8", "head_dim: 16")
    )
    with pytest.raises(ValueError, match=r"model\.head_dim = 16"):
        stolen_attention.trained_keys(run, [64])


def entries(own):
    """Of one layer, whose forward takes `own` ms of 4 with a threshold of 0 and of 8 for every tile."""
    times = {"forward": [own, 4.0, 8.0], "backward": [5.0, 5.0, 10.0]}
    return [{"context": 256, "layer": 1, "windows": 1, "skipped": [0.25, 0.75], "milliseconds": times}]


def test_the_table_adds_up():
    by_context, by_layer = skipping.table(entries(2.0)).split("\n\n")
    assert "| 256 | 50.0% | 2 / 4 / 8 | 50.0% / 75.0% | 5 / 5 / 10 | 0.0% / 50.0% |" in by_context
    assert "| 1 | 50.0% | 25.0% to 75.0% | 2 / 4 / 8 | 50.0% / 75.0% | 5 / 5 / 10 | 0.0% / 50.0% |" in by_layer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "softmax_rope"], "--model 'softmax_rope'"),
        (
            ["--set", "attention={stick_breaking: {mass_threshold: 0}}"],
            "mass_threshold 0 []",
        ),
        (["--seconds", "0"], "--seconds 0.0"),
        (["--set", "compare=[softmax_rope]"], "stick-breaking []"),
        (
            ["--set", "attention={stick_breaking: {forget_gate: true}}"],
            "gates Euclidean []",
        ),
        (
            ["--set", "attention={stick_breaking: {logits: euclidean}}"],
            "gates Euclidean []",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(options, words, capsys):
    assert cli.main(["experiment", "skipping", str(CONFIGS / "skipping_small.yaml"), *options]) == 2
    assert re.search(mentions(words), capsys.readouterr().err)
