"""How many weights a model of given sizes has, without building it."""

from __future__ import annotations

import dataclasses

from megatron_sb.config.schema import ModelConfig, StickBreakingConfig


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """total: every weight. active: those that one token meets, all but the experts it is not sent to."""

    total: int
    active: int


def count_parameters(model: ModelConfig, stick_breaking: StickBreakingConfig, vocab_size: int) -> ParameterCount:
    """Weights of the stick-breaking model over all ranks.

    vocab_size: before padding. The softmax baseline has the same but for the remainder bias and the head norm.
    """
    hidden, head_dim = model.hidden_size, model.head_dim
    query = model.num_heads * head_dim
    attention = hidden * (query + 2 * model.num_kv_heads * head_dim) + query * hidden
    extras = query * stick_breaking.remainder_bias + 2 * query * stick_breaking.head_norm  # the norm: weight and bias
    norms = 2 * hidden
    mlp = 3 * hidden * model.ffn_hidden_size  # gate, up and down
    router = hidden * model.moe.num_experts if model.moe else 0
    embeddings = model.padded_vocab_size(vocab_size) * hidden * (1 if model.tie_word_embeddings else 2)

    def count(experts: int) -> int:
        return embeddings + model.num_layers * (attention + extras + norms + router + experts * mlp) + hidden

    return ParameterCount(count(model.moe.num_experts if model.moe else 1), count(model.moe.top_k if model.moe else 1))
