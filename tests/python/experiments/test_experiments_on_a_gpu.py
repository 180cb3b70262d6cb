"""Train in bf16 on a GPU and load Megatron's checkpoint to draw the attention."""

import json
from pathlib import Path

import pytest

from megatron_sb import cli

SMALL = str(Path(__file__).parents[3] / "configs" / "mqrar_small.yaml")
GPU = ["parallel.device=cuda", "model.precision=bf16", "model.ffn_hidden_size=64", "stages.0.context_length=16"]
GPU += ["data.num_keys=2", "data.num_pairs=2", "data.num_values=4", "stages.0.steps=150", "stages.0.rows_per_step=32"]
GPU += ["stages.0.warmup_steps=50", "stages.0.schedule=exponential"]


@pytest.mark.gpu
def test_recall_and_its_attention(tmp_path):
    overrides = [word for override in GPU for word in ("--set", override)]
    command = ["experiment", "mqrar", SMALL, "--learning-rates", "1e-2", "3e-3", "--jobs", "2"]
    assert cli.main([*command, *overrides, "--out", str(tmp_path / "out")]) == 0
    runs = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    best = max(run["accuracy"] for run in runs if run["model"] == "stick_breaking")
    assert len(runs) == 4 and best > 0.6, "guessing is right 0.25 of the time"
    run = tmp_path / "out" / "pairs2-rate0.01" / "config.yaml"
    look = ["experiment", "attention-picture", str(run), "--sequence", "A 1 B 2 A 3 B 0 A 1"]
    assert cli.main([*look, "--out", str(tmp_path / "look")]) == 0
    written = json.loads((tmp_path / "look" / "results.json").read_text())
    assert [entry["right"] for entry in written["queries"]] == ["1", "2", "3"] and len(written["attention"]) == 2
