"""Compute a dense attention in blocks of keys with the two operators of the block contract."""

from itertools import pairwise

import torch
from torch import Tensor

import megatron_sb.ops  # noqa: F401 - loads torch.ops.megatron_sb

from .accuracy import RESULTS, accumulation_type
from .inputs import Inputs

ops = torch.ops.megatron_sb


def run_in_blocks(
    x: Inputs,
    cuts: list[float],
    carry: bool,
    *,
    attend_current: bool = False,
    scale: float | None = None,
    mass_threshold: float = 0.0,
    bias_columns: bool = False,
) -> dict[str, Tensor]:
    """Return o, mass, dq, dk, dv and the final prefix in the accumulation type, computed in blocks between the cuts.

    Cuts are fractions of the keys. With `carry`, each block gets the mass that the newer blocks leave. Without it, each
    block starts from a full stick, and its output and mass are multiplied by that mass afterwards.
    """
    scale = x.q.shape[-1] ** -0.5 if scale is None else scale
    options = {"scale": scale, "attend_current": attend_current, "mass_threshold": mass_threshold}
    options["bias_columns"] = bias_columns
    blocks = _blocks_of(x, cuts)
    o, mass, records = _forward(x, blocks, options, carry)
    results = (o, mass, *_backward(x, blocks, options, mass, records))
    assert all(result.dtype == accumulation_type(x.q.dtype) for result in results)
    return dict(zip((*RESULTS, "prefix"), results, strict=True))


def _blocks_of(x, cuts):
    """Return (first key, end of the keys, segments) of each block, oldest first. The queries are the last positions."""
    s, s_k = x.q.shape[1], x.k.shape[1]
    edges = [0, *sorted(round(cut * s_k) for cut in cuts), s_k]
    table = {"dtype": torch.int32, "device": x.q.device}
    return [(a, b, torch.tensor([[0, s, 0, b - a, s_k - s - a]], **table)) for a, b in pairwise(edges)]


def _forward(x, blocks, options, carry):
    """Return o and mass over all blocks, and (edge, restart mass, mass_in of the backward) of each block."""
    rows = (x.q.shape[0], x.q.shape[2], x.q.shape[1])
    mass = torch.ones(rows, dtype=accumulation_type(x.q.dtype), device=x.q.device)
    o, records = 0.0, []
    for a, b, segments in reversed(blocks):
        given = mass if carry else None
        block_o, block_mass, edge, restart = ops.block_forward(
            x.q, x.k[:, a:b], x.v[:, a:b], segments, given, **options
        )
        # Without carry, the backward gets the carry as mass_in and scales the mass of the restart record by it.
        records.insert(0, (edge, restart, None if carry else mass))
        o = o + (block_o if carry else block_o * mass.transpose(1, 2)[..., None])
        mass = block_mass if carry else mass * block_mass
    return o, mass, records


def _backward(x, blocks, options, mass, records):
    """Return dq, dk, dv and the final prefix. The prefix is carried from the oldest block to the newest."""
    prefix = mass * x.dmass.to(mass.dtype)
    dq, dk, dv = 0.0, [], []
    for (a, b, segments), (edge, restart, mass_in) in zip(blocks, records, strict=True):
        block_dq, block_dk, block_dv, prefix = ops.block_backward(
            x.do, x.q, x.k[:, a:b], x.v[:, a:b], segments, edge, restart, mass_in, prefix, **options
        )
        dq = dq + block_dq
        dk.append(block_dk)
        dv.append(block_dv)
    return dq, torch.cat(dk, dim=1), torch.cat(dv, dim=1), prefix
