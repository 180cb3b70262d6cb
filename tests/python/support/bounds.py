"""Error bounds of single elements that hold for every order of computation.

A bound is the sum of the absolute values of an element's terms, times the relative error that a term can have, plus the
change that skipping may cause. A term has the rounding errors of A and dz in half precision, which have either sign.
It also has the rounding errors of logits and sums in fp32, which may all have the same sign.

The fuzz tests use these bounds, because an error of a whole tensor says little about very small inputs.
"""

from itertools import pairwise

import torch
from torch import Tensor

from .accuracy import RESULTS
from .inputs import Inputs
from .rounded import half_precision, per_key_head, prefix, rows_of

_ULP = 2.0**-23
_CLAMP = 2.0**-24  # kernels clamp logits, so the weight of a saturated key may be this much too small
_RESTART_FLOOR = 2.0**-64  # kernels may drop gradients where the mass is smaller
_SMALLEST = 1e-35  # smaller fp32 results may be flushed to 0


def error_bounds(x: Inputs, *, attend_current: bool, scale: float, mass_threshold: float) -> dict[str, Tensor]:
    """Return the largest allowed absolute error of each element of o, dq, dk, dv for dense inputs.

    `excesses` adds the error of rounding the results to the dtype of x.
    """
    dtype, h_kv = x.q.dtype, x.k.shape[2]
    rounding = _rounding(dtype)  # relative error of A and dz
    quantum = 2.0**-24 if dtype == torch.float16 else 0.0  # absolute error of subnormal A and dz
    skipped, dropped = max(mass_threshold, _CLAMP), max(mass_threshold, _RESTART_FLOOR)
    bounds = {name: torch.zeros_like(t, dtype=torch.float64).transpose(1, 2) for name, t in _shaped_as(x)}
    for rows in rows_of(x, [(0, x.q.shape[1])], scale=scale, attend_current=attend_current):
        if rows.seen == 0:
            continue
        here, seen = slice(rows.begin, rows.end), slice(0, rows.seen)
        q, k, v, do = (t.abs() for t in (rows.q, rows.k, rows.v, rows.do))
        logits = abs(scale) * (q @ k.mT)
        in_logit = logits.amax(-1, keepdim=True) + (logits * rows.beta).sum(-1, keepdim=True)
        in_fp32 = _ULP * (32 + (2 + 0.5 * q.shape[-1] ** 0.5) * in_logit + 0.1 * rows.seen)  # logits sum d terms
        d_weights = rows.do @ rows.v.mT
        reach = d_weights.abs().amax(-1, keepdim=True) + rows.dmass.abs()[..., None]
        g = d_weights.mul_(rows.weights)
        dz = (rows.rest * g - rows.beta * prefix(g, rows.mass, rows.dmass)).abs_()
        g = (do @ v.mT).mul_(rows.weights)
        terms = rows.rest * g + rows.beta * prefix(g, rows.mass, rows.dmass.abs())
        every_dz = in_fp32 * terms + 2 * dropped * reach * rows.beta
        largest = rows.v.abs().amax((-2, -1), keepdim=True)
        o = _rounded_sum(rounding * rows.weights, v) + (in_fp32 * rows.weights) @ v
        bounds["o"][:, :, here] = o + skipped * largest + quantum * v.sum(2, keepdim=True)
        dq = _rounded_sum(rounding * dz, k) + every_dz @ k
        bounds["dq"][:, :, here] = abs(scale) * dq + quantum * k.sum(2, keepdim=True)
        dk = every_dz.mT @ q + quantum / abs(scale) * q.sum(2, keepdim=True)
        dk = _rounded_sum(rounding * dz.mT, q, h_kv) + per_key_head(dk, h_kv)
        bounds["dk"][:, :, seen] += abs(scale) * dk
        dv = (in_fp32 * rows.weights + skipped * rows.beta).mT @ do + quantum * do.sum(2, keepdim=True)
        bounds["dv"][:, :, seen] += _rounded_sum(rounding * rows.weights.mT, do, h_kv) + per_key_head(dv, h_kv)
    return {name: bound.add_(quantum + _SMALLEST).transpose(1, 2) for name, bound in bounds.items()}


def _rounding(dtype: torch.dtype) -> float:
    """Return a little more than the largest relative error of rounding to a half-precision type; 0 for other types."""
    return 0.6 * torch.finfo(dtype).eps if half_precision(dtype) else 0.0


def _rounded_sum(errors: Tensor, y: Tensor, num_kv_heads: int | None = None) -> Tensor:
    """Bound |errors @ y| for errors of either sign, by their sum or six standard deviations, whichever is smaller."""
    total, squares = errors @ y, errors.square() @ y.square()
    if num_kv_heads is not None:
        total, squares = per_key_head(total, num_kv_heads), per_key_head(squares, num_kv_heads)
    return torch.minimum(total, 6 * squares.sqrt())


def error_bounds_packed(x: Inputs, cu_seqlens: list[int], cu_seqlens_k: list[int], **options) -> dict[str, Tensor]:
    """Return the bounds for packed documents. In rows after the last document the results must be exactly 0."""
    bounds = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in _shaped_as(x)}
    for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(cu_seqlens), pairwise(cu_seqlens_k), strict=True):
        queries, keys = slice(q_begin, q_end), slice(k_begin, k_end)
        document = Inputs(
            x.q[None, queries], x.k[None, keys], x.v[None, keys], x.do[None, queries], x.dmass[None, :, queries]
        )
        for name, bound in error_bounds(document, **options).items():
            bounds[name][queries if name in ("o", "dq") else keys] = bound[0]
    return bounds


def _shaped_as(x: Inputs) -> list[tuple[str, Tensor]]:
    return [("o", x.do), ("dq", x.q), ("dk", x.k), ("dv", x.v)]


def stick_tolerance(num_keys: int) -> float:
    """Return the largest allowed absolute error of a mass, and of sum(A) + mass = 1."""
    return 1e-6 + 1e-8 * num_keys


def excesses(
    actual: dict[str, Tensor],
    oracle: dict[str, Tensor],
    bounds: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    num_keys: int,
    threshold: float,
) -> dict[str, float]:
    """Return for each result the largest ratio of an element's error to its bound. It must be at most 1.

    The ratio is NaN if the result has a NaN.
    """
    worst = []
    for name in RESULTS:
        error = actual[name].double() - oracle[name]
        if name == "mass":  # the mass of a used-up row may have any value in [0, threshold]
            used_up = (oracle[name] <= threshold) & (actual[name] >= 0) & (actual[name] <= threshold)
            error = error.abs().masked_fill(used_up, 0.0) / stick_tolerance(num_keys)
        else:
            bound = bounds[name] + _rounding(dtype) * oracle[name].abs()
            error = error.abs() / bound.clamp_min(torch.finfo(torch.float64).tiny)
        worst.append(error.max() if error.numel() else error.new_zeros(()))
    return dict(zip(RESULTS, torch.stack(worst).tolist(), strict=True))
