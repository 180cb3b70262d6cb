"""Fold the multipliers of muP into the weights, for formats that have no fields for them.

| field | weights | factor |
| --- | --- | --- |
| embedding_multiplier | the embedding | embedding_multiplier |
| attention_multiplier | the query projections, with their biases | attention_multiplier * sqrt(head_dim) |
| attention_multiplier, with Euclidean logits | the same, and the key projections | sqrt(attention_multiplier) |
| residual_multiplier | the output projections of attention, MLPs and experts | residual_multiplier |
| logits_scaling | the last norm | 1 / logits_scaling |
| embedding_multiplier, with tied embeddings | also the last norm | 1 / embedding_multiplier |

All other weights keep their bits. Tied embeddings stay tied: the scaled embedding is also the output layer, so the
last norm divides by the factor. The residual stream keeps its values, so routers, forget gates, the norms of layers and
the biases of values need no factor. The output projection comes after the norm of heads and the remainder bias, so
these need none either.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.validation import InputError

FORMATS_WITHOUT_FIELDS = ("megatron", "fla")
NO_MULTIPLIERS = {  # field -> the value that stands for no multiplier
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attention_multiplier": None,
}
RELATIVE_ERROR = 1e-12  # A factor of the attention within this of 1 is 1: attention_multiplier is the default scale.


def folded(config: StickBreakingConfig, to: str) -> dict[str, float]:
    """Return the multipliers that `checkpoints.save` folds into the weights.

    Args:
        config: configuration of the model.
        to: format to be written.

    Returns:
        Fields of the configuration with their values. Empty if the format has fields for them, or all have no effect.

    Example:
        >>> from megatron_sb.checkpoints import multipliers
        >>> from megatron_sb.huggingface import StickBreakingConfig
        >>> multipliers.folded(StickBreakingConfig(embedding_multiplier=12.0, attention_multiplier=1 / 8), "fla")
        {'embedding_multiplier': 12.0}
    """
    if to not in FORMATS_WITHOUT_FIELDS:
        return {}
    found = {name: getattr(config, name) for name, none in NO_MULTIPLIERS.items() if getattr(config, name) != none}
    if _attention_factor(config) == 1:
        found.pop("attention_multiplier", None)
    return found


def fold(
    config: StickBreakingConfig, weights: dict[str, Tensor], to: str
) -> tuple[StickBreakingConfig, dict[str, Tensor]]:
    """Return a model without multipliers that computes the same logits.

    Products are computed in fp64 and rounded once to the dtype of the weights. Powers of two keep every bit of the
    fraction.

    Args:
        config: configuration of the model. It is not changed.
        weights: weights by name, as `StickBreakingForCausalLM` has them, without the output layer if it is tied to the
            embedding. They are not changed.
        to: format to be written, one of `FORMATS_WITHOUT_FIELDS`.

    Returns:
        The configuration with `NO_MULTIPLIERS`, and all weights with the same names, shapes and dtypes.

    Raises:
        ValueError: if a multiplier is 0 or not finite, attention_multiplier is negative with Euclidean logits, or a
            weight overflows its dtype.
    """
    for name, value in folded(config, to).items():
        if value == 0 or not math.isfinite(value):
            raise InputError(
                f"{name} must be finite and not 0 to be folded into weights of the {to} format, got {value}."
            )
    is_euclidean = config.logits == "euclidean"
    if is_euclidean and (config.attention_multiplier or 0) < 0:
        raise InputError(
            f"attention_multiplier must be greater than 0 with Euclidean logits to be folded into weights of the {to} "
            f"format, got {config.attention_multiplier}."
        )
    of_attention = _attention_factor(config)
    of_head = config.embedding_multiplier if config.tie_word_embeddings else 1.0
    factors = {  # module -> factor of its weight and bias
        "embed_tokens": config.embedding_multiplier,
        "q_proj": of_attention,
        "k_proj": of_attention if is_euclidean else 1,
        "o_proj": config.residual_multiplier,
        "down_proj": config.residual_multiplier,
        "norm": 1 / (config.logits_scaling * of_head),
    }
    scaled = {name: _scaled(name, weight, factors.get(name.split(".")[-2], 1)) for name, weight in weights.items()}
    without = copy.deepcopy(config)
    for name, none in NO_MULTIPLIERS.items():
        setattr(without, name, none)
    return without, scaled


def check_none(config: StickBreakingConfig, to: str) -> None:
    """Raise ValueError if the configuration of a checkpoint without fields for multipliers has multipliers.

    They may be folded into its weights already, and must not be applied twice.
    """
    for name, value in folded(config, to).items():
        of_run = " If the model was trained with it, give its training configuration (YAML) instead."
        raise InputError(
            f"{name} must be {NO_MULTIPLIERS[name]!r} in the configuration of a {to} checkpoint, got {value!r}: "
            f"conversions to {to} fold it into the weights. Remove it from config.json if the checkpoint was "
            f"converted.{of_run if name == 'attention_multiplier' else ''}"
        )


def _attention_factor(config: StickBreakingConfig) -> float:
    """Return the factor of weights that gives logits of the default scale the model's scale.

    It is a factor of the query weights. With Euclidean logits it is a factor of the query and the key weights. There it
    is 0 for a negative scale, which `fold` rejects.
    """
    scale = config.attention_multiplier
    if scale is None:
        return 1.0
    factor = math.sqrt(max(scale, 0)) if config.logits == "euclidean" else scale * math.sqrt(config.head_dim)
    return 1.0 if math.isclose(factor, 1, rel_tol=RELATIVE_ERROR) else factor


def _scaled(name: str, weight: Tensor, factor: float) -> Tensor:
    """Return weight * factor, in the dtype of weight. Raise ValueError if a finite value becomes infinite."""
    if factor == 1:
        return weight
    product = (weight.double() * factor).to(weight.dtype)
    if bool((product.isinf() & weight.isfinite()).any()):
        largest, bound = weight.abs().max().item() * abs(factor), torch.finfo(weight.dtype).max
        raise InputError(
            f"{name} times {factor:g} must be at most {bound:g} to be stored as {weight.dtype}, got {largest:g}. "
            "Convert the model to float32 or bfloat16 first."
        )
    return product
