"""Forget gates of softmax attention: the forgetting transformer (Lin et al., arXiv 2503.02130).

z_ij = scale * q_j . k_i + sum_{i < l <= j} log f_l = scale * q_j . k_i + c_j - c_i,   c_j = sum_{l <= j} log f_l

c_j is the same for all keys of a query, so the softmax does not depend on it. What is left, -c_i, is a channel of the
keys that every query multiplies by a constant. Any kernel can therefore compute the attention, with its gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_sb.baselines.softmax.offsets import row_positions, shared_by_layers

CHANNELS = 8  # appended to q, k and v. Kernels need a multiple of 8
PARTS = 3  # a sum in fp32 needs three channels in bf16, of 8 bits each
# The least log f. exp(-1000) is 0, also in fp64. A larger sum, such as that of f = 0, would leave no digits of q . k.
MIN_LOG_GATE = -1000.0
LARGE = 128.0  # what queries multiply the first channel by, instead of 1: sums exceed the largest fp16 number, 65,504


def with_gate_channels(
    q: Tensor, k: Tensor, v: Tensor, log_gates: Tensor, lengths: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Append the channels of the gates.

    Args:
        q: (b, s, h, d).
        k: (b, s, h_kv, d).
        v: (b, s, h_kv, d).
        log_gates: log f of each key, (b, s, h_kv), floating point.
        lengths: lengths of the documents along s, the same in each row of b.
        scale: factor of q . k.

    Returns:
        q, k and v with CHANNELS more channels. The last channels of the output have no meaning.
    """
    return append_gate_channels(q, k, v, gate_channels(log_gates, lengths, scale, q.dtype))


def gate_channels(log_gates: Tensor, lengths: tuple[int, ...], scale: float, dtype: torch.dtype) -> Tensor:
    """Return -c_i / scale of each key as PARTS channels in `dtype`, the first times LARGE: (b, s, h_kv, PARTS).

    A log f below MIN_LOG_GATE is taken as that. Values beyond LARGE times the largest number of `dtype` are clamped.
    For fp16 this is 8.4e6. The gradient comes from the second channel: that of the first is LARGE times as large, and
    may be infinite in fp16.

    log_gates, lengths and scale: see `with_gate_channels`.
    """
    start = document_starts(lengths, log_gates.device)
    # Positions last: on a GPU, torch scans another dimension with one thread for each of the b * h_kv rows.
    gates = log_gates.double().clamp(min=MIN_LOG_GATE).transpose(1, 2)
    sums = gates.cumsum(2)
    sums = (sums - (sums - gates).index_select(2, start)).transpose(1, 2)  # sums within documents
    rest = (-sums / scale).to(torch.promote_types(dtype, torch.float32))
    largest = min(LARGE * torch.finfo(dtype).max, torch.finfo(rest.dtype).max)
    rest = rest.clamp(-largest, largest)
    parts = [(rest.detach() / LARGE).to(dtype)]
    rest = rest - LARGE * parts[0].to(rest.dtype)
    for _ in range(PARTS - 1):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(rest.dtype)
    return torch.stack(parts, dim=-1)


def append_gate_channels(q: Tensor, k: Tensor, v: Tensor, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append LARGE and ones to q (b, s, h, d), `channels` (b, s, h_kv, PARTS) to k (b, s, h_kv, d), and zeros to v."""
    factors = q.new_ones(*q.shape[:-1], PARTS)
    factors[..., 0] = LARGE
    q, k = (torch.cat((x, pad(extra, (0, CHANNELS - PARTS))), dim=-1) for x, extra in ((q, factors), (k, channels)))
    return q, k, pad(v, (0, CHANNELS))


@shared_by_layers
def document_starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the first row of the document of each row, int64 (s,)."""
    return torch.arange(sum(lengths), device=device) - row_positions(lengths, device)
