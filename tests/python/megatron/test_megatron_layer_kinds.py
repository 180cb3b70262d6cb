"""Models whose layers are not all attention: which layers become stick-breaking, on every way in."""

import argparse
import math
import re
from types import SimpleNamespace

import pytest
from support.launch import run_worker
from support.messages import mentions

from megatron_sb.megatron.layer_pattern import layer_pattern
from megatron_sb.megatron.layer_selection import attention_layers_in, attention_layers_of, is_selected

STICK_BREAKING, SOFTMAX = "StickBreakingCoreAttention", "DotProductAttention"


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict:
    return run_worker("megatron_layer_kinds.py", 2, tmp_path_factory.mktemp("kinds") / "findings.json")


def wrong_messages(expected: dict[str, str], messages: dict[str, str]) -> dict[str, str]:
    """Return the messages that do not mention their expected words."""
    assert messages.keys() == expected.keys()
    return {name: text for name, text in messages.items() if not re.search(mentions(expected[name]), text)}


def assert_trains(step: dict) -> None:
    """The loss of a first step is near that of equal probabilities, and every parameter gets a gradient."""
    assert abs(step["loss"] - math.log(32)) < 1.0
    assert step["without gradient"] == []


def test_heterogeneous_models(findings):
    """Layers whose attention is a no-op or a linear layer do not change."""
    found = findings["heterogeneous"]
    others = ["IdentityOp", "ColumnParallelLinearGathered"]
    assert found["stock"] == [SOFTMAX, others[0], SOFTMAX, others[1]]
    assert found["converted"] == found["launched"] == [STICK_BREAKING, others[0], STICK_BREAKING, others[1]]
    converted, launched, stock = found["steps"]
    for step in (converted, launched, stock):
        assert_trains(step)
    assert converted["loss"] == launched["loss"] != stock["loss"]
    assert found["mixed"] == found["mixed, launched"] == [SOFTMAX, others[0], STICK_BREAKING, others[1]]
    assert_trains(found["step of the mixed model"])
    expected = {
        "without config": "config with_stickbreaking layers HeterogeneousTransformerConfig None",
        "an entry for each layer": "layers (0, 0, 1, 0) --sb-layers 2 4 (1, 3)",
        "learned positions": "position_embedding_type 'learned_absolute' 'none'",
    }
    assert wrong_messages(expected, found["refused"]) == {}


@pytest.mark.parametrize("way", ["converted", "launched"])
def test_latent_attention(findings, way):
    """The second layer has multi-latent attention. It rotates q and k only if it stays softmax."""
    found = findings["latent attention"][way]
    assert {layers: model["cores"] for layers, model in found.items()} == {
        "None": [STICK_BREAKING, STICK_BREAKING],
        "(1, 0)": [STICK_BREAKING, "LatentCoreAttention"],
        "(0, 1)": [SOFTMAX, STICK_BREAKING],
    }
    assert [model["rotaries"][1] for model in found.values()] == ["NoRotation", "RotaryEmbedding", "NoRotation"]
    for model in found.values():
        assert_trains(model["step"])
    assert len({model["step"]["loss"] for model in found.values()}) == 3
    assert found == findings["latent attention"]["converted"]


def test_latent_attention_of_a_function_of_the_config(findings):
    found = findings["latent attention"]["function"]["None"]
    assert found["cores"] == [STICK_BREAKING] * 2 and found["rotaries"] == ["NoRotation"] * 2
    assert_trains(found["step"])


def test_cross_attention(findings):
    """A layer that stays softmax may have cross-attention."""
    expected = {
        "None": "cross_attention --stick-breaking-attention",
        "(0, 1)": "cross_attention 2 IdentityOp CrossAttention --sb-layers",
        "(1, 0)": "no error",
    }
    assert wrong_messages(expected, findings["cross-attention"]) == {}


def test_hybrid_models(findings):
    """Only the attention layers of a hybrid stack become stick-breaking. The model trains."""
    found = findings["hybrid"]
    assert found["spec is unchanged"] and found["submodules alone"]
    layers = found["cores"].pop("stock")
    assert layers == ["MeanMixer", SOFTMAX, "MLP", "MeanMixer", SOFTMAX, "MoELayer"]
    everywhere = [STICK_BREAKING if name == SOFTMAX else name for name in layers]
    second = [*layers[:4], STICK_BREAKING, layers[5]]
    assert found["cores"] == {
        "converted": everywhere,
        "launched": everywhere,
        "mixed": second,
        "mixed, by the script": second,
        "mixed, launched": second,
    }
    for step in found["steps"].values():
        assert_trains(step)
    losses = {name: step["loss"] for name, step in found["steps"].items()}
    assert losses["converted"] == losses["launched"]
    assert losses["mixed"] == losses["mixed, by the script"] == losses["mixed, launched"]
    assert len({losses["stock"], losses["converted"], losses["mixed"]}) == 3
    expected = {
        "without pattern": "hybrid_layer_pattern layers None",
        "an entry for each layer": "layers (0, 0, 0, 0, 0, 0) --sb-layers 2 6 (2, 5)",
    }
    assert wrong_messages(expected, found["refused"]) == {}


def test_latent_attention_of_hybrid_models(findings):
    found = findings["hybrid, latent"]
    if found is None:
        pytest.skip("the hybrid stack of this Megatron-Core has no layer of latent attention")
    assert found["cores"].pop("kept") == ["MeanMixer", "LatentCoreAttention"]
    assert found["cores"].keys() == {"selected", "all layers", "launched"}
    assert all(layers == ["MeanMixer", STICK_BREAKING] for layers in found["cores"].values())
    assert_trains(found["step"])
    expected = {
        "converted": "config.mla_down_proj_fusion True --mla-down-proj-fusion FusedMLASelfAttention",
        "launched": "self_attention MLASelfAttention FusedMLASelfAttention",
    }
    assert wrong_messages(expected, found["refused"]) == {}


def test_hybrid_models_over_a_pipeline(findings):
    """The pattern of --sb-layers counts the attention layers of both stages."""
    assert findings["hybrid, pipeline"] == [["MeanMixer", SOFTMAX, "MLP"], ["MeanMixer", STICK_BREAKING, "MoELayer"]]


def test_block_specs(findings):
    """The function makes the spec of each stage, by options, or by the flags of the script."""
    found = findings["block specs"]
    mlps = ["MLP", "MoELayer", "MoELayer", "MLP"]
    for name, pattern in {"options": (1, 0, 0, 1), "flags": (0, 0, 0, 1), "options before flags": (1, 1, 1, 0)}.items():
        wanted = [STICK_BREAKING if entry else SOFTMAX for entry in pattern]
        assert found["layers"][name] == [list(layer) for layer in zip(range(1, 5), wanted, mlps, strict=True)], name
    assert found["head norm"]
    assert found["heterogeneous"] == [SOFTMAX, "IdentityOp", STICK_BREAKING, "ColumnParallelLinearGathered"]
    assert_trains(found["step"])
    assert re.search(mentions("config.mtp_num_layers 1 --mtp-num-layers launcher"), found["refused"])
    assert found["accepted"] == "no error"


def test_linear_attention_over_a_pipeline(findings):
    """--sb-layers counts the attention layers of all stages: here one in each stage, of three layers."""
    mixers = ["MeanMixer"] * 2
    first, second = findings["linear attention"]
    assert first == [[*mixers, SOFTMAX]] * 2
    assert second == [[*mixers, STICK_BREAKING]] * 2


@pytest.mark.parametrize(
    ("pattern", "numbers"), [("M*-M*-", (2, 5)), ("M*|*-/MM/MM", (2, 3)), ("G+D", (2, 3)), ("MM", ())]
)
def test_attention_layers_of_hybrid_patterns(pattern, numbers):
    assert attention_layers_in(pattern) == numbers
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        assert attention_layers_of(None, SimpleNamespace(**{name: pattern, "num_layers": 9})) == numbers


def test_attention_layers_of_linear_attention():
    linear = SimpleNamespace(num_layers=4, experimental_attention_variant="gated_delta_net", linear_attention_freq=2)
    assert attention_layers_of(linear) == (2, 4)
    linear.linear_attention_freq = [1, 0, 0, 1]
    assert attention_layers_of(linear) == (2, 3)


@pytest.mark.parametrize("frequency", [None, 0])
def test_attention_layers_of_linear_attention_need_a_frequency(frequency):
    linear = SimpleNamespace(num_layers=4, experimental_attention_variant="gated_delta_net")
    linear.linear_attention_freq = frequency
    with pytest.raises(ValueError, match=mentions(f"--linear-attention-freq --sb-layers {frequency}")):
        attention_layers_of(linear)


def test_a_pattern_of_another_model():
    """Its layer 3 would silently keep softmax, although the pattern has no entry for it."""
    config = SimpleNamespace(num_layers=6, mtp_num_layers=None)
    assert [is_selected(layer, config, layers=(0, 1), numbers=(2, 5)) for layer in (2, 5)] == [False, True]
    with pytest.raises(ValueError, match=mentions("hybrid_layer_pattern --hybrid-layer-pattern (2, 5) layer 3")):
        is_selected(3, config, layers=(0, 1), numbers=(2, 5))


def test_layers_of_multi_token_prediction_have_no_entry():
    config = SimpleNamespace(num_layers=6, mtp_num_layers=1)
    with pytest.raises(ValueError, match=mentions("config.mtp_num_layers --mtp-num-layers None layers=(0, 1) got 1")):
        is_selected(2, config, layers=(0, 1), numbers=(2, 5))


def test_attention_layers_of_ratios_are_an_error():
    ratios = SimpleNamespace(num_layers=4, hybrid_attention_ratio=0.5)
    with pytest.raises(ValueError, match=mentions("--sb-layers --hybrid-override-pattern 0.5")):
        attention_layers_of(ratios)


def test_a_pattern_that_no_list_can_hold():
    with pytest.raises(argparse.ArgumentTypeError, match=mentions("[1]*99999999999999999999")):
        layer_pattern("[1]*99999999999999999999")
