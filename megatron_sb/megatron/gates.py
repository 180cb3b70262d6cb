"""The forget gates of a Megatron-Core layer: projection, way to the core attention, auxiliary loss."""

from __future__ import annotations

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor
from torch.nn.functional import pad

from megatron_sb.nn.gates import OPEN_GATE, add_to_backward, forget_gate_loss, gates_of

GATE_COLUMNS = 8  # of a key beside its channels; the first holds the gate's logit. Rows stay multiples of 16 bytes.


class GateLossScale:
    """What one token's auxiliary loss counts for in the loss that is differentiated.

    None: by Megatron's own conventions, for its training loop. A loop of one's own sets it.
    """

    per_token: float | None = None


def gate_projection(config, linear_qkv: torch.nn.Module, tp_group) -> ColumnParallelLinear:
    """A projection of hidden states to the gates' logits, one for each KV head, cut over tensor-parallel ranks.

    Raises:
        ValueError: fewer KV heads than ranks; a linear_qkv that normalises hidden states itself, which the gates would
            see as they are before.
    """
    ranks = 1 if tp_group is None else tp_group.size()
    if config.num_query_groups < ranks:
        raise ValueError(
            f"forget_gate=True (--sb-forget-gate) with config.num_query_groups={config.num_query_groups} "
            f"(--num-query-groups) on {ranks} tensor-parallel ranks: gates are cut by KV heads, of which each rank "
            "needs one"
        )
    if "LayerNorm" in type(linear_qkv).__name__:
        raise ValueError(
            f"forget_gate=True (--sb-forget-gate) with linear_qkv {type(linear_qkv).__name__}, which has the layer's "
            "norm inside: gates need the normalised hidden states; use --transformer-impl local"
        )
    projection = ColumnParallelLinear(
        config.hidden_size,
        config.num_query_groups,
        config=config,
        init_method=config.init_method,
        bias=True,
        gather_output=False,
        skip_bias_add=False,
        tp_group=tp_group,
    )
    with torch.no_grad():
        projection.bias.fill_(OPEN_GATE)
    return projection


def with_gates(key: Tensor, logits: Tensor) -> Tensor:
    """key (s, b, g, d) and its gates' logits (s, b, g) as one tensor, (s, b, g, d + GATE_COLUMNS)."""
    return torch.cat((key, pad(logits[..., None], (0, GATE_COLUMNS - 1))), dim=-1)


def split_gates(key: Tensor) -> tuple[Tensor, Tensor]:
    """What `with_gates` joined, however the dimensions before the last were moved: the keys, and f in fp32."""
    return key[..., :-GATE_COLUMNS], gates_of(key[..., -GATE_COLUMNS])


def with_gate_loss(logits: Tensor, coefficient: float, config) -> tuple[Tensor, Tensor]:
    """logits (s, b, g) with the auxiliary loss of this rank's tokens and KV heads added to the backward; and the mean
    of -log f, for logging.
    """
    loss = forget_gate_loss(gates_of(logits))
    if coefficient > 0 and torch.is_grad_enabled():
        share_of_heads = logits.shape[-1] / config.num_query_groups
        weight = _weight(config, logits.shape[0] * logits.shape[1], logits.device)
        logits = add_to_backward(logits, coefficient * share_of_heads * weight * loss)
    return logits, loss.detach()


def _weight(config, num_tokens: int, device: torch.device) -> float | Tensor:
    """What the mean over a micro-batch's local tokens counts for.

    Megatron's loop divides a micro-batch's loss by its tokens and by the number of micro-batches, and averages over
    data- and context-parallel ranks; or, with --calculate-per-token-loss, it divides the gradient by all tokens.
    """
    if GateLossScale.per_token is not None:
        return num_tokens * GateLossScale.per_token
    scale = 1.0 if config.grad_scale_func is None else config.grad_scale_func(torch.ones((), device=device))
    if config.calculate_per_token_loss:
        return scale * num_tokens
    known = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None
    return scale / (num_microbatches_calculator.get_num_microbatches() if known else 1)
