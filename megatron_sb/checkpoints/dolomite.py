"""The Dolomite format (dolomite-engine, later lm-engine) of the published stick-breaking models.

Three layouts are read. `save` writes "flat". "patched" is that of examples/lm_engine, which adds stick-breaking
attention to lm-engine's code of 2026.

| | flat | blocks | patched |
| --- | --- | --- | --- |
| in use | 2024-09 to 2025-02 | 2025-02 to 2025-09 | since 2026-11 |
| model_type | sb_dolomite, stickbreaking, moe_stickbreaking | gpt_dolomite, gpt_base | gpt_base |
| config.json has | n_embd | sequence_mixer_blocks, mlp_blocks | also reach in sequence_mixer_blocks |
| modules of a layer | attn, and mlp or moe | sequence_mixer, mlp_block | sequence_mixer, mlp_block |
| head_bias and norm | optional | always | optional |
| bias of c_attn | optional (add_qkv_bias) | not read: with add_bias, c_proj has one too | as in blocks |
| KV heads, if fewer than query heads | tiled | tiled or grouped | grouped |
| rows of c_fc | up, then gate | up, then gate | pairs: gate, up |

Tiled: query head n reads KV head n % num_kv_heads. Grouped: query head n reads KV head n // (num_heads / num_kv_heads).
Code of 2025-03 and later tiles KV heads in padded batches and groups them in batches without padding. The files do not
record which of the two a model was trained with, so `load` has an argument for it. `save` writes tiled KV heads and
records them in the field KV_HEADS, which only this module reads.

In all layouts `c_attn` is fused as in `layouts.fuse_qkv`.
The oldest models have sb_remainder but no head_bias: they add the mass times the value at the query's own position.
`load` rejects them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_sb.checkpoints import files
from megatron_sb.checkpoints.layouts import (
    fuse_glu,
    fuse_qkv,
    parts_of_qkv,
    reorder_heads,
    split_experts,
    split_glu,
    split_qkv,
    tiled_head_order,
)
from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.validation import InputError, check_counts

MODEL_TYPES = ("sb_dolomite", "stickbreaking", "moe_stickbreaking", "gpt_dolomite", "gpt_base")
MULTIPLIERS = {"embedding_multiplier": "m_emb", "residual_multiplier": "m_residual", "logits_scaling": "m_width"}
KV_HEADS = "kv_head_layout"  # field of config.json in folders that `save` wrote
KV_HEAD_LAYOUTS = ("grouped", "tiled")
IDS = {"pad_token_id": 50256, "bos_token_id": 50256, "eos_token_id": 50256}
HALVES = ("up", "gate")  # order of the rows of c_fc, except in the layout "patched"
OUTER = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "lm_head.weight": "lm_head.weight",
}
HEAD_VECTORS = {"remainder_bias": "head_bias", "norm_weight": "norm.weight", "norm_bias": "norm.bias"}


def load(folder: Path, kv_heads: str | None = None) -> tuple[StickBreakingConfig, dict[str, Tensor]]:
    """Read the configuration and the weights of any of the layouts.

    Args:
        folder: folder of the model.
        kv_heads: one of KV_HEAD_LAYOUTS. Required if 1 < num_key_value_heads < num_attention_heads, unless `save` wrote
            the folder or its layout is "patched". Default None.

    Returns:
        The configuration, and the weights with the names, shapes and grouped KV heads of `StickBreakingForCausalLM`.

    Raises:
        ValueError: if the model has options that `StickBreakingForCausalLM` lacks, weights are missing or unexpected,
            or kv_heads is missing or differs from what the folder records.
    """
    found = files.read_config(folder)
    flat = "n_embd" in found
    fields = _flat_fields(found) if flat else _block_fields(found)
    patched = not flat and "reach" in found["sequence_mixer_blocks"][0]
    layout = _kv_head_layout("grouped" if patched else found.get(KV_HEADS), kv_heads, fields)
    tensors = files.read_tensors(folder)
    for field, name in MULTIPLIERS.items():
        fields[field] = 1.0 if (value := found.get(name)) is None else value  # 0 is a multiplier, too
    fields |= {name: found.get(name, default) for name, default in IDS.items()}
    if flat:  # config.json does not record these two
        for field, vector in (("remainder_bias", "head_bias"), ("head_norm", "norm.weight")):
            fields[field] = any(name.endswith(f".{vector}") for name in tensors)
    if flat and found.get("sb_remainder", True) and not fields["remainder_bias"]:
        raise InputError(
            "config.json: sb_remainder must be False for weights without head_bias, got True. These models add the "
            "mass times the value at the query's own position, which cannot be converted."
        )
    config = StickBreakingConfig(
        **fields,
        vocab_size=found["vocab_size"],
        rms_norm_eps=found.get("layer_norm_epsilon", 1e-5),
        initializer_range=found.get("initializer_range", 0.02),
        tie_word_embeddings=found.get("tie_word_embeddings", True),
    )
    modules = _modules(tensors, config)
    if patched:
        for name, x in tensors.items():
            if name.endswith("c_fc.weight") and x.dim() > 1:
                tensors[name] = _as_halves(x)
    return config, _to_ours(config, files.Weights(folder, tensors), modules, layout)


def save(config: StickBreakingConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the "flat" layout. Raise ValueError for options that this format lacks."""
    fixed_fields = {"attend_current": False, "head_dim": files.default_head_dim(config)}
    fixed_fields |= files.WITHOUT_VARIANTS
    if config.head_norm:
        fixed_fields["head_norm_eps"] = 1e-5
    files.check_supported(config, fixed_fields, "dolomite")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_type = "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa"
    fields = {
        "model_type": "moe_stickbreaking" if config.num_experts else "stickbreaking",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_position_embeddings,
        "n_embd": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": heads,
        "num_key_value_heads": kv_heads,
        "n_inner": config.intermediate_size,
        "activation_function": "swiglu",
        "attention_head_type": head_type,
        "attention_multiplier": config.attention_multiplier,
        "normalization_function": "rmsnorm",
        "layer_norm_epsilon": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "position_embedding_type": "nope",
        "add_bias": False,
        "add_qkv_bias": config.qkv_bias,
        "sb_remainder": config.remainder_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: None if (value := getattr(config, field)) == 1 else value for field, name in MULTIPLIERS.items()},
        **{name: getattr(config, name) for name in IDS},
    }
    if head_type == "gqa":
        fields[KV_HEADS] = "tiled"
    if config.num_experts:
        fields |= {"num_experts": config.num_experts, "num_experts_per_tok": config.num_experts_per_tok}
    files.write(folder, fields, _to_theirs(config, weights))


def _flat_fields(found: dict) -> dict:
    files.check_field(found, "activation_function", ("swiglu",), "gelu_pytorch_tanh")
    files.check_field(found, "normalization_function", ("rmsnorm",), "layernorm")
    # "rope" is accepted because these models never applied it.
    files.check_field(found, "position_embedding_type", ("nope", "rope"), "learned_absolute")
    files.check_field(found, "add_bias", (False,), True)
    for name in ("forget_gate", "use_aux_free_moe"):
        files.check_field(found, name, (False,), False)
    files.check_field(found, "scale_attn_weights", (True,), True)
    files.check_field(found, "shared_n_inner", (None,))
    by_type = {"mha": found["n_head"], "mqa": 1}
    kv_heads = found.get("num_key_value_heads") or by_type.get(found.get("attention_head_type", "mqa"))
    if kv_heads is None:  # "gqa"
        raise KeyError("num_key_value_heads")
    experts = {name: found.get(name, default) for name, default in (("num_experts", 8), ("num_experts_per_tok", 2))}
    return {
        "hidden_size": found["n_embd"],
        "num_hidden_layers": found["n_layer"],
        "num_attention_heads": found["n_head"],
        "num_key_value_heads": kv_heads,
        "intermediate_size": found.get("n_inner") or 4 * found["n_embd"],
        "qkv_bias": found.get("add_qkv_bias", False),
        "attention_multiplier": found.get("attention_multiplier"),
        "max_position_embeddings": found.get("n_positions", 1024),
        **(experts if found.get("model_type", "").startswith("moe") else {}),
    }


def _block_fields(found: dict) -> dict:
    files.check_field(found, "normalization_function", ("rmsnorm",), "layernorm")
    files.check_field(found, "position_embedding_type", ("nope", "rope"), "learned_absolute")
    mixer, mlp = (_one_of(found, name) for name in ("sequence_mixer_blocks", "mlp_blocks"))
    files.check_field(mixer, "sequence_mixer_type", ("stickbreaking_attention",), "softmax_attention")
    files.check_field(mlp, "mlp_type", ("MLP", "MoE"), "MLP")
    files.check_field(mlp, "activation_function", ("swiglu",), "gelu_pytorch_tanh")
    for block in (mixer, mlp):
        files.check_field(block, "add_bias", (False,), True)
    for name in ("shared_intermediate_size", "shared_expert_gating"):
        files.check_field(mlp, name, (None, False))
    files.check_field(mlp, "normalized_topk", (True,), True)
    has_experts = mlp.get("mlp_type") == "MoE"
    # The layout "patched" has this field.
    files.check_field(mixer, "attention_multiplier_method", (None, "1 / sqrt(head_dim)", "1 / head_dim"))
    heads = mixer.get("num_attention_heads") or found["num_attention_heads"]
    check_counts({"hidden_size": found["hidden_size"], "num_attention_heads": heads})
    head_dim = mixer.get("head_dim") or found["hidden_size"] // heads
    inverse = mixer.get("attention_multiplier_method") == "1 / head_dim"
    return {
        "hidden_size": found["hidden_size"],
        "num_hidden_layers": found["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": mixer["num_key_value_heads"],
        "head_dim": head_dim,
        "reach": mixer.get("reach"),
        "remainder_bias": mixer.get("remainder_bias", True),
        "head_norm": mixer.get("head_norm", True),
        "intermediate_size": mlp["intermediate_size"],
        "attention_multiplier": 1 / head_dim if inverse else mixer.get("attention_multiplier"),
        "max_position_embeddings": found.get("max_position_embeddings", 1024),
        **({name: mlp[name] for name in ("num_experts", "num_experts_per_tok")} if has_experts else {}),
    }


def _kv_head_layout(recorded: str | None, given: str | None, fields: dict) -> str:
    """Return which KV heads the query heads read, one of KV_HEAD_LAYOUTS.

    Raise ValueError if the choice is missing, unknown or contradicts the recorded one.
    """
    heads = fields["num_attention_heads"]
    kv_heads = fields["num_key_value_heads"] or heads
    choices = " or ".join(map(repr, KV_HEAD_LAYOUTS))
    if given not in (None, *KV_HEAD_LAYOUTS):
        raise InputError(f"kv_heads must be {choices}, got {given!r}.")
    if recorded not in (None, *KV_HEAD_LAYOUTS):
        raise InputError(f"config.json: {KV_HEADS} must be {choices}, got {recorded!r}.")
    if recorded and given and given != recorded:
        raise InputError(f"kv_heads must be {recorded!r}, which config.json records, got {given!r}.")
    layout = given or recorded
    if layout is None and 1 < kv_heads < heads:
        raise InputError(
            f"kv_heads must be {choices} (--kv-heads) for {heads} query heads and {kv_heads} KV heads, got None. "
            "config.json does not record it, and the two give different models: see docs/checkpoints.md."
        )
    return layout or "grouped"


def _as_halves(rows: Tensor) -> Tensor:
    """Return the rows of a `c_fc` of pairs (gate, up), (..., 2 * intermediate, hidden), in the order of HALVES."""
    return torch.cat([rows[..., 1::2, :], rows[..., ::2, :]], dim=-2)


def _one_of(found: dict, name: str) -> dict:
    """Return the block that all layers share. Raise ValueError if layers differ."""
    blocks = found[name]
    if not (isinstance(blocks, list) and blocks and all(isinstance(block, dict) for block in blocks)):
        raise InputError(f"config.json: {name} must be a list of objects, one for each layer, got {blocks!r}.")
    first, *others = blocks
    for number, block in enumerate(others, 1):
        if block != first:
            raise InputError(
                f"config.json: all layers must have the same {name}, got {name}[0] = {first} and "
                f"{name}[{number}] = {block}."
            )
    return first


def _modules(tensors: dict[str, Tensor], config: StickBreakingConfig) -> tuple[str, str]:
    """Return the names of the attention module and of the MLP module in a layer."""
    if "transformer.h.0.sequence_mixer.c_attn.weight" in tensors:
        return "sequence_mixer", "mlp_block"
    return "attn", "moe" if config.num_experts else "mlp"


def _to_ours(
    config: StickBreakingConfig, weights: files.Weights, modules: tuple[str, str], kv_head_layout: str
) -> dict[str, Tensor]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    order = tiled_head_order(heads, kv_heads) if kv_head_layout == "tiled" else torch.arange(heads)
    attn, mlp = modules
    hidden, width, intermediate = config.hidden_size, heads * config.head_dim, config.intermediate_size
    stack = (None,) if config.num_experts else ()
    qkv_shapes = {"weight": (None, hidden), "bias": (None,)}
    converted = {ours: tensor for ours, theirs in OUTER.items() if (tensor := weights.pop_first(theirs)) is not None}
    for number in range(config.num_hidden_layers):
        theirs, ours = f"transformer.h.{number}", f"model.layers.{number}"
        converted[f"{ours}.input_layernorm.weight"] = weights.pop(f"{theirs}.ln_1.weight")
        converted[f"{ours}.post_attention_layernorm.weight"] = weights.pop(f"{theirs}.ln_2.weight")
        for part in parts_of_qkv(config):
            c_attn = f"{theirs}.{attn}.c_attn.{part}"
            q, k, v = split_qkv(c_attn, weights.pop(c_attn, qkv_shapes[part]), heads, kv_heads)
            for name, tensor in (("q", reorder_heads(q, order)), ("k", k), ("v", v)):
                converted[f"{ours}.self_attn.{name}_proj.{part}"] = tensor
        o = weights.pop(f"{theirs}.{attn}.c_proj.weight", (hidden, width))
        converted[f"{ours}.self_attn.o_proj.weight"] = reorder_heads(o, order, 1)
        for name, vector in HEAD_VECTORS.items():
            if f"{theirs}.{attn}.{vector}" in weights:
                tensor = weights.pop(f"{theirs}.{attn}.{vector}", (width,), (heads, config.head_dim))
                converted[f"{ours}.self_attn.{name}"] = reorder_heads(tensor.flatten(), order)
        gate_up = weights.pop(f"{theirs}.{mlp}.c_fc.weight", (*stack, 2 * intermediate, hidden))
        down = weights.pop(f"{theirs}.{mlp}.c_proj.weight", (*stack, hidden, intermediate))
        if config.num_experts:
            converted[f"{ours}.mlp.router.weight"] = weights.pop(f"{theirs}.{mlp}.gate.weight")
            converted |= split_experts(f"{ours}.mlp", gate_up, down, HALVES)
        else:
            converted |= split_glu(f"{ours}.mlp", gate_up, HALVES) | {f"{ours}.mlp.down_proj.weight": down}
    weights.check_all_used()
    return converted


def _to_theirs(config: StickBreakingConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    order = tiled_head_order(heads, kv_heads).argsort()
    attn, mlp = _modules({}, config)
    converted = {theirs: weights[ours] for ours, theirs in OUTER.items() if ours in weights}
    for number in range(config.num_hidden_layers):
        theirs, ours = f"transformer.h.{number}", f"model.layers.{number}"
        converted[f"{theirs}.ln_1.weight"] = weights[f"{ours}.input_layernorm.weight"]
        converted[f"{theirs}.ln_2.weight"] = weights[f"{ours}.post_attention_layernorm.weight"]
        for part in parts_of_qkv(config):
            q, k, v = (weights[f"{ours}.self_attn.{name}_proj.{part}"] for name in "qkv")
            converted[f"{theirs}.{attn}.c_attn.{part}"] = fuse_qkv(reorder_heads(q, order), k, v, kv_heads)
        o = weights[f"{ours}.self_attn.o_proj.weight"]
        converted[f"{theirs}.{attn}.c_proj.weight"] = reorder_heads(o, order, 1)
        for name, vector in HEAD_VECTORS.items():
            if (tensor := weights.get(f"{ours}.self_attn.{name}")) is not None:
                tensor = reorder_heads(tensor, order)
                converted[f"{theirs}.{attn}.{vector}"] = tensor.view(heads, -1) if vector == "head_bias" else tensor
        if config.num_experts:
            converted[f"{theirs}.{mlp}.gate.weight"] = weights[f"{ours}.mlp.router.weight"]
            names = [f"{ours}.mlp.experts.{expert}" for expert in range(config.num_experts)]
            gate_up = torch.stack([fuse_glu(name, weights, HALVES) for name in names])
            down = torch.stack([weights[f"{name}.down_proj.weight"] for name in names])
        else:
            gate_up, down = fuse_glu(f"{ours}.mlp", weights, HALVES), weights[f"{ours}.mlp.down_proj.weight"]
        converted[f"{theirs}.{mlp}.c_fc.weight"], converted[f"{theirs}.{mlp}.c_proj.weight"] = gate_up, down
    return converted
