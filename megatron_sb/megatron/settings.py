"""Settings of Megatron that stick-breaking attention does not support, and the marker of its layers in checkpoints.

Each error names the setting and its flag.
"""

from __future__ import annotations

import sys

MARKER = "stick_breaking_attention"  # key in the metadata of a sharded state, and name of the marker in it
# (field of TransformerConfig, flag, required value, reason). A missing field passes the check.
CONFIG_REQUIREMENTS = (
    ("attention_dropout", "--attention-dropout", 0.0, "stick-breaking weights have no dropout"),
    ("window_size", "--window-size", None, "a query attends to all older keys"),
    ("softmax_type", "--softmax-type", "vanilla", "stick-breaking attention has no softmax"),
    ("fp8_dot_product_attention", "--fp8-dot-product-attention", False, "there is no fp8 stick-breaking kernel"),
    ("fp8_multi_head_attention", "--fp8-multi-head-attention", False, "there is no fp8 stick-breaking kernel"),
    ("flash_decode", "--flash-decode", False, "it bypasses core_attention and would silently run softmax"),
)
# The same if Megatron clips or logs the largest logit (LOGIT_SETTINGS).
LOGIT_SETTINGS = (("qk_clip", "--qk-clip"), ("log_max_attention_logit", "--log-max-attention-logit"))
LOGIT_REQUIREMENTS = (
    (
        "cuda_graph_impl",
        "--cuda-graph-impl",
        "none",
        "a replayed graph would not update the largest logit, which --qk-clip and --log-max-attention-logit read",
    ),
)
# The same for layers of multi-latent attention.
ROPE_FUSION = (
    "apply_rope_fusion",
    "--no-rope-fusion",
    False,
    "the fused kernels would rotate q and k. Pass --no-rope-fusion",
)
LATENT_REQUIREMENTS = (
    ROPE_FUSION,
    (
        "cache_mla_latents",
        "--cache-mla-latents",
        False,
        "inference from cached latents bypasses core_attention and would run softmax",
    ),
    (
        "mla_down_proj_fusion",
        "--mla-down-proj-fusion",
        False,
        "only the layers without this fusion can become stick-breaking",
    ),
    ("qk_l2_norm", "--qk-l2-norm", False, "Megatron's multi-latent attention does not have this norm"),
)
# The same for flags of Megatron's scripts that are not fields of TransformerConfig.
SCRIPT_REQUIREMENTS = (
    (
        "reset_attention_mask",
        "--reset-attention-mask",
        False,
        "attention masks are not read; pack documents (thd) instead",
    ),
)


def check_settings(settings: object, source: str, requirements: tuple) -> None:
    """Raise ValueError for the first setting that does not have its required value.

    Args:
        settings: a TransformerConfig, or the parsed arguments of a script.
        source: name of `settings` in the message: "config" or "args".
        requirements: rows as in CONFIG_REQUIREMENTS.

    Example:
        >>> from types import SimpleNamespace
        >>> from megatron_sb.megatron.settings import check_settings
        >>> requirements = (("qk_clip", "--qk-clip", False, "not supported"),)
        >>> check_settings(SimpleNamespace(qk_clip=True), "config", requirements)
        Traceback (most recent call last):
            ...
        ValueError: config.qk_clip (--qk-clip) must be False with stick-breaking attention, got True: not supported.
    """
    for name, flag, required, reason in requirements:
        value = getattr(settings, name, required)
        if value != required:
            raise ValueError(
                f"{source}.{name} ({flag}) must be {required!r} with stick-breaking attention, got {value!r}: {reason}."
            )


def check_position_embedding(settings: object, source: str, rope_disabled: bool) -> None:
    """Raise ValueError for a position embedding that reaches stick-breaking layers.

    Args:
        settings: a TransformerConfig, or the parsed arguments of a script.
        source: name of `settings` in the message: "config" or "args".
        rope_disabled: whether `--no-rope-freq` disables rotary embeddings in these layers.

    Example:
        >>> from types import SimpleNamespace
        >>> from megatron_sb.megatron.settings import check_position_embedding
        >>> rotary = SimpleNamespace(position_embedding_type="rope")
        >>> check_position_embedding(rotary, "config", rope_disabled=True)  # raises ValueError with False
    """
    kind = getattr(settings, "position_embedding_type", "none")
    if kind != "none" and not (kind == "rope" and rope_disabled):
        raise ValueError(
            f"{source}.position_embedding_type (--position-embedding-type) must be 'none' with stick-breaking "
            f"attention, got {kind!r}: the order of the keys encodes positions. With 'rope', --no-rope-freq must "
            "contain every stick-breaking layer."
        )


def rope_disabled_in(config: object, layer_number: int) -> bool:
    """Return whether `--no-rope-freq` disables rotary embeddings in a layer. layer_number: 1 for the first layer.

    Raises:
        ValueError: if there is no entry for the layer.

    Example:
        >>> from types import SimpleNamespace
        >>> from megatron_sb.megatron.settings import rope_disabled_in
        >>> rope_disabled_in(SimpleNamespace(no_rope_freq=[1, 0]), layer_number=2)
        False
    """
    entries = config.no_rope_freq or ()
    if entries and layer_number > len(entries):  # Megatron-Core 0.16 would raise an IndexError in the forward
        raise ValueError(
            f"config.no_rope_freq (--no-rope-freq) must have an entry for layer {layer_number}, of multi-token "
            f"prediction (--mtp-num-layers), got {len(entries)} entries. Use --position-embedding-type none without "
            "--no-rope-freq."
        )
    return bool(entries) and bool(entries[layer_number - 1])


def tracks_logits(config: object) -> bool:
    """Return whether Megatron needs the largest logit of each head.

    Raises:
        ValueError: if the config does not support this.

    Example:
        >>> from types import SimpleNamespace
        >>> from megatron_sb.megatron.settings import tracks_logits
        >>> tracks_logits(SimpleNamespace(qk_clip=True))
        True
    """
    if not any(getattr(config, name, False) for name, _ in LOGIT_SETTINGS):
        return False
    check_settings(config, "config", LOGIT_REQUIREMENTS)
    return True


def script_arguments() -> object | None:
    """Return the parsed arguments of the Megatron training script in this process. Return None if there is none."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def check_layer_settings(config: object, layer_number: int) -> None:
    """Raise ValueError if a stick-breaking layer does not support the config or the arguments of the script.

    Args:
        config: a TransformerConfig.
        layer_number: 1 for the first layer.
    """
    args = script_arguments()
    check_settings(config, "config", CONFIG_REQUIREMENTS)
    check_settings(args, "args", SCRIPT_REQUIREMENTS)
    for settings, source in ((config, "config"), (args, "args")):
        check_position_embedding(settings, source, rope_disabled_in(config, layer_number))
