"""Heads whose last eight columns hold biases, as the block operators get them (core/params.h).

The oracle takes these columns for ordinary ones. Their gradients are compared in the columns that somebody reads: in
that of the number, which is the first one of q and the fourth one of k.
"""

import torch
from torch import Tensor

from megatron_sb import stickbreaking_attention, stickbreaking_attention_varlen

from .inputs import Inputs

COLUMNS = 8
_PARTS = 3  # columns of a number, and of ones
_NUMBER = {"dq": 0, "dk": _PARTS}


def unit_of(dtype: torch.dtype) -> float:
    """Return the value of the ones. A number is divided by it."""
    return 128.0 if dtype == torch.float16 else 1.0


def with_biases(x: Inputs) -> Inputs:
    """Return the inputs with a bias in the last columns of q and k: the value of the first of them."""
    unit, (q, k) = unit_of(x.q.dtype), (x.q.clone(), x.k.clone())
    for t, number in ((q, _NUMBER["dq"]), (k, _NUMBER["dk"])):
        columns = t[..., -COLUMNS:]
        value = columns[..., 0] / unit
        columns.zero_()
        columns[..., number] = value
        columns[..., _PARTS - number : 2 * _PARTS - number] = unit
    return Inputs(q, k, x.v, x.do, x.dmass)


def attention(q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor, scale: float | None = None, **options):
    """Call the attention with the channels of q and k and with their biases.

    The default scale is that of all columns.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    biases = {
        name: t[..., -COLUMNS:][..., number : number + _PARTS].float().sum(-1) * (unit_of(t.dtype) * scale)
        for (name, t), number in zip({"query_bias": q, "key_bias": k}.items(), _NUMBER.values(), strict=True)
    }
    call = stickbreaking_attention_varlen if cu_seqlens else stickbreaking_attention
    return call(q[..., :-COLUMNS], k[..., :-COLUMNS], v, *cu_seqlens, scale=scale, **biases, **options)


def read_gradients(results: dict[str, Tensor], head_dim: int | None = None) -> dict[str, Tensor]:
    """Return the results with those columns of dq and dk that are read. Columns after `head_dim` are those of gates."""

    def read(name: str, x: Tensor) -> Tensor:
        end = head_dim or x.shape[-1]
        number = end - COLUMNS + _NUMBER[name]
        return torch.cat([x[..., : end - COLUMNS], x[..., number : number + 1], x[..., end:]], -1)

    return {name: read(name, x) if name in _NUMBER else x for name, x in results.items()}
