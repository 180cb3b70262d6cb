"""Distributed checkpoints with Megatron-Core's names. `megatron-sb train` and Megatron-LM's scripts write them.

They hold the weights but not the configuration of the model, so the configuration is a separate argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_sb.checkpoints import files, multipliers
from megatron_sb.checkpoints.layouts import fuse_glu, fuse_qkv, parts_of_qkv, split_experts, split_glu, split_qkv
from megatron_sb.checkpoints.runs import RELEASE, TRACKER, only_stick_breaking_model
from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.megatron.integrity import write_checksums
from megatron_sb.megatron.weights import HEADS, LAYERS, write_attention_kind, write_weights
from megatron_sb.training.config import LayerAttentionConfig, StickBreakingAttentionConfig, TrainingConfig
from megatron_sb.validation import InputError

EMBEDDING = "embedding.word_embeddings.weight"
HALVES = ("gate", "up")  # order of the rows of linear_fc1
OUTER = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
# Name within a layer -> Megatron-Core's names for it. `save` writes the first name; `to_ours` reads any of them.
IN_LAYERS = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "self_attn.gate_proj.weight": ("self_attention.gate_proj.weight",),
    "self_attn.gate_proj.bias": ("self_attention.gate_proj.bias",),
    "self_attn.remainder_bias": ("self_attention.core_attention.remainder_bias",),
    "self_attn.norm_weight": ("self_attention.core_attention.norm_weight",),
    "self_attn.norm_bias": ("self_attention.core_attention.norm_bias",),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
    "mlp.router.weight": ("mlp.router.weight",),
}
QKV, GATE_UP = "self_attention.linear_qkv", "mlp.linear_fc1.weight"
EXPERTS_GATE_UP, EXPERTS_DOWN = (f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2))


def config_of(training: TrainingConfig, attention: LayerAttentionConfig, vocab_size: int) -> StickBreakingConfig:
    """Return the configuration of a model with stick-breaking attention.

    Args:
        training: configuration of the run.
        attention: the model's attention. For softmax attention, the result has the default stick-breaking attention.
        vocab_size: rows of the embedding, including padding.
    """
    sizes = training.model
    if attention.kind == "softmax":
        attention = StickBreakingAttentionConfig()
    return StickBreakingConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        attend_current=attention.attend_current,
        mass_threshold=attention.mass_threshold,
        logits=attention.logits,
        attention_multiplier=attention.scale,
        reach=attention.reach,
        forget_gate=attention.forget_gate,
        remainder_bias=attention.remainder_bias,
        head_norm=attention.head_norm,
        num_experts=sizes.moe and sizes.moe.num_experts,
        num_experts_per_tok=sizes.moe and sizes.moe.top_k,
        initializer_range=sizes.init_std,
        tie_word_embeddings=sizes.tie_word_embeddings,
        max_position_embeddings=max(stage.context_length for stage in training.stages),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), training.data.end_of_document),
    )


def check_one_epsilon(config: StickBreakingConfig) -> None:
    """Raise ValueError if head_norm_eps differs from rms_norm_eps. Megatron-Core has one epsilon for all norms."""
    if config.head_norm:
        files.check_supported(config, {"head_norm_eps": config.rms_norm_eps}, "megatron")


def check_one_kind(kind: str, folder: Path) -> None:
    """Raise ValueError for a model with layers of several kinds or gated delta nets, which no other format has."""
    if kind not in ("stick_breaking", "softmax"):
        raise InputError(
            f"the kind of attention must be 'stick_breaking' or 'softmax' to convert {folder}, got {kind!r}. Use it "
            "where it was trained: in Megatron's scripts (--load), or in the trainer (load_run, initial_checkpoint)."
        )


def attention_of(training: TrainingConfig, folder: Path) -> LayerAttentionConfig:
    """Return the attention of the model that a checkpoint belongs to.

    Args:
        training: configuration of the run.
        folder: folder of the checkpoint. In RUN/MODEL/checkpoints/STEP, MODEL is the name of the model.

    Raises:
        ValueError: if the model has mixed layers, gated delta nets, or softmax attention with forget gates. Or if the
            folder does not name the model, and the run does not have exactly one stick-breaking model.
    """
    model = folder.resolve().parent.parent.name
    if model not in training.attention:
        advice = f"Or keep the checkpoint in RUN/MODEL/checkpoints/STEP, got {folder}."
        model = only_stick_breaking_model(training, advice)
    attention = training.attention[model]
    check_one_kind(attention.kind, folder)
    if attention.kind == "softmax" and attention.forget_gate:
        raise InputError(
            f"attention.{model}.forget_gate must be False to convert {folder}, a model with softmax attention, got "
            "True. Stick-breaking attention has no use for its gates."
        )
    return attention


def to_ours(found: dict[str, Tensor], config: StickBreakingConfig, folder: Path) -> dict[str, Tensor]:
    """Rename and split the weights `found` in a folder for `StickBreakingForCausalLM`.

    Raise ValueError for missing weights, and for weights that the model lacks: other biases, more layers.
    """
    weights = files.Weights(folder, dict(_unstacked(found, folder)))
    hidden, intermediate = config.hidden_size, config.intermediate_size
    qkv_shapes = {"weight": (None, hidden), "bias": (None,)}
    converted = {ours: tensor for ours, theirs in OUTER.items() if (tensor := weights.pop_first(theirs)) is not None}
    for number in range(config.num_hidden_layers):
        theirs, prefix = f"{LAYERS}{number}.", f"model.layers.{number}"
        for ours, names in IN_LAYERS.items():
            if (tensor := weights.pop_first(*(theirs + name for name in names))) is not None:
                converted[f"{prefix}.{ours}"] = tensor
        for part in parts_of_qkv(config):
            name = f"{theirs}{QKV}.{part}"
            fused = weights.pop(name, qkv_shapes[part])
            split = split_qkv(name, fused, config.num_attention_heads, config.num_key_value_heads)
            converted |= {f"{prefix}.self_attn.{name}_proj.{part}": x for name, x in zip("qkv", split, strict=True)}
        if config.num_experts:
            gate_up = weights.pop(theirs + EXPERTS_GATE_UP, (None, 2 * intermediate, hidden))
            down = weights.pop(theirs + EXPERTS_DOWN, (None, hidden, intermediate))
            converted |= split_experts(f"{prefix}.mlp", gate_up, down, HALVES)
        else:
            converted |= split_glu(f"{prefix}.mlp", weights.pop(theirs + GATE_UP, (2 * intermediate, hidden)), HALVES)
    weights.check_all_used()
    return converted


def heads_of(config: StickBreakingConfig) -> dict[str, int]:
    """Return the heads of a model by the names in `HEADS`."""
    return dict(zip(HEADS, (config.num_attention_heads, config.num_key_value_heads, config.head_dim), strict=True))


def save(config: StickBreakingConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a checkpoint of the weights, without optimizer state, for `--load` of Megatron-LM's scripts.

    The weights contain the multipliers. Raise ValueError for options that Megatron-Core's models lack.
    """
    check_one_epsilon(config)
    folded_scale = multipliers.folded(config, "megatron").get("attention_multiplier")
    config, weights = multipliers.fold(config, weights, "megatron")
    layers = [_layer_to_theirs(config, weights, f"model.layers.{n}") for n in range(config.num_hidden_layers)]
    converted = {LAYERS + name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    converted |= {theirs: weights[ours] for ours, theirs in OUTER.items() if ours not in tied}
    (folder / RELEASE).mkdir()
    write_weights(folder / RELEASE, converted, config.num_hidden_layers, config.num_experts)
    write_attention_kind(folder / RELEASE, "stick_breaking", folded_scale, heads_of(config))
    write_checksums(folder / RELEASE)
    (folder / TRACKER).write_text(RELEASE, encoding="utf-8")


def _unstacked(found: dict[str, Tensor], folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield one tensor per layer. Tensors are stacked over layers unless the layers differ from each other.

    Raise ValueError for a stacked tensor without dimensions.
    """
    for name, tensor in found.items():
        of_layer = name.removeprefix(LAYERS)
        if of_layer == name or of_layer.split(".")[0].isdigit():
            yield name, tensor
        elif tensor.dim() == 0:
            problem = f"{name} (must have one row for each layer, got ())"
            files.check_no_weights(folder, "Weights of the wrong shape", [problem])
        else:
            yield from ((f"{LAYERS}{number}.{of_layer}", layer_tensor) for number, layer_tensor in enumerate(tensor))


def _layer_to_theirs(config: StickBreakingConfig, weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    converted = {
        theirs: weights[f"{prefix}.{ours}"] for ours, (theirs, *_) in IN_LAYERS.items() if f"{prefix}.{ours}" in weights
    }
    for part in parts_of_qkv(config):
        q, k, v = (weights[f"{prefix}.self_attn.{name}_proj.{part}"] for name in "qkv")
        converted[f"{QKV}.{part}"] = fuse_qkv(q, k, v, config.num_key_value_heads)
    if config.num_experts:
        names = [f"{prefix}.mlp.experts.{expert}" for expert in range(config.num_experts)]
        converted[EXPERTS_GATE_UP] = torch.stack([fuse_glu(name, weights, HALVES) for name in names])
        converted[EXPERTS_DOWN] = torch.stack([weights[f"{name}.down_proj.weight"] for name in names])
    else:
        converted[GATE_UP] = fuse_glu(f"{prefix}.mlp", weights, HALVES)
    return converted
