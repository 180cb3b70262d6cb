"""The number of weights of a model, computed from its sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_sb.training.config.schema import LayerAttentionConfig, ModelConfig, StickBreakingAttentionConfig

FIRE_HIDDEN_SIZE = 32  # of FIRE's network in megatron_sb.baselines.softmax


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
    hidden, head_dim = model.hidden_size, model.head_dim
    query = model.num_heads * head_dim
    projections = hidden * (query + 2 * model.num_kv_heads * head_dim) + query * hidden
    layers = attention if isinstance(attention, Sequence) else [attention] * model.num_layers
    extras = sum(_own_parameters(model, each) for each in layers)
    norms = 2 * hidden
    mlp = 3 * hidden * model.ffn_hidden_size  # gate, up and down
    router = hidden * model.moe.num_experts if model.moe else 0
    embeddings = model.padded_vocab_size(vocab_size) * hidden * (1 if model.tie_word_embeddings else 2)

    def count(experts: int) -> int:
        return embeddings + model.num_layers * (projections + norms + router + experts * mlp) + extras + hidden

    return ParameterCount(count(model.moe.num_experts if model.moe else 1), count(model.moe.top_k if model.moe else 1))


def _own_parameters(model: ModelConfig, attention: LayerAttentionConfig) -> int:
    """Count the weights of a layer's attention that do not belong to its projections."""
    gates = (model.hidden_size + 1) * model.num_kv_heads  # a projection with a bias
    if isinstance(attention, StickBreakingAttentionConfig):
        vector = model.num_heads * model.head_dim
        norm = 2 * vector  # weight and bias
        return vector * attention.remainder_bias + norm * attention.head_norm + gates * attention.forget_gate
    own = gates * attention.forget_gate
    if attention.position == "fire":  # c, the factor of the threshold, and a network 1 -> 32 -> heads with biases
        own += 2 + 2 * FIRE_HIDDEN_SIZE + (FIRE_HIDDEN_SIZE + 1) * model.num_heads
    return own
