"""Forget gates of a Megatron-Core layer: projection, transport to the core attention, and auxiliary loss."""

from __future__ import annotations

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor
from torch.nn.functional import layer_norm, pad, rms_norm

from megatron_sb.nn.gates import OPEN_GATE, add_to_backward, forget_gate_loss, gates_of

# Columns appended to the channels of a key. The first holds the logit of the gate; rows stay multiples of 16 bytes.
GATE_COLUMNS = 8


class GateLossScale:
    """The weight of the auxiliary loss of one token in the loss that is differentiated.

    Default: None, which computes the weight for Megatron's training loop. Other training loops set it.
    """

    per_token: float | None = None


def gate_projection(
    config, linear_qkv: torch.nn.Module, tp_group, num_kv_heads: int | None = None
) -> ColumnParallelLinear:
    """Make the projection of hidden states to one gate logit for each KV head, sharded over tensor-parallel ranks.

    Args:
        config: the TransformerConfig of the layer.
        linear_qkv: the projection of the hidden states to the keys, or to the latents of the keys.
        tp_group: the tensor-parallel group, or None.
        num_kv_heads: KV heads on all ranks. Default: config.num_query_groups.

    Raises:
        ValueError: if there are fewer KV heads than ranks. Or if linear_qkv contains a norm that `normalized` does not
            know.
    """
    ranks = 1 if tp_group is None else tp_group.size()
    num_kv_heads = config.num_query_groups if num_kv_heads is None else num_kv_heads
    if num_kv_heads < ranks:
        raise ValueError(
            f"config.num_query_groups (--num-query-groups) must be at least {ranks}, the number of tensor-parallel "
            f"ranks, with forget_gate=True (--sb-forget-gate), got {num_kv_heads}: gates are sharded by KV head."
        )
    if "LayerNorm" in type(linear_qkv).__name__ and not _contains_norm(linear_qkv):
        raise ValueError(
            "linear_qkv must have a layer_norm_weight, as in Transformer Engine, if it contains the layer's norm with "
            f"forget_gate=True (--sb-forget-gate), got {type(linear_qkv).__name__} without: gates need the normalised "
            "hidden states. Use --transformer-impl local."
        )
    projection = ColumnParallelLinear(
        config.hidden_size,
        num_kv_heads,
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


def _contains_norm(linear: torch.nn.Module) -> bool:
    """Return whether this is a LayerNormLinear of Transformer Engine, which normalises its input."""
    return hasattr(linear, "layer_norm_weight")


def normalized(hidden_states: Tensor, linear: torch.nn.Module) -> Tensor:
    """Return the hidden states as `linear` multiplies them: after the norm that it contains, if it contains one.

    Transformer Engine's LayerNormLinear does not return them, so they are computed again, with the parameters of its
    norm. These parameters get a gradient from here, too.

    Args:
        hidden_states: (.., hidden size).
        linear: the projection of the hidden states to q, k and v, or to latents.

    Returns:
        (.., hidden size), in the dtype of the norm's parameters if there is a norm.
    """
    if not _contains_norm(linear):
        return hidden_states
    weight = linear.layer_norm_weight + 1 if linear.zero_centered_gamma else linear.layer_norm_weight
    hidden_states = hidden_states.to(weight.dtype)
    if linear.normalization == "RMSNorm":
        return rms_norm(hidden_states, weight.shape, weight, linear.eps)
    return layer_norm(hidden_states, weight.shape, weight, linear.layer_norm_bias, linear.eps)


def with_gates(key: Tensor, logits: Tensor) -> Tensor:
    """Append the logits of the gates to the keys.

    Args:
        key: (s, b, g, d).
        logits: (s, b, g).

    Returns:
        (s, b, g, d + GATE_COLUMNS).

    Example:
        >>> import torch
        >>> from megatron_sb.megatron.gates import split_gates, with_gates
        >>> key, f = split_gates(with_gates(torch.ones(5, 1, 2, 16), torch.zeros(5, 1, 2)))
        >>> key.shape, f.shape, f.unique()
        (torch.Size([5, 1, 2, 16]), torch.Size([5, 1, 2]), tensor([0.5000]))
    """
    return torch.cat((key, pad(logits[..., None], (0, GATE_COLUMNS - 1))), dim=-1)


def split_gates(key: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `with_gates`. Return the keys, and the gates f in fp32 (fp64 for fp64).

    The dimensions before the last one may be in any order.
    """
    return key[..., :-GATE_COLUMNS], gates_of(key[..., -GATE_COLUMNS])


def with_gate_loss(logits: Tensor, coefficient: float, config, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Add the auxiliary loss of this rank's tokens and KV heads to the backward of the logits.

    Args:
        logits: (s, b, g) for the g KV heads of this rank.
        coefficient: `LayerOptions.forget_gate_loss`.
        config: the TransformerConfig of the layer.
        num_kv_heads: KV heads on all ranks.

    Returns:
        logits (s, b, g), which replace the argument, and the mean of -log f, for logging.
    """
    loss = forget_gate_loss(gates_of(logits))
    if coefficient > 0 and torch.is_grad_enabled():
        share_of_heads = logits.shape[-1] / num_kv_heads
        weight = _weight(config, logits.shape[0] * logits.shape[1], logits.device)
        logits = add_to_backward(logits, coefficient * share_of_heads * weight * loss)
    return logits, loss.detach()


def _weight(config, num_tokens: int, device: torch.device) -> float | Tensor:
    """Return the weight of the mean over the local tokens of a micro-batch.

    Megatron's loop divides the loss of a micro-batch by its tokens and by the number of micro-batches, and averages
    over data- and context-parallel ranks. With --calculate-per-token-loss it divides the gradient by the number of all
    tokens instead.
    """
    if GateLossScale.per_token is not None:
        return num_tokens * GateLossScale.per_token
    scale = 1.0 if config.grad_scale_func is None else config.grad_scale_func(torch.ones((), device=device))
    if config.calculate_per_token_loss:
        return scale * num_tokens
    known = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None
    return scale / (num_microbatches_calculator.get_num_microbatches() if known else 1)
