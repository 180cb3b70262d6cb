"""The extrapolation experiment measures the likelihood beyond the trained length."""

import json
import re
from pathlib import Path

import pytest
from support.markdown import cells_of
from support.sweeps import forked_runs

from megatron_sb import cli
from megatron_sb.experiments import sweep
from megatron_sb.training.config import StickBreakingAttentionConfig, load_config

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = ["model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=32", "stages.0.context_length=16"]
TINY += ["stages.0.steps=2", "stages.0.warmup_steps=1", "stages.0.rows_per_step=2", "evaluation.target_tokens=8"]
TINY += ["evaluation.windows=2"]


@pytest.mark.parametrize("form", ["extrapolation", "extrapolation_small"])
def test_both_configurations_compare_every_kind_of_attention(form):
    config = load_config(CONFIGS / f"{form}.yaml")
    kinds = [config.attention[model] for model in config.compare]
    sticks = {a for a in kinds if isinstance(a, StickBreakingAttentionConfig)}
    softmax = [a for a in kinds if not isinstance(a, StickBreakingAttentionConfig)]
    assert sticks == {
        StickBreakingAttentionConfig(),
        StickBreakingAttentionConfig(remainder_bias=True, head_norm=True),
        StickBreakingAttentionConfig(attend_current=True),
        StickBreakingAttentionConfig(forget_gate=True, forget_gate_loss=0.01),
        StickBreakingAttentionConfig(logits="euclidean"),
    }
    assert {a.position for a in softmax} == {"none", "rope", "alibi", "fire"}
    assert any(a.window for a in softmax) and any(a.stable_mask_gamma for a in softmax)
    assert ("none", "linear", "ntk") in [a.evaluated_scalings for a in softmax]
    (stage,) = config.stages
    assert config.evaluation_lengths(stage)[-1] == 32 * stage.context_length


def command_of(out, compare):
    overrides = [word for override in (*TINY, f"compare=[{', '.join(compare)}]") for word in ("--set", override)]
    return ["experiment", "extrapolation", str(CONFIGS / "extrapolation_small.yaml"), "--out", str(out), *overrides]


def test_the_command(tmp_path):
    out = tmp_path / "out"
    with forked_runs():
        assert cli.main(command_of(out, ["softmax_rope"])) == 0
    written = json.loads((out / "results.json").read_text())["evaluations"]
    table = (out / "table.md").read_text().splitlines()
    assert cells_of(table[0]) == ["attention", "8", "16", "32", "64", "128", "256", "512"]
    for line, entry, scaling in zip(table[2:5], written, ["", ", linear scaling", ", NTK scaling"], strict=True):
        expected = [f"softmax + RoPE{scaling}", *(f"{result['nll']:.3f}" for result in entry["results"])]
        assert cells_of(line) == expected
        suffix = "" if entry["scaling"] == "none" else f".{entry['scaling']}"
        run_file = out / "softmax_rope" / "evaluation" / f"softmax_rope.trained{suffix}.json"
        assert json.loads(run_file.read_text())["results"] == entry["results"]
        assert len({result["nll"] for result in entry["results"]}) > 2, "the likelihood must depend on the context"
    assert (out / "picture.png").stat().st_size > 1000


def test_every_model_is_a_run(tmp_path, monkeypatch):
    """Each model is trained in its own run. The results are combined in the order of the configuration."""

    def train_all(config_path, trials, out, jobs):
        for trial, nll in zip(trials, (3.0, 2.0), strict=True):
            config = load_config(config_path, trial.overrides)
            assert config.compare == (trial.name,)
            for scaling in config.evaluated_scalings(trial.name):
                path = sweep.evaluation_path(out / trial.name, config, trial.name, scaling)
                path.parent.mkdir(parents=True, exist_ok=True)
                about = {"model": trial.name, "stage": "trained", "trained_context": 16, "scaling": scaling}
                results = [{"context": 8, "nll": nll, "windows": 2}]
                path.write_text(json.dumps({**about, "device": f"GPU {nll:g}", "results": results}))

    monkeypatch.setattr(sweep, "train_all", train_all)
    assert cli.main(command_of(tmp_path, ["softmax_rope", "stick_breaking"])) == 0
    rows = (tmp_path / "table.md").read_text().splitlines()[2:6]
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["device"] == "GPU 3 and GPU 2", "must be the devices of the runs, not of this process"
    assert cells_of(rows[0]) == ["softmax + RoPE", "3.000"] and cells_of(rows[3]) == ["stick-breaking", "2.000"]


def test_a_model_can_have_a_name_that_yaml_reads_as_true(tmp_path, monkeypatch):
    compared = []

    def train_all(config_path, trials, out, jobs):
        compared.extend(load_config(config_path, trial.overrides).compare for trial in trials)
        raise sweep.SweepStopped("", 1)

    monkeypatch.setattr(sweep, "train_all", train_all)
    attention = "attention={'on': {kind: softmax, position: none}}"
    assert cli.main([*command_of(tmp_path, ["'on'", "stick_breaking"]), "--set", attention]) == 1
    assert compared == [("on",), ("stick_breaking",)]


def test_recall_data_is_an_error(capsys):
    assert cli.main(["experiment", "extrapolation", str(CONFIGS / "mqrar_small.yaml")]) == 2
    assert re.search("data.kind must be .*got 'recall'", capsys.readouterr().err)
