"""The format of flash-linear-attention's `stickbreaking_attn` models (0.6.0).

Only the names of the weights differ from `StickBreakingForCausalLM`. Its attention is causal and excludes a query's
own key unless attend_current is set. It does not use the mass.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megatron_sb.checkpoints import files, multipliers
from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.validation import check_counts

MODEL_TYPE = "stickbreaking_attn"
SHARED_FIELDS = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "initializer_range": 0.02,
    "max_position_embeddings": StickBreakingConfig.max_position_embeddings,  # fla keeps it, and does not use it
}
IDS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
RENAMED = (  # ours, theirs
    ("embed_tokens", "embeddings"),
    ("input_layernorm", "attn_norm"),
    ("self_attn", "attn"),
    ("post_attention_layernorm", "mlp_norm"),
)
INTERMEDIATE_SIZE_MULTIPLE = 256  # flash-linear-attention rounds a default intermediate_size up to a multiple of this


def load(folder: Path) -> tuple[StickBreakingConfig, dict[str, Tensor]]:
    """Read the configuration and the weights. Raise ValueError for options that this project's model lacks."""
    fields = files.read_config(folder)
    if fields.get("max_position_embeddings", 0) is None:  # as other models of fla write it
        del fields["max_position_embeddings"]
    files.check_field(fields, "qk_norm", (False,), False)
    files.check_field(fields, "hidden_act", ("swish", "silu"), "swish")
    hidden_size = fields.get("hidden_size", SHARED_FIELDS["hidden_size"])
    check_counts({"hidden_size": hidden_size})
    multiple = INTERMEDIATE_SIZE_MULTIPLE
    default_size = -(-int(hidden_size * (fields.get("hidden_ratio") or 4) * 2 / 3) // multiple) * multiple
    config = StickBreakingConfig(
        **{name: fields.get(name, default) for name, default in (SHARED_FIELDS | IDS).items()},
        intermediate_size=fields.get("intermediate_size") or default_size,
        num_attention_heads=fields.get("num_heads", 32),
        num_key_value_heads=fields.get("num_kv_heads"),
        attend_current=fields.get("attend_current", False),
        qkv_bias=fields.get("qkv_bias", False),
        rms_norm_eps=fields.get("norm_eps", 1e-6),
        tie_word_embeddings=fields.get("tie_word_embeddings", False),
    )
    return config, {_to_our_name(name): tensor for name, tensor in files.read_tensors(folder).items()}


def save(config: StickBreakingConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """Write config.json and weights, with multipliers folded. Raise ValueError for options that this format lacks."""
    fixed_fields = {
        "remainder_bias": False,
        "head_norm": False,
        "num_experts": None,
        "head_dim": files.default_head_dim(config),
        **files.WITHOUT_VARIANTS,
    }
    files.check_supported(config, fixed_fields, "fla")
    config, weights = multipliers.fold(config, weights, "fla")
    names = (*SHARED_FIELDS, *IDS, "attend_current", "qkv_bias", "tie_word_embeddings")
    fields = {name: getattr(config, name) for name in names} | {
        "architectures": ["StickBreakingAttentionForCausalLM"],
        "model_type": MODEL_TYPE,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "hidden_act": "swish",
        "norm_eps": config.rms_norm_eps,
        "qk_norm": False,
        "use_cache": False,
    }
    files.write(folder, fields, {_to_their_name(name): tensor for name, tensor in weights.items()})


def _to_our_name(name: str) -> str:
    for ours, theirs in RENAMED:
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def _to_their_name(name: str) -> str:
    for ours, theirs in RENAMED:
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name
