"""Megatron-Core's distributed checkpoints, of `megatron-sb train` on GPUs and of Megatron-LM's scripts.

They hold weights but not what the model was: its configuration comes beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_sb.checkpoints import files
from megatron_sb.checkpoints.layouts import fuse_glu, fuse_qkv, split_experts, split_glu, split_qkv
from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.megatron.weights import LAYERS, write_weights
from megatron_sb.training.config import BYTE_VOCAB_SIZE, AttentionConfig, TrainingConfig

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"  # what Megatron-LM finds a checkpoint by
EMBEDDING, HALVES = "embedding.word_embeddings.weight", ("gate", "up")  # halves of linear_fc1
OUTER = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
# Of a layer: ours, and theirs, of which the first is written and any is read.
IN_LAYERS = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "self_attn.remainder_bias": ("self_attention.core_attention.remainder_bias",),
    "self_attn.norm_weight": ("self_attention.core_attention.norm_weight",),
    "self_attn.norm_bias": ("self_attention.core_attention.norm_bias",),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
    "mlp.router.weight": ("mlp.router.weight",),
}
QKV, WIDE = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
EXPERTS_WIDE, EXPERTS_BACK = (f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2))


def config_of(training: TrainingConfig, folder: Path, vocab_size: int) -> StickBreakingConfig:
    """The model of a training configuration that a checkpoint's folder is of.

    vocab_size: rows of its embedding, with padding. Raises ValueError where it is a model of softmax attention, or
    could be one of several.
    """
    sizes, sticks = training.model, _attention_of(training, folder)
    end = BYTE_VOCAB_SIZE - 1 if training.data.kind == "text" else training.data.end_of_document
    return StickBreakingConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        attend_current=sticks.attend_current,
        mass_threshold=sticks.mass_threshold,
        remainder_bias=sticks.remainder_bias,
        head_norm=sticks.head_norm,
        num_experts=sizes.moe and sizes.moe.num_experts,
        num_experts_per_tok=sizes.moe and sizes.moe.top_k,
        initializer_range=sizes.init_std,
        tie_word_embeddings=sizes.tie_word_embeddings,
        max_position_embeddings=max(stage.context_length for stage in training.stages),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


def require_one_epsilon(config: StickBreakingConfig) -> None:
    """Raise ValueError for a head norm with another epsilon than the layers' norms: Megatron has one for all."""
    if config.head_norm:
        files.require(config, {"head_norm_eps": config.rms_norm_eps}, "Megatron-Core's")


def _attention_of(training: TrainingConfig, folder: Path) -> AttentionConfig:
    """That of the model whose run a checkpoint lies in (RUN/MODEL/checkpoints/STEP); of the only one that breaks sticks
    among those trained, where the folder is elsewhere.
    """
    model = folder.resolve().parent.parent.name
    if model not in training.attention:
        found = [name for name in training.compare if training.breaks_sticks(name)]
        if len(found) != 1:
            raise ValueError(
                f"compare = {list(training.compare)} has {len(found)} stick-breaking models, and {folder} is in the "
                "folder of none (MODEL/checkpoints/STEP); one is needed"
            )
        (model,) = found
    attention = training.attention[model]
    for name, only in (("kind", "stick_breaking"), ("logits", "dot"), ("forget_gate", False)):
        if (value := getattr(attention, name)) != only:
            raise ValueError(f"attention.{model}.{name} = {value!r} of {folder} is in no other format; {only!r} is")
    return attention


def newest(folder: Path) -> Path:
    """The checkpoint itself, where a folder is one of Megatron-LM's that names its newest; else the folder."""
    tracker = folder / TRACKER
    if not tracker.exists():
        return folder
    name = tracker.read_text(encoding="utf-8").strip()
    return folder / (name if name == RELEASE else f"iter_{int(name):07d}")


def to_ours(found: dict[str, Tensor], config: StickBreakingConfig, folder: Path) -> dict[str, Tensor]:
    """Weights of `StickBreakingForCausalLM` of those `found` in a folder.

    Raises ValueError where a weight is missing or has no place in the configuration's model (biases, forget gates,
    more layers than it has).
    """
    if any(".gate_proj." in name for name in found):
        raise ValueError(f"{folder} has forget gates (gate_proj), which are in no other format")
    weights = files.Weights(folder, dict(_unstacked(found)))
    made = {ours: tensor for ours, theirs in OUTER.items() if (tensor := weights.find(theirs)) is not None}
    for number in range(config.num_hidden_layers):
        theirs, prefix = f"{LAYERS}{number}.", f"model.layers.{number}"
        for ours, names in IN_LAYERS.items():
            if (tensor := weights.find(*(theirs + name for name in names))) is not None:
                made[f"{prefix}.{ours}"] = tensor
        q, k, v = split_qkv(weights.take(theirs + QKV), config.num_attention_heads, config.num_key_value_heads)
        made |= {f"{prefix}.self_attn.{name}_proj.weight": x for name, x in (("q", q), ("k", k), ("v", v))}
        if config.num_experts:
            wide, back = (weights.take(theirs + name) for name in (EXPERTS_WIDE, EXPERTS_BACK))
            made |= split_experts(f"{prefix}.mlp", wide, back, HALVES)
        else:
            made |= split_glu(f"{prefix}.mlp", weights.take(theirs + WIDE), HALVES)
    weights.refuse_rest()
    return made


def save(config: StickBreakingConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a checkpoint of weights alone, as Megatron-LM's scripts --load it.

    Raises ValueError for what Megatron-Core's models do not have.
    """
    multipliers = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
    files.require(config, multipliers | {"attention_multiplier": None}, "Megatron-Core's")
    require_one_epsilon(config)
    layers = [_layer_to_theirs(config, weights, f"model.layers.{n}") for n in range(config.num_hidden_layers)]
    made = {LAYERS + name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    made |= {theirs: weights[ours] for ours, theirs in OUTER.items() if ours not in tied}
    (folder / RELEASE).mkdir()
    write_weights(folder / RELEASE, made, config.num_hidden_layers, config.num_experts)
    (folder / TRACKER).write_text(RELEASE, encoding="utf-8")


def _unstacked(found: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every layer's tensors under names of their own, as they are already where layers differ among each other."""
    for name, tensor in found.items():
        of_layer = name.removeprefix(LAYERS)
        if of_layer == name or of_layer.split(".")[0].isdigit():
            yield name, tensor
        else:
            yield from ((f"{LAYERS}{number}.{of_layer}", of_one) for number, of_one in enumerate(tensor))


def _layer_to_theirs(config: StickBreakingConfig, weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    made = {names[0]: weights[f"{prefix}.{ours}"] for ours, names in IN_LAYERS.items() if f"{prefix}.{ours}" in weights}
    q, k, v = (weights[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv")
    made[QKV] = fuse_qkv(q, k, v, config.num_key_value_heads)
    if config.num_experts:
        names = [f"{prefix}.mlp.experts.{expert}" for expert in range(config.num_experts)]
        made[EXPERTS_WIDE] = torch.stack([fuse_glu(name, weights, HALVES) for name in names])
        made[EXPERTS_BACK] = torch.stack([weights[f"{name}.down_proj.weight"] for name in names])
    else:
        made[WIDE] = fuse_glu(f"{prefix}.mlp", weights, HALVES)
    return made
