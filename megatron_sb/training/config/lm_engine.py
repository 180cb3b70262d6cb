"""The model section of lm-engine's and dolomite-engine's YAML files, in our fields.

Their `model_args.pretrained_config` describes a model by one mapping and two lists of blocks, a sequence mixer and an
MLP for every layer. Each key is renamed, or must have the value that our models have, or says nothing about training.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_sb.training.config.types import ConfigError

SECTION = "model_args"


@dataclasses.dataclass(frozen=True)
class _Renamed:
    """Our field of the same meaning, dotted. required: its default there is another than here."""

    field: str
    required: bool = False


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """The only values our models can honour, and why. required: their default is another value."""

    allowed: tuple
    why: str
    required: bool = False


_IGNORED = None  # nothing depends on it here

_NO_DROPOUT = _Fixed((0,), "there is no dropout")
_NO_BIAS = _Fixed((False,), "linear layers have no bias", required=True)
_NO_MULTIPLIER = _Fixed((None, 1), "there are no muP multipliers")

_ARGUMENT_KEYS = {
    "pretrained_config": _IGNORED,  # read on its own
    "model_name": _Fixed((None,), "give pretrained_config"),
    "model_class": _Fixed(("AutoModelForCausalLM",), "models are decoders"),
    "trust_remote_code": _IGNORED,
    "efficient_initialization": _IGNORED,
    "use_padding_free_transformer": _IGNORED,
    "reset_attention_mask": _Fixed((True,), "no document sees another"),
    "reset_position_ids": _IGNORED,
}
_MODEL_KEYS = {
    "model_type": _Fixed(("gpt_base",), "this is the one architecture"),
    "vocab_size": _Renamed("data.vocab_size"),
    "hidden_size": _Renamed("model.hidden_size"),
    "n_embd": _Renamed("model.hidden_size"),
    "num_layers": _Renamed("model.num_layers"),
    "n_layer": _Renamed("model.num_layers"),
    "initializer_range": _Renamed("model.init_std"),
    "tie_word_embeddings": _Renamed("model.tie_word_embeddings", required=True),
    "router_aux_loss_coef": _Renamed("model.moe.aux_loss_coefficient"),
    "eos_token_id": _Renamed("data.end_of_document"),
    "bos_token_id": _IGNORED,
    "pad_token_id": _IGNORED,
    "use_cache": _IGNORED,
    "max_position_embeddings": _IGNORED,
    "rope_theta": _IGNORED,
    "rope_scaling": _IGNORED,
    "rope_dim": _IGNORED,
    "position_embedding_type": _Fixed(("nope",), "the order of the stick tells positions", required=True),
    "normalization_function": _Fixed(("rmsnorm",), "layers are normalised by RMSNorm", required=True),
    "layer_norm_epsilon": _Fixed((1e-5,), "it is built in"),
    "embedding_dropout": _NO_DROPOUT,
    "init_method": _Fixed(("normal",), "weights start normal"),
    "embedding_init_method": _Fixed(("normal",), "weights start normal"),
    "use_depth_scaled_init": _Fixed((True,), "output layers start scaled by the depth"),
    "m_emb": _NO_MULTIPLIER,
    "m_width": _NO_MULTIPLIER,
    "m_residual": _NO_MULTIPLIER,
    "sequence_mixer_blocks": _IGNORED,  # read on their own
    "mlp_blocks": _IGNORED,
}
_MIXER_KEYS = {
    "sequence_mixer_type": _Fixed(("stickbreaking_attention",), "it is every layer's attention", required=True),
    "num_attention_heads": _Renamed("model.num_heads"),
    "num_key_value_heads": _Renamed("model.num_kv_heads"),
    "head_dim": _Renamed("model.head_dim"),
    "add_bias": _NO_BIAS,
    "dropout": _NO_DROPOUT,
    "softmax_dropout": _NO_DROPOUT,
    "attention_head_type": _IGNORED,  # num_key_value_heads says it
    "attention_multiplier": _Fixed((None,), "logits are scaled by 1 / sqrt(head_dim)"),
    "attention_multiplier_method": _Fixed((None, "1 / sqrt(head_dim)"), "logits are scaled by it"),
    "attention_gate": _Fixed((False,), "there is no gate"),
    "exclusive_self_attention": _Fixed((False,), "every older key is seen"),
    "sliding_window": _Fixed((None,), "every older key is seen"),
}
_MLP_KEYS = {
    "mlp_type": _Fixed(("MLP", "MoE"), "these are the feed-forward layers", required=True),
    "intermediate_size": _Renamed("model.ffn_hidden_size"),
    "activation_function": _Fixed(("swiglu",), "MLPs are gated by SiLU", required=True),
    "add_bias": _NO_BIAS,
    "dropout": _NO_DROPOUT,
}
_EXPERT_KEYS = {
    **_MLP_KEYS,
    "num_experts": _Renamed("model.moe.num_experts"),
    "num_experts_per_tok": _Renamed("model.moe.top_k"),
    "shared_intermediate_size": _Fixed((None,), "there are no shared experts"),
    "shared_expert_gating": _Fixed((False,), "there are no shared experts"),
    "normalized_topk": _Fixed((True,), "the chosen experts' weights add up to 1"),
}


def translate(tree: Any) -> Any:
    """A configuration's mapping with `model_args`, where there is one, turned into `model`, `attention`, `data`.

    Their stick-breaking layers always have the remainder bias and the head norm, so both are set unless the file's own
    `attention.stick_breaking` says otherwise. Raises ConfigError for a key that is unknown or has a value our models
    cannot honour, for blocks that differ from layer to layer, and for a field given both ways.
    """
    if not isinstance(tree, dict) or SECTION not in tree:
        return tree
    arguments = _mapping(tree[SECTION], SECTION)
    _read(arguments, _ARGUMENT_KEYS, SECTION)
    path = f"{SECTION}.pretrained_config"
    model = _mapping(arguments.get("pretrained_config"), path)
    fields = _read(model, _MODEL_KEYS, path)
    mixer = _same_block(model, "sequence_mixer_blocks", path, fields.get("model.num_layers"))
    fields |= _read(mixer, _MIXER_KEYS, f"{path}.sequence_mixer_blocks.0")
    mlp = _same_block(model, "mlp_blocks", path, fields.get("model.num_layers"))
    experts = mlp.get("mlp_type") == "MoE"
    fields |= _read(mlp, _EXPERT_KEYS if experts else _MLP_KEYS, f"{path}.mlp_blocks.0")
    if not experts:  # lm-engine's files give it to dense models too
        fields.pop("model.moe.aux_loss_coefficient", None)
    elif "model.moe.aux_loss_coefficient" not in fields:
        raise ConfigError(f"missing field {path}.router_aux_loss_coef")
    rest = {name: value for name, value in tree.items() if name != SECTION}
    attention = _mapping(rest.get("attention", {}), "attention")
    given = _mapping(attention.get("stick_breaking", {}), "attention.stick_breaking")
    rest["attention"] = {**attention, "stick_breaking": {"remainder_bias": True, "head_norm": True, **given}}
    for field, value in fields.items():
        _put(rest, field, value)
    return rest


def _mapping(value: Any, path: str) -> dict:
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must be a mapping of fields, got {value!r}")
    return value


def _read(section: dict, keys: dict, path: str) -> dict[str, Any]:
    """Our fields from one of their mappings."""
    fields: dict[str, Any] = {}
    for name, rule in keys.items():
        if isinstance(rule, _Renamed) and rule.required and name not in section:
            raise ConfigError(f"missing field {path}.{name}")
        if isinstance(rule, _Fixed) and (name in section or rule.required):
            value = section.get(name)
            if name not in section or value not in rule.allowed:
                got = repr(value) if name in section else "missing"
                allowed = " or ".join(map(repr, rule.allowed))
                raise ConfigError(f"{path}.{name} is {got}: must be {allowed} ({rule.why})")
    for name, value in section.items():
        if name not in keys:
            raise ConfigError(f"unknown field {path}.{name} = {value!r} (allowed here: {', '.join(keys)})")
        if isinstance(keys[name], _Renamed):
            field = keys[name].field
            if field in fields:
                raise ConfigError(f"{path}.{name} = {value!r}: {field} is given twice")
            fields[field] = value
    return fields


def _same_block(model: dict, name: str, path: str, num_layers: Any) -> dict:
    """The one block that every layer has."""
    blocks = model.get(name)
    if not isinstance(blocks, list) or len(blocks) != num_layers:
        count = len(blocks) if isinstance(blocks, list) else repr(blocks)
        raise ConfigError(f"{path}.{name}: {count} blocks, must be as many as layers, {num_layers}")
    for index, block in enumerate(blocks):
        if block != blocks[0]:
            raise ConfigError(f"{path}.{name}.{index} differs from {path}.{name}.0: all layers must be the same")
    return _mapping(blocks[0], f"{path}.{name}.0")


def _put(tree: dict, field: str, value: Any) -> None:
    *parents, name = field.split(".")
    for depth, parent in enumerate(parents, 1):
        tree = _mapping(tree.setdefault(parent, {}), ".".join(parents[:depth]))
    if tree.setdefault(name, value) != value:
        raise ConfigError(f"{field} = {tree[name]!r} contradicts {SECTION}, which makes it {value!r}")
