"""Find which keys lie on the convex hull of all keys, and how much attention a query can give to each.

The largest attention of key i over all queries q with |q| <= R, where q includes the scale of the logits:

    softmax         max_q  exp(q . k_i) / sum_l exp(q . k_l)
    euclidean       max_q  exp(-c |q - k_i|^2) / sum_l exp(-c |q - k_l|^2)
    stick_breaking  max_q  sigmoid(q . k_i) prod_{l > i} (1 - sigmoid(q . k_l))                       (paper eq. 1)

Softmax over dot products: no q makes q . k_i the largest logit of a key inside the hull. If k_i is a mean of other keys
with weights w, Jensen's inequality bounds its attention by w_max / (1 + w_max), which is at most a half. The bound on
|q| is needed because the attention of a vertex approaches 1 as |q| grows.

Euclidean logits equal x . k_l - c |k_l|^2 with x = 2 c q, up to a term that all keys share. This is the same problem
with a bias. The bound is |x| <= R. The mean of the keys is subtracted first, which does not change distances.
c = R / (2 max |k|) is the largest c for which such a q can lie on every key.

All three log-attentions are concave in q. Ascent from any start therefore ends at the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_sb.validation import InputError

ATTENTIONS = ("softmax", "euclidean", "stick_breaking")
MAX_HEAD_DIM = 8  # the number of Qhull's facets grows exponentially with the dimension
_BARRIERS = (1.0, 1e-2, 1e-4)
_MAX_STEPS = 200
_MAX_HALVINGS = 60
_DECREMENT = 1e-9

# For logits (n, n) of n problems, row i for problem i: the log-attention (n,) to key i, its gradient (n, n) with
# respect to the logits, weights (n, n) of the keys, and a flag. The negative Hessian is the second moment of the
# weighted keys, around their weighted mean if the flag is set.
_Derivatives = tuple[Tensor, Tensor, Tensor, bool]


def on_hull(keys: np.ndarray) -> np.ndarray:
    """Return which keys are vertices of the convex hull of all keys, bool (n,).

    keys: (n, d) with d from 2 to 8 and n of at least d + 2. Raise ValueError for other shapes, and for keys that lie in
    a subspace of fewer dimensions.
    """
    from scipy.spatial import ConvexHull, QhullError

    if keys.ndim != 2 or not 2 <= keys.shape[1] <= MAX_HEAD_DIM or len(keys) < keys.shape[1] + 2:
        raise InputError(
            f"keys must have shape (n, d) with d from 2 to {MAX_HEAD_DIM} and n of at least d + 2, got {keys.shape}."
        )
    vertices = np.zeros(len(keys), dtype=bool)
    try:
        vertices[ConvexHull(keys).vertices] = True
    except QhullError as error:
        raise InputError(
            f"keys must span a convex hull of dimension {keys.shape[1]}: {error.args[0].splitlines()[0]}"
        ) from error
    return vertices


def largest_attention(keys: Tensor, attention: str, query_norm: float) -> Tensor:
    """Return the largest attention that each key can receive from one query.

    Newton's method maximises the log-attention plus mu log(1 - |q|^2 / R^2) for decreasing mu. With the last mu, 1e-4,
    the log-attention is at most mu too low.

    Args:
        keys: (n, d) float64, oldest first; the query is newer than all.
        attention: one of `ATTENTIONS`.
        query_norm: R, greater than 0.

    Returns:
        (n,) float64 with a relative error of at most 1e-4.

    Raises:
        ValueError: `attention` or `query_norm` is invalid.
        RuntimeError: Newton's method does not converge.
    """
    if attention not in ATTENTIONS:
        raise InputError(f"attention must be one of {', '.join(map(repr, ATTENTIONS))}, got {attention!r}.")
    if not 0 < query_norm < math.inf:
        raise InputError(f"query_norm must be finite and greater than 0, got {query_norm}.")
    keys = keys - keys.mean(0) if attention == "euclidean" else keys
    squares = keys.square().sum(-1)
    scale = query_norm / (2 * squares.max().sqrt())
    bias = -scale * squares if attention == "euclidean" else torch.zeros_like(squares)
    derivatives = _stick_breaking if attention == "stick_breaking" else _softmax
    queries = torch.zeros_like(keys)
    for barrier in _BARRIERS:
        queries = _ascend(queries, keys, bias, derivatives, query_norm, barrier)
    return derivatives(queries @ keys.T + bias)[0].exp()


def _softmax(logits: Tensor) -> _Derivatives:
    attention = logits.softmax(-1)
    value = logits.log_softmax(-1).diagonal()
    return value, torch.eye(len(logits), dtype=logits.dtype) - attention, attention, True


def _stick_breaking(logits: Tensor) -> _Derivatives:
    broken = logits.sigmoid()
    own, newer = torch.eye(len(logits), dtype=logits.dtype), torch.ones_like(logits).triu(1)
    value = torch.nn.functional.logsigmoid(logits).diagonal() + (newer * torch.nn.functional.logsigmoid(-logits)).sum(
        -1
    )
    return value, own - (own + newer) * broken, (own + newer) * broken * (-logits).sigmoid(), False


def _ascend(
    queries: Tensor,
    keys: Tensor,
    bias: Tensor,
    derivatives: Callable[[Tensor], _Derivatives],
    radius: float,
    barrier: float,
) -> Tensor:
    """Maximise by Newton's method with step halving, one problem per key in parallel. queries: (n, d), in the ball."""
    products = (keys[:, :, None] * keys[:, None, :]).flatten(1)
    identity = torch.eye(keys.shape[1], dtype=keys.dtype)

    def objective(queries: Tensor) -> Tensor:
        slack = 1 - queries.square().sum(-1) / radius**2
        barrier_term = barrier * slack.clamp(min=0).log()  # -inf outside of the ball
        return derivatives(queries @ keys.T + bias)[0] + barrier_term

    for _ in range(_MAX_STEPS):
        _, logit_gradient, weights, centred = derivatives(queries @ keys.T + bias)
        slack = radius**2 - queries.square().sum(-1)[:, None]
        gradient = logit_gradient @ keys - 2 * barrier * queries / slack
        curvature = (weights @ products).unflatten(1, identity.shape)
        if centred:
            mean = weights @ keys
            curvature = curvature - mean[:, :, None] * mean[:, None, :]
        outer = queries[:, :, None] * queries[:, None, :]
        curvature = curvature + barrier * (2 * identity / slack[..., None] + 4 * outer / slack[..., None] ** 2)
        step = torch.linalg.solve(curvature, gradient)
        decrement = (gradient * step).sum(-1)
        if decrement.max() < _DECREMENT:
            return queries
        length = torch.ones_like(decrement)
        before = objective(queries)
        for _ in range(_MAX_HALVINGS):
            too_long = objective(queries + length[:, None] * step) < before + 0.1 * length * decrement - 1e-12
            if not too_long.any():
                break
            length = torch.where(too_long, length / 2, length)
        queries = queries + length[:, None] * step
    raise RuntimeError(f"Newton's method did not find the largest attention in {_MAX_STEPS} steps.")
