"""flash-linear-attention's `stickbreaking_attn` models (0.6.0): names differ, weights are the same.

Its attention is causal without a query's own key unless attend_current, and drops the mass that is left.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megatron_sb.checkpoints import files
from megatron_sb.huggingface import StickBreakingConfig

MODEL_TYPE = "stickbreaking_attn"
SAME = {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "initializer_range": 0.02}
IDS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
RENAMED = (("embed_tokens", "embeddings"), ("input_layernorm", "attn_norm"), ("self_attn", "attn"))
RENAMED += (("post_attention_layernorm", "mlp_norm"),)
MULTIPLE = 256  # what the size of its MLPs is rounded up to where it is not given


def load(folder: Path) -> tuple[StickBreakingConfig, dict[str, Tensor]]:
    """Configuration and weights of a model of its. Raises ValueError for options that ours does not have."""
    found = files.read_config(folder)
    for name in ("qk_norm", "qkv_bias"):
        files.take(found, name, (False,), False)
    files.take(found, "hidden_act", ("swish", "silu"), "swish")
    hidden_size = found.get("hidden_size", SAME["hidden_size"])
    wide = int(hidden_size * (found.get("hidden_ratio") or 4) * 2 / 3)
    config = StickBreakingConfig(
        **{name: found.get(name, default) for name, default in (SAME | IDS).items()},
        intermediate_size=found.get("intermediate_size") or -(-wide // MULTIPLE) * MULTIPLE,
        num_attention_heads=found.get("num_heads", 32),
        num_key_value_heads=found.get("num_kv_heads"),
        attend_current=found.get("attend_current", False),
        rms_norm_eps=found.get("norm_eps", 1e-6),
        tie_word_embeddings=found.get("tie_word_embeddings", False),
    )
    return config, {_renamed(name, ours=True): tensor for name, tensor in files.read_tensors(folder).items()}


def save(config: StickBreakingConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a model of its. Raises ValueError for what its models do not have."""
    fixed = {
        "remainder_bias": False,
        "head_norm": False,
        "num_experts": None,
        "attention_multiplier": None,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "head_dim": config.hidden_size / config.num_attention_heads,
    }
    files.require(config, fixed, "flash-linear-attention's")
    fields = {name: getattr(config, name) for name in (*SAME, *IDS, "attend_current", "tie_word_embeddings")}
    fields |= {
        "architectures": ["StickBreakingAttentionForCausalLM"],
        "model_type": MODEL_TYPE,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "hidden_act": "swish",
        "norm_eps": config.rms_norm_eps,
        "qkv_bias": False,
        "qk_norm": False,
        "use_cache": False,
    }
    files.write(folder, fields, {_renamed(name, ours=False): tensor for name, tensor in weights.items()})


def _renamed(name: str, *, ours: bool) -> str:
    for of_ours, of_theirs in RENAMED:
        old, new = (of_theirs, of_ours) if ours else (of_ours, of_theirs)
        name = name.replace(f".{old}.", f".{new}.")
    return name
