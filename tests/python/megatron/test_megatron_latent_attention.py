"""Layers of multi-latent attention with stick-breaking attention: outputs, gradients, layouts and errors."""

import re

import pytest
import torch
from support.launch import run_worker
from support.megatron_cpu import core_attention_arguments, small_config
from support.messages import mentions

from megatron_sb.megatron import StickBreakingCoreAttention, StickBreakingOptions
from megatron_sb.megatron.checked_attention import NoRotation

# The largest difference from float64, relative to the largest number of a tensor. The layers compute in float32.
TOLERANCE = 1e-5
PARAMETERS = {
    "linear_q_down_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_down_proj.weight",
    "linear_kv_up_proj.weight",
    "linear_proj.weight",
    "q_layernorm.weight",
    "kv_layernorm.weight",
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict:
    return run_worker("megatron_latent_attention.py", 2, tmp_path_factory.mktemp("latent") / "findings.json")


def test_layers_equal_the_reference(findings):
    """Outputs and all gradients, of sequences and documents, on one rank and over TP and CP."""
    found = findings["differences"]
    assert len(found) == 22
    assert found["rope"].keys() == {"output", "hidden states"} | PARAMETERS
    assert found["gates"].keys() - found["rope"].keys() == {"gate_proj.weight", "gate_proj.bias"}
    assert len(found["head vectors"]) == len(found["rope"]) + 3
    wrong = {
        case: {name: error for name, error in errors.items() if not error <= TOLERANCE}
        for case, errors in found.items()
        if not all(error <= TOLERANCE for error in errors.values())
    }
    assert wrong == {}


def test_decoding_equals_the_whole_sequence(findings):
    """Static inference, whose cache has other channels for keys than for values, and columns for gates."""
    found = findings["decoding"]
    assert len(found) == 8
    assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


def test_parameters_are_those_of_megatron(findings):
    """So checkpoints of softmax models load."""
    assert findings["same parameters"]


REFUSALS = {
    "fused rope": "config.apply_rope_fusion True --no-rope-fusion",
    "l2 norm": "config.qk_l2_norm True --qk-l2-norm",
    "channels of keys": "qk_head_dim qk_pos_emb_head_dim --qk-head-dim 8 256 20",
    "channels of values": "v_head_dim --v-head-dim 8 256 264",
    "euclidean": "qk_head_dim qk_pos_emb_head_dim 8 248 256",
    "dropout": "config.attention_dropout 0.1 --attention-dropout",
    "cached latents": "config.cache_mla_latents True --cache-mla-latents softmax",
    "cached latents of another layer": "no error",
    "norm": "config.qk_layernorm --qk-layernorm kv_layernorm",
}


def test_unsupported_settings(findings):
    found = findings["refusals"]
    assert REFUSALS.keys() - found.keys() <= {"norm"}
    assert {name: text for name, text in found.items() if not re.search(mentions(REFUSALS[name]), text)} == {}


def make_core(logits: str = "dot", **changes) -> StickBreakingCoreAttention:
    """Build the core attention as a layer of multi-latent attention does."""
    channels = {"k_channels": 24, "v_channels": 16, "softmax_scale": 1.5 * 24**-0.5, "unrotated": True}
    options = StickBreakingOptions(logits=logits, remainder_bias=True)
    return StickBreakingCoreAttention(
        **core_attention_arguments(small_config(), options=options, **{**channels, **changes})
    )


@pytest.mark.parametrize(("logits", "scale"), [("dot", 1.5 * 24**-0.5), ("euclidean", 1.5)])
def test_scale(logits, scale):
    """Megatron's scale is kept. Its factor 1 / sqrt(d) is that of dot products."""
    assert make_core(logits).scale == pytest.approx(scale)


def test_head_vectors_have_the_channels_of_values():
    assert make_core().remainder_bias.shape == (4 * 16,)


def test_padded_values_are_an_error():
    """Megatron-Core 0.19 pads the values of packed sequences for Transformer Engine."""
    q, k = torch.randn(8, 4, 24), torch.randn(8, 4, 24)
    with pytest.raises(ValueError, match=mentions("value 16 v_channels 24")):
        make_core()(q[:, None], k[:, None], torch.randn(8, 1, 4, 24), None)


@pytest.mark.parametrize("rope_type", ["rope", "yarn"])
def test_no_rotation(rope_type):
    """Megatron's function returns its argument, whose channels keep their order."""
    from megatron.core.models.common.embeddings import apply_rotary_pos_emb

    config = small_config(multi_latent_attention=True)
    rotary = NoRotation(rope_type, lambda: torch.device("cpu"))
    for shape, packed in (((10, 2, 4, 8), False), ((10, 4, 8), True)):
        angles = rotary(rotary.get_rotary_seq_len(None, None, None, config, None), packed_seq=packed)
        angles = angles[0] if rope_type == "yarn" else angles
        x = torch.randn(shape)
        assert torch.equal(apply_rotary_pos_emb(x, angles[0:10], config, mscale=1.3, cp_group=object()), x)
    assert not rotary.state_dict()
