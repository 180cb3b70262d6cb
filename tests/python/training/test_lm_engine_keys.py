"""Translation of lm-engine's model section, and its errors."""

import re

import pytest
import yaml
from support.messages import mentions

from megatron_sb.training.config import ConfigError, MoEConfig, load_config

MIXER = {
    "sequence_mixer_type": "stickbreaking_attention",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "add_bias": False,
    "attention_multiplier": None,
    "dropout": 0,
}
MLP = {"mlp_type": "MLP", "intermediate_size": 96, "activation_function": "swiglu", "add_bias": False, "dropout": 0}
MOE = {**MLP, "mlp_type": "MoE", "num_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": None}
MODEL = {
    "model_type": "gpt_base",
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "hidden_size": 64,
    "num_layers": 2,
    "initializer_range": 0.03,
    "normalization_function": "rmsnorm",
    "layer_norm_epsilon": 1e-5,
    "position_embedding_type": "nope",
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.02,
    "tie_word_embeddings": True,
    "m_emb": None,
    "m_width": 1.0,
    "init_method": "normal",
    "bos_token_id": 0,
    "eos_token_id": 7,
    "sequence_mixer_blocks": [MIXER, MIXER],
    "mlp_blocks": [MLP, MLP],
}
STAGE = {"name": "a", "context_length": 64, "steps": 5, "rows_per_step": 4, "learning_rate": 1e-3}


def load(tmp_path, theirs=MODEL, arguments=None, **sections):
    tree = {
        "name": "theirs",
        "model_args": {"model_class": "AutoModelForCausalLM", "pretrained_config": theirs, **(arguments or {})},
        "data": {"kind": "indexed", "paths": ["set"]},
        "stages": [STAGE],
        "evaluation": {"target_tokens": 64},
        **sections,
    }
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.dump(tree, Dumper=NoAliases))
    return load_config(path)


class NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True


def changed(name, value):
    """Return MODEL with another value of one key, or without the key where the value is `...`."""
    return {key: old for key, old in MODEL.items() if key != name} | ({} if value is ... else {name: value})


def test_a_dense_model(tmp_path):
    config = load(tmp_path, attention={"stick_breaking": {"mass_threshold": 0.0}})
    model, attention = config.model, config.attention["stick_breaking"]
    assert (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads) == (2, 64, 4, 2)
    assert (model.ffn_hidden_size, model.head_dim, model.init_std, model.moe) == (96, 16, 0.03, None)
    assert model.tie_word_embeddings and (config.data.vocab_size, config.data.end_of_document) == (300, 7)
    assert attention.remainder_bias and attention.head_norm and attention.mass_threshold == 0


def test_a_mixture_with_alternative_names(tmp_path):
    model = {name: value for name, value in MODEL.items() if name not in ("hidden_size", "num_layers")}
    mixer = {**MIXER, "head_dim": 32}
    model |= {"n_embd": 64, "n_layer": 3, "sequence_mixer_blocks": [mixer] * 3, "mlp_blocks": [MOE] * 3}
    config = load(tmp_path, model, model={"precision": "bf16"}, attention={"stick_breaking": {"head_norm": False}})
    assert config.model.moe == MoEConfig(num_experts=8, top_k=2, aux_loss_coefficient=0.02)
    assert (config.model.head_dim, config.model.num_layers, config.model.precision) == (32, 3, "bf16")
    attention = config.attention["stick_breaking"]
    assert attention.remainder_bias and not attention.head_norm


AT = "model_args.pretrained_config"
# A key, a value of it (...: the key is missing), and words of the message.
REFUSED = [
    ("n_inner", 5, f"{AT}.n_inner 5 model_type, vocab_size,"),
    ("n_embd", 64, f"{AT}.n_embd 64 model.hidden_size twice"),
    ("m_width", 9, f"{AT}.m_width None 1 9"),
    ("position_embedding_type", "rope", f"{AT}.position_embedding_type 'nope' 'rope'"),
    ("position_embedding_type", ..., f"{AT}.position_embedding_type 'nope' nothing"),
    ("tie_word_embeddings", ..., f"{AT}.tie_word_embeddings required"),
    ("model_type", "ladder_residual", f"{AT}.model_type 'gpt_base' 'ladder_residual'"),
    ("num_layers", 3, f"{AT}.sequence_mixer_blocks 3 got 2 blocks"),
    ("mlp_blocks", None, f"{AT}.mlp_blocks 2 got None"),
    ("mlp_blocks", [MLP, MOE], f"{AT}.mlp_blocks.1 equal {AT}.mlp_blocks.0"),
    ("mlp_blocks", [3, 3], f"{AT}.mlp_blocks.0 mapping got 3"),
    ("mlp_blocks", [{**MLP, "num_experts": 8}] * 2, f"unknown {AT}.mlp_blocks.0.num_experts 8"),
    ("mlp_blocks", [{**MLP, "activation_function": "gelu"}] * 2, f"{AT}.mlp_blocks.0.activation_function 'gelu'"),
    ("mlp_blocks", [{**MOE, "shared_intermediate_size": 8}] * 2, f"{AT}.mlp_blocks.0.shared_intermediate_size 8"),
    ("sequence_mixer_blocks", [{**MIXER, "add_bias": True}] * 2, f"{AT}.sequence_mixer_blocks.0.add_bias True"),
    ("sequence_mixer_blocks", [{**MIXER, "attention_multiplier": 0.1}] * 2, "attention_multiplier None 0.1"),
    (
        "sequence_mixer_blocks",
        [{**MIXER, "sequence_mixer_type": "mamba2"}] * 2,
        f"{AT}.sequence_mixer_blocks.0.sequence_mixer_type 'stickbreaking_attention' 'mamba2'",
    ),
    ("hidden_size", "wide", "model.hidden_size integer 'wide'"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_wrong_keys_are_named(name, value, words, tmp_path):
    with pytest.raises(ConfigError, match=mentions(words)):
        load(tmp_path, changed(name, value))


@pytest.mark.parametrize(
    ("number", "got"), [(0, "0"), (-1, "-1"), ("2", "'2'"), (2.0, "2.0"), (True, "True"), (None, "nothing")]
)
def test_the_number_of_layers_is_named(number, got, tmp_path):
    """Before the blocks, which it is compared with."""
    blocks = {"sequence_mixer_blocks": [], "mlp_blocks": []} if number == 0 else {}
    message = rf"pretrained_config\.num_layers must be .* integer of at least 1, got {re.escape(got)}$"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, MODEL | {"num_layers": number} | blocks)


def test_a_mixture_needs_the_coefficient_of_its_auxiliary_loss(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"{AT}.router_aux_loss_coef is required")):
        load(tmp_path, changed("router_aux_loss_coef", ...) | {"mlp_blocks": [MOE, MOE]})


@pytest.mark.parametrize(
    ("arguments", "sections", "words"),
    [
        ({"reset_attention_mask": False}, {}, "model_args.reset_attention_mask True False"),
        ({}, {"attention": 3}, "attention mapping 3"),
        ({}, {"attention": {"stick_breaking": 3}}, "attention.stick_breaking mapping 3"),
        ({"tuning": 1}, {}, "unknown model_args.tuning 1"),
        ({"pretrained_config": None}, {}, f"{AT} mapping None"),
        ({}, {"model": {"num_layers": 4}}, "model.num_layers 2 model_args 4"),
        ({}, {"model": None}, "model mapping None"),
        ({}, {"data": {"vocab_size": 5}}, "data.vocab_size 300 model_args 5"),
    ],
)
def test_wrong_keys_of_other_sections_are_named(arguments, sections, words, tmp_path):
    with pytest.raises(ConfigError, match=mentions(words)):
        load(tmp_path, arguments=arguments, **sections)
