"""The results of a perfect kernel in half precision: the exact computation, rounded only where a kernel must round.

"Exact" means float64, from the half-precision inputs. Tensor cores multiply half-precision operands. A kernel must
therefore round the weights A before A V and A^T dO, and dz before dz K and dz^T Q. It can apply the scale to dz
afterwards in fp32. It rounds o, dq, dk and dv once, at the end. Logits, masses, g, the prefix b and sums stay exact.

Tests compare a kernel's error against the oracle with the error of this computation.

Formulas: A = beta * (product of the newer 1 - beta), g = A * (dO . v), b = sum of the older g + mass * dmass,
dz = (1 - beta) g - beta b.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .inputs import Inputs

_MAX_WEIGHTS = 2**25  # weights in memory at a time: 256 MiB for each copy


def half_precision(dtype: torch.dtype) -> bool:
    """Return whether the dtype is bf16 or fp16."""
    return dtype in (torch.bfloat16, torch.float16)


def rounds_weights(q: Tensor) -> bool:
    """Return whether the kernels for this q round the weights. Kernels for half precision on a GPU do."""
    return q.is_cuda and half_precision(q.dtype)


@dataclass
class Rows:
    """Query rows [begin, end) and the keys [0, seen) that they can see, in float64, with heads before rows."""

    begin: int
    end: int
    seen: int
    q: Tensor  # (b, h, n, d)
    k: Tensor  # (b, h, seen, d), repeated for every query head
    v: Tensor  # (b, h, seen, d_v)
    do: Tensor  # (b, h, n, d_v)
    dmass: Tensor  # (b, h, n)
    beta: Tensor  # (b, h, n, seen), 0 for hidden keys
    rest: Tensor  # 1 - beta, of the same shape, 0 for hidden keys
    weights: Tensor  # of the same shape, 0 for hidden keys
    mass: Tensor  # (b, h, n)


def rows_of(x: Inputs, runs: list[tuple[int, int]], *, scale: float, attend_current: bool = False) -> Iterator[Rows]:
    """Yield the given runs of query rows in pieces that fit in memory. The queries of x are its last positions."""
    s, s_k, h = x.q.shape[1], x.k.shape[1], x.q.shape[2]
    group = h // x.k.shape[2]
    q, k, v, do = (t.double().transpose(1, 2) for t in (x.q, x.k, x.v, x.do))
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    step = max(1, _MAX_WEIGHTS // max(1, x.q.shape[0] * h * s_k))
    for first, last in runs:
        for begin in range(first, last, step):
            end = min(begin + step, last)
            seen = s_k - s + end
            here = (q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], do[:, :, begin:end])
            key = torch.arange(seen, device=q.device)
            query = torch.arange(seen - (end - begin), seen, device=q.device)[:, None]
            hidden = key > query if attend_current else key >= query
            z = scale * (here[0] @ here[1].mT)
            log_rest = logsigmoid(-z).masked_fill_(hidden, 0.0)
            log_from = log_rest.flip(-1).cumsum(-1).flip(-1)  # sum over key i and all newer keys
            # Shift by one key. `log_from - log_rest` would lose small values by cancellation.
            log_newer = torch.cat([log_from[..., 1:], torch.zeros_like(log_from[..., :1])], dim=-1)
            weights = logsigmoid(z).add_(log_newer).exp_().masked_fill_(hidden, 0.0)
            beta, rest = z.sigmoid().masked_fill_(hidden, 0.0), (-z).sigmoid().masked_fill_(hidden, 0.0)
            mass = log_from[..., 0].exp() if seen else z.new_ones(z.shape[:-1])
            dmass = x.dmass.double()[:, :, begin:end]
            yield Rows(begin, end, seen, *here, dmass, beta, rest, weights, mass)


def prefix(g: Tensor, mass: Tensor, dmass: Tensor) -> Tensor:
    """Return b: for each key the sum of g over all older keys, plus mass * dmass."""
    older = torch.cat([torch.zeros_like(g[..., :1]), g[..., :-1].cumsum(-1)], dim=-1)
    return older.add_((mass * dmass)[..., None])


def per_key_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """Sum a tensor (b, h, ...) over the query heads of each KV head: (b, h_kv, ...)."""
    return x.unflatten(1, (num_kv_heads, x.shape[1] // num_kv_heads)).sum(2)


def rounded_results(
    x: Inputs, *, attend_current: bool = False, scale: float | None = None, runs: list[tuple[int, int]] | None = None
) -> dict[str, Tensor]:
    """Return o, mass, dq, dk, dv of the rounded exact computation, in the dtype of x (mass: float32).

    With `runs` of query rows, o, mass and dq hold only these rows, one run after the other. dk and dv are sums over
    these rows, as if dO and dmass were 0 in all others.
    """
    dtype, h_kv = x.q.dtype, x.k.shape[2]
    scale = x.q.shape[3] ** -0.5 if scale is None else scale
    results: dict[str, list[Tensor]] = {"o": [], "mass": [], "dq": []}
    dk, dv = (t.double().transpose(1, 2).new_zeros(t.transpose(1, 2).shape) for t in (x.k, x.v))
    for rows in rows_of(x, runs or [(0, x.q.shape[1])], scale=scale, attend_current=attend_current):
        g = (rows.do @ rows.v.mT).mul_(rows.weights)
        b = prefix(g, rows.mass, rows.dmass)
        dz = g.mul_(rows.rest).sub_(b.mul_(rows.beta)).to(dtype).double()
        weights = rows.weights.to(dtype).double()
        results["o"].append(weights @ rows.v)
        results["mass"].append(rows.mass.float())
        results["dq"].append(scale * (dz @ rows.k))
        dk[:, :, : rows.seen] += per_key_head(scale * (dz.mT @ rows.q), h_kv)
        dv[:, :, : rows.seen] += per_key_head(weights.mT @ rows.do, h_kv)
    if not results["o"]:  # no query row at all
        results = {"o": [x.do.transpose(1, 2)], "mass": [x.dmass], "dq": [x.q.transpose(1, 2)]}
    o, mass, dq = (torch.cat(results[name], dim=2) for name in ("o", "mass", "dq"))
    o, dq, dk, dv = (t.transpose(1, 2).to(dtype) for t in (o, dq, dk, dv))
    return {"o": o, "mass": mass, "dq": dq, "dk": dk, "dv": dv}
