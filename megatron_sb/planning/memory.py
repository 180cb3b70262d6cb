"""Predict the memory of a GPU in training: weights, gradients, optimizer, activations.

Megatron's count (Korthikanti et al., arXiv 2205.05198) is 16 hidden_size + 6 ffn_hidden_size bytes for each token and
layer. It holds in bf16, without dropout, if the attention keeps no weights and there are as many KV heads as query
heads. This module counts the same tensors one by one, so that grouped heads and experts are covered. Tensor parallelism
with sequence parallelism divides all of them. Weights are bf16, gradients fp32, and the distributed optimizer keeps 12
bytes for each weight, divided over the data-parallel and context-parallel ranks.

The result predicts the peak of torch's allocated memory. It does not include fragments of the allocator, the CUDA
context and the buffers of NCCL. Leave a margin for these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_sb.planning.layouts import Layout
from megatron_sb.training.config import ModelConfig, StageConfig, StickBreakingAttentionConfig, count_parameters

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12  # bytes of a weight: bf16, fp32, fp32 master weight and two moments
ELEMENT = 2  # bytes of an activation
LOGIT = 6  # bytes of a logit in the loss: bf16, and fp32 in the softmax
MLP_CHANNELS = 3  # for each of ffn_hidden_size: the outputs of linear_fc1 and of the activation
# For each of hidden_size, with MLPs in parts: gradients, the parts, their concatenation. Counted from the record
# benchmarks/results/2026-11-27-h200-long-sequences.md.
CHANNELS_IN_PARTS = 5


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU.

    Attributes:
        weights: bf16 weights.
        gradients: fp32 gradients.
        optimizer: this rank's shard of the optimizer's state.
        activations: what the forward of a micro-batch keeps for its backward.
        temporary: the largest tensors that exist beside these for a moment: logits in the loss, or the gradients within
            a layer.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        """Sum of all."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary


def predict_memory(
    model: ModelConfig, attention: StickBreakingAttentionConfig, vocab_size: int, stage: StageConfig, layout: Layout
) -> Memory:
    """Predict the peak memory of a GPU.

    Args:
        model: sizes, with precision "bf16".
        attention: the model's attention.
        vocab_size: tokens of the vocabulary, before padding.
        stage: gives the length of a row.
        layout: the parallel layout.

    Example:
        >>> from megatron_sb.planning.layouts import Layout
        >>> from megatron_sb.training.config import load_config
        >>> config = load_config("configs/dense_1b.yaml")
        >>> sizes = config.model, config.attention["stick_breaking"], config.vocab_size
        >>> round(predict_memory(*sizes, config.stages[0], Layout(rows_at_once=4)).total / 2**30, 1)
        54.8
    """
    dense, experts = split_weights(model, attention, vocab_size, layout)
    weights = dense + experts
    shards = dense / (layout.data * layout.context) + experts * layout.expert / layout.gpus
    tokens = layout.rows_at_once * stage.context_length / layout.context / layout.tensor
    at_once = tokens  # whose hidden channels of an MLP, or whose logits, exist at the same time
    if model.tokens_at_once is not None:  # the trainer packs the rows of a micro-batch into one stream
        at_once = min(tokens, model.tokens_at_once)
    layer, within = tokens * layer_bytes(model, attention), tokens * backward_bytes(model)
    if at_once < tokens:
        mlp = ELEMENT * MLP_CHANNELS * model.ffn_hidden_size
        layer -= tokens * mlp
        within = at_once * mlp + tokens * ELEMENT * CHANNELS_IN_PARTS * model.hidden_size
    logits = at_once * LOGIT * model.padded_vocab_size(vocab_size)
    kept = model.num_layers * layer
    backward = within
    if layout.recompute == "full":
        inputs = math.ceil(model.num_layers / model.recompute_layers) - model.offloaded_inputs
        kept = inputs * tokens * ELEMENT * model.hidden_size
        backward = min(model.recompute_layers, model.num_layers) * layer + within
    return Memory(WEIGHT * weights, GRADIENT * weights, OPTIMIZER * shards, kept, max(logits, backward))


def split_weights(
    model: ModelConfig, attention: StickBreakingAttentionConfig, vocab_size: int, layout: Layout
) -> tuple[float, float]:
    """Return the number of weights of a GPU: those outside of experts, and those of experts.

    Norms and routers count as divided by tensor parallelism. They are not, but they are small.
    """
    total = count_parameters(model, attention, vocab_size).total
    experts = 0
    if model.moe:
        experts = model.num_layers * model.moe.num_experts * 3 * model.hidden_size * model.ffn_hidden_size
    return (total - experts) / layout.tensor, experts / layout.expert


def layer_bytes(model: ModelConfig, attention: StickBreakingAttentionConfig) -> float:
    """Return the bytes that a layer keeps for the backward, for each token, without tensor parallelism."""
    hidden, query, key = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norms = 2 * 2 * hidden  # input and output of both
    core = query + 2 * key + query  # q, k, v and the output
    if attention.remainder_bias or attention.head_norm:
        core += query  # the output before these
    mass = 4 * model.num_heads  # fp32
    mlp = MLP_CHANNELS * model.ffn_hidden_size
    if model.moe:  # each token goes to top_k experts, with its input and its result
        mlp = model.moe.top_k * (mlp + 2 * hidden)
    return ELEMENT * (norms + core + mlp) + mass


def backward_bytes(model: ModelConfig) -> float:
    """Return the bytes of the gradients within an MLP or the experts, for each token, without tensor parallelism."""
    width = MLP_CHANNELS * model.ffn_hidden_size + 2 * model.hidden_size
    return ELEMENT * width * (model.moe.top_k if model.moe else 1)
