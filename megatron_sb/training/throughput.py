"""The floating-point operations of a model, from which the report computes "model TFLOP/s"."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_sb.training.config import GatedDeltaNetConfig, TrainingConfig, count_parameters


def model_flops(config: TrainingConfig, name: str, vocab_size: int, bounds: Sequence[np.ndarray]) -> float:
    """Count the floating-point operations of a training step, forward and backward, without recomputation.

    Weights take 6 operations for each token and active weight. Attention takes 6 * num_heads * head_dim * L**2 for each
    layer and document of L tokens: half of the matrix is masked, as in Megatron's count. A sliding window does not
    reduce the count. A gated delta net takes 18 operations for each token and number of its state: three products of
    the state with a vector.

    Args:
        config: the job's configuration.
        name: a model of config.compare.
        vocab_size: size of the vocabulary before padding.
        bounds: cu_seqlens of each packed row.
    """
    model = config.model
    weights = count_parameters(model, config.attention_of_layers(name), vocab_size).active
    if not model.tie_word_embeddings:  # a lookup is not a matrix product
        weights -= model.padded_vocab_size(vocab_size) * model.hidden_size
    lengths = np.concatenate([np.diff(row) for row in bounds]).astype(np.float64)
    attention = 0.0
    for layer in config.attention_of_layers(name):
        if isinstance(layer, GatedDeltaNetConfig):
            attention += 3 * math.prod(layer.sizes(model)) * lengths.sum()
        else:
            attention += model.num_heads * model.head_dim * (lengths**2).sum()
    return float(6 * (weights * lengths.sum() + attention))
