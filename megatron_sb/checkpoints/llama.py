"""Llama models of transformers, as weights for stick-breaking attention.

The names of the weights are those of `StickBreakingForCausalLM`. The attention is softmax with rotary embeddings, which
have no weights. So a Llama model has all weights of a stick-breaking model of its sizes, but they were trained for
another attention: the result needs training. Only a Llama of `without_positions` was trained for this one.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megatron_sb.checkpoints import files
from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.huggingface.attention import has_rotation_disabled
from megatron_sb.validation import InputError

MODEL_TYPE = "llama"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHARED_FIELDS = {  # with the defaults of transformers
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attend_current": StickBreakingConfig.attend_current,  # these two are fields of a Llama with attn_implementation
    "mass_threshold": StickBreakingConfig.mass_threshold,  # "stickbreaking" alone
}
OF_ROTARY_EMBEDDING = ".rotary_emb.inv_freq"  # in old checkpoints; computed from the configuration


def is_stick_breaking(folder: Path) -> bool:
    """Return whether the model has stick-breaking attention, as only one without positions must have."""
    rope, path = files.read_config(folder).get("rope_parameters"), folder / "config.json"
    if not (rope is None or isinstance(rope, dict)):
        raise InputError(f"{path}: rope_parameters must be an object, got {rope!r}")
    with files.naming_config(path):
        return has_rotation_disabled(rope)


def load(folder: Path) -> tuple[StickBreakingConfig, dict[str, Tensor]]:
    """Read the configuration and the weights. Raise ValueError for options that this project's model lacks."""
    fields = files.read_config(folder)
    for name in ("attention_bias", "mlp_bias"):
        files.check_field(fields, name, (False,), False)
    files.check_field(fields, "hidden_act", ("silu",), "silu")
    config = StickBreakingConfig(
        **{name: fields[name] for name in SIZES},
        **{name: fields.get(name, default) for name, default in SHARED_FIELDS.items()},
    )
    weights = files.read_tensors(folder)
    return config, {name: tensor for name, tensor in weights.items() if not name.endswith(OF_ROTARY_EMBEDDING)}
