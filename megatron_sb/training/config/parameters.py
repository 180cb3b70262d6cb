"""The number of weights of a model, computed from its sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_sb.training.config.schema import (
    GatedDeltaNetConfig,
    LayerAttentionConfig,
    ModelConfig,
    StickBreakingAttentionConfig,
)

FIRE_HIDDEN_SIZE = 32  # of FIRE's network in megatron_sb.baselines.softmax
DELTA_NET_TAPS = 4  # of the convolutions of q, k and v in flash-linear-attention's layer


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """The number of weights of a model.

    Attributes:
        total: all weights.
        active: weights that one token uses: all weights except those of the experts that the token is not sent to.
    """

    total: int
    active: int


def count_parameters(
    model: ModelConfig, attention: LayerAttentionConfig | Sequence[LayerAttentionConfig], vocab_size: int
) -> ParameterCount:
    """Count the weights of a model over all ranks.

    Args:
        model: sizes of the model.
        attention: attention of all layers, or of each layer.
        vocab_size: size of the vocabulary before padding.

    Example:
        >>> from megatron_sb.training.config import load_config
        >>> config = load_config("configs/dense_1b.yaml")
        >>> count_parameters(config.model, config.attention["stick_breaking"], config.vocab_size).total
        1208083968
    """
    hidden = model.hidden_size
    layers = attention if isinstance(attention, Sequence) else [attention] * model.num_layers
    of_attention = sum(_attention_parameters(model, each) for each in layers)
    norms = 2 * hidden
    mlp = 3 * hidden * model.ffn_hidden_size  # gate, up and down
    router = hidden * model.moe.num_experts if model.moe else 0
    embeddings = model.padded_vocab_size(vocab_size) * hidden * (1 if model.tie_word_embeddings else 2)

    def count(experts: int) -> int:
        return embeddings + of_attention + model.num_layers * (norms + router + experts * mlp) + hidden

    return ParameterCount(count(model.moe.num_experts if model.moe else 1), count(model.moe.top_k if model.moe else 1))


def _attention_parameters(model: ModelConfig, attention: LayerAttentionConfig) -> int:
    """Count the weights of a layer's attention."""
    hidden, query = model.hidden_size, model.num_heads * model.head_dim
    if isinstance(attention, GatedDeltaNetConfig):
        return _delta_net_parameters(hidden, *attention.sizes(model))
    projections = hidden * (query + 2 * model.num_kv_heads * model.head_dim) + query * hidden
    gates = (hidden + 1) * model.num_kv_heads * attention.forget_gate  # a projection with a bias
    own = projections + gates
    if isinstance(attention, StickBreakingAttentionConfig):
        return own + query * attention.remainder_bias + 2 * query * attention.head_norm  # norms have weight and bias
    if attention.position == "fire":  # c, the factor of the threshold, and a network 1 -> 32 -> heads with biases
        own += 2 + 2 * FIRE_HIDDEN_SIZE + (FIRE_HIDDEN_SIZE + 1) * model.num_heads
    return own


def _delta_net_parameters(hidden: int, num_heads: int, key_dim: int, value_dim: int) -> int:
    keys, values = num_heads * key_dim, num_heads * value_dim
    projections = hidden * (2 * keys + 3 * values + 2 * num_heads)  # q and k; v, gate and output; decay and beta
    convolutions = DELTA_NET_TAPS * (2 * keys + values)
    return projections + convolutions + 2 * num_heads + value_dim  # A and the bias of the decay; the norm of the output
