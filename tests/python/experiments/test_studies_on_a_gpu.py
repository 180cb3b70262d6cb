"""Skipping and extrapolation in bf16 on a GPU."""

import json
import math
from pathlib import Path

import pytest

from megatron_sb import cli

CONFIGS = Path(__file__).parents[3] / "configs"
GPU = ["parallel.device=cuda", "model.precision=bf16", "model.num_layers=2", "model.hidden_size=128"]
GPU += ["model.num_heads=2", "model.num_kv_heads=2", "stages.0.steps=20", "stages.0.warmup_steps=2"]


def run(name, config, out, *overrides):
    words = [word for override in (*GPU, *overrides) for word in ("--set", override)]
    assert cli.main(["experiment", name, str(CONFIGS / config), "--out", str(out), *words]) == 0
    return json.loads((out / "results.json").read_text())


@pytest.mark.gpu
def test_skipping(tmp_path):
    """Skipped tiles save time at a long context."""
    results = run("skipping", "skipping_small.yaml", tmp_path / "out", "evaluation.length_factor=64")
    longest = [entry for entry in results["entries"] if entry["context"] == 512 * 64]
    assert [entry["layer"] for entry in longest] == [1, 2]
    for entry in longest:
        assert min(entry["skipped"]) > 0.5
        for own, _, every_tile in entry["milliseconds"].values():
            assert 0 < own < 0.8 * every_tile


@pytest.mark.gpu
def test_extrapolation(tmp_path):
    """ALiBi uses FlexAttention, compiled for training and for evaluation. FIRE uses blocks of rows."""
    fields = ["compare=[softmax_alibi, softmax_fire]", "evaluation.length_factor=4"]
    results = run("extrapolation", "extrapolation_small.yaml", tmp_path / "out", *fields)
    assert len(results["evaluations"]) == 2
    for entry in results["evaluations"]:
        assert [result["context"] for result in entry["results"]] == [64, 128, 256, 512]
        assert all(0 < result["nll"] < math.log(257) + 1 for result in entry["results"][:2])
