"""How much arithmetic a model needs, whatever computes it: the count behind "model TFLOP/s"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_sb.training.config import TrainingConfig, count_parameters


def model_flops(config: TrainingConfig, name: str, vocab_size: int, bounds: Sequence[np.ndarray]) -> float:
    """Floating-point operations of a training step, forward and backward, without recomputation.

    6 a weight and token (a multiplication and an addition, three products), for the weights that a token meets; and
    6 * heads * head_dim * L**2 a layer and document of L tokens for attention, half of it masked, as Megatron counts.
    name: which model of config.compare. bounds: cu_seqlens of each packed row. A window is not counted out.
    """
    model = config.model
    weights = count_parameters(model, config.attention[name], vocab_size).active
    if not model.tie_word_embeddings:  # looking a token up is no product
        weights -= model.padded_vocab_size(vocab_size) * model.hidden_size
    lengths = np.concatenate([np.diff(row) for row in bounds]).astype(np.float64)
    attention = model.num_layers * model.num_heads * model.head_dim * (lengths**2).sum()
    return float(6 * (weights * lengths.sum() + attention))
