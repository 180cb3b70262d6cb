"""The skipping experiment: tiles that a trained model skips and the time this saves."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.markdown import tables_of
from support.sweeps import forked_runs

from megatron_sb import cli
from megatron_sb.experiments import skipping, stolen_attention, sweep, thresholds

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = ["model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.num_kv_heads=2"]
TINY += ["model.ffn_hidden_size=64", "stages.0.steps=4", "stages.0.warmup_steps=1", "stages.0.context_length=128"]
TINY += ["evaluation.windows=2", "evaluation.target_tokens=128", "evaluation.length_factor=4", "model.init_std=0.3"]
TINY += ["checkpoint={interval: 3, keep: 2, stage_ends: false}"]  # the experiment saves the end all the same

THRESHOLDS = [2.0**-24, 2.0**-8, 0.9]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Run the command, which trains a model first. Return its output folder."""
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("skipping") / "out"
    command = ["experiment", "skipping", str(CONFIGS / "skipping_small.yaml"), "--out", str(folder)]
    command += ["--seconds", "0.01", "--thresholds", "2^-24", "2^-8", "0.9"]
    command += [*(word for override in TINY for word in ("--set", override))]
    try:
        with forked_runs():
            assert cli.main(command) == 0
    finally:
        torch.set_num_threads(threads)
    return folder


def test_the_command_trains_and_measures(out):
    results = json.loads((out / "results.json").read_text())
    found = [(entry["context"], entry["layer"], len(entry["skipped"])) for entry in results["entries"]]
    assert found == [(context, layer, 4) for context in (128, 256, 512) for layer in (1, 2)]
    for entry in results["entries"]:
        assert all(0 <= share < 1 for share in entry["skipped"])
        assert all(len(times) == 3 and min(times) > 0 for times in entry["milliseconds"].values())
    assert max(results["entries"][-1]["skipped"]) > 0.3, "with such large weights, few keys use up the mass"
    by_context, by_layer, _ = tables_of((out / "table.md").read_text())
    assert [row[0] for row in by_context] == ["context", "128", "256", "512"]
    assert [row[0] for row in by_layer] == ["layer, at 512", "1", "2"]
    assert (out / "picture.png").stat().st_size > 1000


def test_thresholds_are_compared_on_the_same_windows(out):
    results = json.loads((out / "results.json").read_text())
    found = results["thresholds"]
    assert [(entry["context"], entry["mass_threshold"]) for entry in found] == [
        (context, threshold) for context in (128, 256, 512) for threshold in THRESHOLDS
    ]
    evaluated = json.loads((out / "trained" / "evaluation" / "stick_breaking.trained.json").read_text())["results"]
    for (first, second, largest), measured in zip((found[:3], found[3:6], found[6:]), evaluated, strict=True):
        assert first["nll"] == pytest.approx(measured["nll"], rel=1e-6), "2^-24 is the model's own threshold"
        assert first["standard_error"] == pytest.approx(measured["standard_error"], rel=1e-4)
        assert first["difference"] == first["difference_error"] == 0
        assert largest["difference"] == pytest.approx(largest["nll"] - first["nll"], abs=1e-9)
        assert first["skipped"] <= second["skipped"] <= largest["skipped"] < 1
        assert all(min(entry["milliseconds"].values()) > 0 for entry in (first, second, largest))
    assert 0 < abs(found[7]["difference"]) < abs(found[8]["difference"])
    skipped = [np.mean(entry["skipped"]) for entry in results["entries"] if entry["context"] == 512]
    assert found[6]["skipped"] == pytest.approx(np.mean(skipped), rel=1e-6)


def test_a_run_without_its_last_weights_is_an_error(out, tmp_path, capsys):
    """Such as a run that was trained with stage_ends = false."""
    run = tmp_path / "run"
    shutil.copytree(out / "trained", run)
    (run / "stick_breaking" / "checkpoints" / "latest").write_text("trained-000003")
    command = ["experiment", "skipping", str(run / "config.yaml"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 2
    assert re.search(r"must be that of step 4 of stage trained, .* got .*/trained-000003\.", capsys.readouterr().err)


def test_the_table_of_thresholds():
    entry = {"context": 128, "windows": 2, "nll": 1.5, "standard_error": 0.25, "skipped": 0.5}
    entry |= {"milliseconds": {"forward": 1.0, "backward": 2.5}, "difference": 0.0, "difference_error": 0.0}
    other = entry | {"mass_threshold": 0.25, "nll": 1.501, "difference": 0.001, "difference_error": 0.0005}
    ((_, *rows),) = tables_of(thresholds.to_table([entry | {"mass_threshold": 2.0**-24}, other]))
    assert rows == [
        ["128", "2^-24", "50.0%", "1", "2.5", "1.5000 ± 0.2500", ""],
        ["128", "2^-2", "50.0%", "1", "2.5", "1.5010 ± 0.2500", "1.0e-03 ± 5.0e-04"],
    ]


def test_keys_of_the_trained_model(out, tmp_path):
    """stolen-attention measures the keys of the same run, which has heads of 8 channels."""
    config = tmp_path / "hulls.yaml"
    config.write_text(f"head_dims: [2]\nnum_keys: [64]\nrun: {out / 'trained'}\n")
    assert cli.main(["experiment", "stolen-attention", str(config), "--out", str(tmp_path / "hulls")]) == 0
    drawn, *layers = json.loads((tmp_path / "hulls" / "results.json").read_text())["entries"]
    assert (drawn["head_dim"], drawn["num_keys"], drawn["key_mean"]) == (2, 64, 0.0)
    assert [(entry["layer"], entry["head_dim"]) for entry in layers] == [(1, 8), (2, 8)]
    assert 16 < layers[0]["num_keys"] < 64  # equal bytes have equal keys in the first layer
    assert layers[1]["num_keys"] == 64  # keys of the second layer depend on the context
    for entry in layers:
        assert entry["on_hull"] > 0.1
        interior = entry["attention"]["softmax"]["interior"]
        assert interior is None or interior["max"] <= 0.5
    (table,) = tables_of((tmp_path / "hulls" / "table.md").read_text())
    assert ["8", "64", "layer 2"] in [row[:3] for row in table]


def test_a_run_with_larger_heads_is_an_error(out, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        (out / "trained" / "config.yaml").read_text().replace("head_dim: 8", "head_dim: 16")
    )
    with pytest.raises(ValueError, match=r"model\.head_dim = 16"):
        stolen_attention.trained_keys(run, [64])


def entries(milliseconds):
    """Return one layer. Its forward takes `milliseconds`, 4 with a threshold of 0, 8 for every tile."""
    times = {"forward": [milliseconds, 4.0, 8.0], "backward": [5.0, 5.0, 10.0]}
    return [{"context": 256, "layer": 1, "windows": 1, "skipped": [0.25, 0.75], "milliseconds": times}]


def test_the_table_adds_up():
    times = ["2 / 4 / 8", "50.0% / 75.0%", "5 / 5 / 10", "0.0% / 50.0%"]
    (_, *by_context), (_, *by_layer) = tables_of(skipping.to_tables(entries(2.0)))
    assert by_context == [["256", "50.0%", *times]]
    assert by_layer == [["1", "50.0%", "25.0% to 75.0%", *times]]


NO_MODEL = r"--model must be one of \[\], .*got None"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "softmax_rope"], r"--model must be one of \['stick_breaking'\].*got 'softmax_rope'"),
        (["--model", ""], r"--model must be one of \['stick_breaking'\].*got ''"),
        (["--set", "attention={stick_breaking: {mass_threshold: 0}}"], NO_MODEL),
        (["--seconds", "0"], r"--seconds must .*got 0\.0"),
        (["--seconds", "inf"], "--seconds must .*got inf"),
        (["--thresholds", "0", "--set", "evaluation.longest=256"], r"evaluation\.longest must be at least .*got 256"),
        (["--set", "compare=[softmax_rope]"], NO_MODEL),
        (["--set", "attention={stick_breaking: {forget_gate: true}}"], NO_MODEL),
        (["--set", "attention={stick_breaking: {logits: euclidean}}"], NO_MODEL),
    ],
)
def test_unsupported_options(options, message, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "train_all", lambda *arguments: pytest.fail("nothing must be trained"))
    assert cli.main(["experiment", "skipping", str(CONFIGS / "skipping_small.yaml"), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
