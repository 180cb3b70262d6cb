"""Losses against a teacher: what they measure, which weights they change, and how stages with them go on."""

from pathlib import Path

import pytest
import yaml
from support.jobs import SMALL_JOB, metrics, train
from support.launch import run_worker

from megatron_sb.training.config import ConfigError, load_config, to_yaml
from megatron_sb.training.directory import refuse_changes

TINY = Path(__file__).parents[3] / "configs" / "tiny_context_extension.yaml"


@pytest.fixture(scope="module", params=["cpu", "megatron"])
def results(request, tmp_path_factory):
    """With torch's optimizer and checkpoints, and with Megatron's, which GPUs use."""
    return run_worker("distillation.py", 1, tmp_path_factory.mktemp("out") / "out.json", request.param)


def test_the_divergence_is_that_of_fp64(results):
    logits = results["logits"]
    assert logits["losses"][0] == pytest.approx(logits["expected"], rel=1e-5) and logits["expected"] > 0.01
    assert logits["losses"][-1] < 0.8 * logits["losses"][0]


def test_the_layer_error_is_that_of_each_layer_alone(results):
    layers = results["layers"]
    assert layers["losses"][0] == pytest.approx(layers["expected"], rel=1e-5) and layers["expected"] > 0.1
    assert layers["losses"][-1] < 0.8 * layers["losses"][0]


def test_the_same_attention_has_no_error(results):
    assert results["same attention, logits"] == pytest.approx(0, abs=1e-9)
    assert results["same attention, layers"] == pytest.approx(0, abs=1e-12)


def test_layer_by_layer_only_attention_changes(results):
    """Bit for bit, in spite of weight decay. The other loss changes all weights."""
    layers = results["layers"]
    assert {name for name in layers["all"] if ".self_attention." in name} == set(layers["changed"])
    assert len(layers["changed"]) == 4 and len(layers["all"]) > 10  # two matrices in each of two layers
    assert results["logits"]["changed"] == layers["all"]


def test_stages_go_on(results):
    """A stage layer by layer resumes with its optimizer; the stage after it starts with an optimizer without state."""
    layers = results["layers"]
    assert layers["resumed"] == pytest.approx(layers["losses"][3:], rel=1e-6)
    assert layers["kept"] and layers["then"][-1] < layers["then"][0]
    assert layers["then resumed"] == pytest.approx(layers["then"][2:], rel=1e-6)


DISTILLED = ["stages.1.loss=layers", "teacher=softmax_rope", "initial_checkpoint=base", "initial_attention=softmax"]
DISTILLED += ["compare=[stick_breaking]", "parallel.ranks=1", "stages.1.context_parallel_size=1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["teacher=null"], r"stages\.1\.loss = 'layers' needs teacher, .* which are \['softmax_rope'\], got None"),
        (["teacher=other"], "needs teacher, an entry of attention with kind 'softmax', .* got 'other'"),
        (["teacher=stick_breaking"], "needs teacher, .* got 'stick_breaking'"),
        (["initial_checkpoint=null", "initial_attention=null"], r"stages\.1\.loss = 'layers' needs initial_checkpoint"),
        (["initial_attention=null"], "needs initial_attention = 'softmax', .* got 'stick_breaking'"),
        (["attention.softmax_rope.position=alibi", "attention.softmax_rope.rotary_base=5.0"], "rotary_base = 5.0"),
        (["stages.1.loss=tokens"], "teacher = 'softmax_rope' needs a stage with loss = 'logits' or 'layers'"),
        (["stages.1.loss=labels"], r"stages\.1\.loss must be 'tokens', 'logits' or 'layers', got 'labels'"),
        (["parallel.ranks=2"], r"stages\.1\.loss = 'layers' contradicts parallel.ranks = 2"),
        (["model.moe={num_experts: 4, top_k: 2}"], "contradicts model.moe"),
        (["model.recompute=full", "parallel.device=auto"], "loss = 'layers' contradicts model.recompute = 'full'"),
        (["model.tokens_at_once=64"], "loss = 'layers' contradicts model.tokens_at_once = 64"),
    ],
)
def test_contradictions(changes, message):
    assert load_config(TINY, DISTILLED).is_distilled
    with pytest.raises(ConfigError, match=message):
        load_config(TINY, [*DISTILLED, *changes])


def test_older_runs_can_be_resumed(tmp_path):
    """A configuration that was written without the fields is equal to one with their defaults."""
    config = load_config(TINY)
    written = yaml.safe_load(to_yaml(config))
    del written["teacher"]
    for stage in written["stages"]:
        del stage["loss"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    refuse_changes(tmp_path, config)


SHORT = ["parallel.ranks=1", "evaluation={windows: 1, target_tokens: 16, length_factor: 1}", "report.tensorboard=false"]
SHORT += ["stages.0.context_parallel_size=1", "stages.1.context_parallel_size=1", "stages.0.rows_per_step=2"]
SHORT += ["stages.0.steps=5", "stages.1.steps=4", "stages.1.warmup_steps=1", "stages.1.rows_per_step=2"]
SHORT += ["checkpoint={interval: 2, keep: 9}", "attention.softmax_rope.evaluated_scalings=[none]"]


def test_a_job_resumes_bit_for_bit(tmp_path):
    """In the stage layer by layer, and in the one after it, which has other weights to train."""
    config, base, out = tmp_path / "small.yaml", tmp_path / "base", tmp_path / "out"
    config.write_text(SMALL_JOB)
    status, _, errors = train(config, *SHORT, "compare=[softmax_rope]", "--out", base)
    assert status == 0, errors
    start = base / "softmax_rope" / "checkpoints" / "extended-000004"
    changes = [*SHORT, "compare=[stick_breaking]", f"initial_checkpoint={start}", "initial_attention=softmax"]
    changes += ["teacher=softmax_rope", "stages.0.loss=layers", "stages.1.loss=logits"]
    status, _, errors = train(config, *changes, "--out", out)
    assert status == 0, errors
    expected = [(line["stage"], line["step"], line["loss"], line["gradient_norm"]) for line in metrics(out)]
    assert [line[:2] for line in expected] == [("short", n) for n in range(1, 6)] + [
        ("extended", n) for n in range(1, 5)
    ]
    for left in ("extended-000002", "short-000002"):
        (out / "stick_breaking" / "checkpoints" / "latest").write_text(left)
        for path in (out / "evaluation").glob("*"):
            path.unlink()
        status, _, errors = train(config, *changes, "--out", out, "--resume")
        assert status == 0, errors
        found = [(line["stage"], line["step"], line["loss"], line["gradient_norm"]) for line in metrics(out)]
        assert sorted(found) == sorted(expected), left
