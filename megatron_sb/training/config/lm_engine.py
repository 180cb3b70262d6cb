"""Translation of the model section of lm-engine's and dolomite-engine's YAML files.

`model_args.pretrained_config` describes a model by a mapping and two lists of blocks: a sequence mixer and an MLP for
each layer. There are three kinds of keys. Some are translated to a field of the trainer. Some must have the value that
the trainer's models have. Some are ignored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_sb.training.config.types import ConfigError

SECTION = "model_args"


@dataclasses.dataclass(frozen=True)
class _Renamed:
    """The trainer's field with the same meaning. required: the key must be in the file, because the defaults differ."""

    field: str
    required: bool = False


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """The values that the trainer's models have, and why.

    Attributes:
        values: the values that the key must have one of.
        why: the reason, for the error message.
        required: the key must be in the file, because lm-engine's default is another value.
    """

    values: tuple
    why: str
    required: bool = False


_IGNORED = None  # has no effect on training

_NO_DROPOUT = _Fixed((0,), "there is no dropout")
_NO_BIAS = _Fixed((False,), "linear layers have no bias", required=True)
_NO_MULTIPLIER = _Fixed((None, 1), "there are no muP multipliers")

_ARGUMENT_KEYS = {
    "pretrained_config": _IGNORED,  # `translate` reads it
    "model_name": _Fixed((None,), "give pretrained_config"),
    "model_class": _Fixed(("AutoModelForCausalLM",), "models are decoders"),
    "trust_remote_code": _IGNORED,
    "efficient_initialization": _IGNORED,
    "use_padding_free_transformer": _IGNORED,
    "reset_attention_mask": _Fixed((True,), "documents do not attend to each other"),
    "reset_position_ids": _IGNORED,
}
_MODEL_KEYS = {
    "model_type": _Fixed(("gpt_base",), "the only architecture"),
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
    "position_embedding_type": _Fixed(("nope",), "stick-breaking needs no position embedding", required=True),
    "normalization_function": _Fixed(("rmsnorm",), "layers are normalised by RMSNorm", required=True),
    "layer_norm_epsilon": _Fixed((1e-5,), "the value of the trainer's models"),
    "embedding_dropout": _NO_DROPOUT,
    "init_method": _Fixed(("normal",), "initial weights are normal"),
    "embedding_init_method": _Fixed(("normal",), "initial weights are normal"),
    "use_depth_scaled_init": _Fixed((True,), "initial weights of output layers are scaled by the depth"),
    "m_emb": _NO_MULTIPLIER,
    "m_width": _NO_MULTIPLIER,
    "m_residual": _NO_MULTIPLIER,
    "sequence_mixer_blocks": _IGNORED,  # `translate` reads these two
    "mlp_blocks": _IGNORED,
}
_MIXER_KEYS = {
    "sequence_mixer_type": _Fixed(("stickbreaking_attention",), "the attention of every layer", required=True),
    "num_attention_heads": _Renamed("model.num_heads"),
    "num_key_value_heads": _Renamed("model.num_kv_heads"),
    "head_dim": _Renamed("model.head_dim"),
    "add_bias": _NO_BIAS,
    "dropout": _NO_DROPOUT,
    "softmax_dropout": _NO_DROPOUT,
    "attention_head_type": _IGNORED,  # follows from num_key_value_heads
    "attention_multiplier": _Fixed((None,), "logits are scaled by 1 / sqrt(head_dim)"),
    "attention_multiplier_method": _Fixed((None, "1 / sqrt(head_dim)"), "the scale of the logits"),
    "attention_gate": _Fixed((False,), "there is no gate"),
    "exclusive_self_attention": _Fixed((False,), "a query attends to every older key"),
    "sliding_window": _Fixed((None,), "a query attends to every older key"),
}
_MLP_KEYS = {
    "mlp_type": _Fixed(("MLP", "MoE"), "the feed-forward layers", required=True),
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
    "normalized_topk": _Fixed((True,), "the weights of the chosen experts sum to 1"),
}


def translate(tree: Any) -> Any:
    """Translate `model_args` of a configuration, if present, to `model`, `attention` and `data`.

    lm-engine's stick-breaking layers always have the remainder bias and the head norm. Both are enabled unless the
    file's own `attention.stick_breaking` sets them.

    Raises:
        ConfigError: A key is unknown, or has a value that the trainer's models do not have. The blocks of two layers
            differ. A field has two different values.
    """
    if not isinstance(tree, dict) or SECTION not in tree:
        return tree
    arguments = _mapping(tree[SECTION], SECTION)
    _read(arguments, _ARGUMENT_KEYS, SECTION)
    path = f"{SECTION}.pretrained_config"
    model = _mapping(arguments.get("pretrained_config"), path)
    fields = _read(model, _MODEL_KEYS, path)
    num_layers = fields.get("model.num_layers")
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        got = "nothing" if num_layers is None else repr(num_layers)
        raise ConfigError(f"{path}.num_layers must be the number of layers, an integer of at least 1, got {got}")
    mixer = _same_block(model, "sequence_mixer_blocks", path, num_layers)
    fields |= _read(mixer, _MIXER_KEYS, f"{path}.sequence_mixer_blocks.0")
    mlp = _same_block(model, "mlp_blocks", path, num_layers)
    experts = mlp.get("mlp_type") == "MoE"
    fields |= _read(mlp, _EXPERT_KEYS if experts else _MLP_KEYS, f"{path}.mlp_blocks.0")
    if not experts:  # lm-engine's files also have it for dense models
        fields.pop("model.moe.aux_loss_coefficient", None)
    elif "model.moe.aux_loss_coefficient" not in fields:
        raise ConfigError(f"{path}.router_aux_loss_coef is required")
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
    """Return the trainer's fields of one of lm-engine's mappings."""
    fields: dict[str, Any] = {}
    for name, rule in keys.items():
        if isinstance(rule, _Renamed) and rule.required and name not in section:
            raise ConfigError(f"{path}.{name} is required")
        if isinstance(rule, _Fixed) and (name in section or rule.required):
            value = section.get(name)
            if name not in section or value not in rule.values:
                got = repr(value) if name in section else "nothing"
                values = " or ".join(map(repr, rule.values))
                raise ConfigError(f"{path}.{name} must be {values} ({rule.why}), got {got}")
    for name, value in section.items():
        if name not in keys:
            raise ConfigError(f"unknown field {path}.{name}, got {value!r}. Known fields: {', '.join(keys)}")
        if isinstance(keys[name], _Renamed):
            field = keys[name].field
            if field in fields:
                raise ConfigError(f"{path}.{name} = {value!r} gives {field} twice")
            fields[field] = value
    return fields


def _same_block(model: dict, name: str, path: str, num_layers: int) -> dict:
    """Return the block that all layers have."""
    blocks = model.get(name)
    if not isinstance(blocks, list) or len(blocks) != num_layers:
        got = f"{len(blocks)} blocks" if isinstance(blocks, list) else repr(blocks)
        raise ConfigError(f"{path}.{name} must be {num_layers} blocks, one for each layer, got {got}")
    for index, block in enumerate(blocks):
        if block != blocks[0]:
            raise ConfigError(
                f"{path}.{name}.{index} must be equal to {path}.{name}.0, because all layers are the same"
            )
    return _mapping(blocks[0], f"{path}.{name}.0")


def _put(tree: dict, field: str, value: Any) -> None:
    *parents, name = field.split(".")
    for depth, parent in enumerate(parents, 1):
        tree = _mapping(tree.setdefault(parent, {}), ".".join(parents[:depth]))
    if tree.setdefault(name, value) != value:
        raise ConfigError(f"{field} must be {value!r}, as {SECTION} has it, got {tree[name]!r}")
