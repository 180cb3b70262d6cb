"""Which keys lie on the convex hull of all of them, and how much attention a query can give to each.

The largest attention that key i gets from any query q with |q| <= R, the logits' scale in q:

    softmax         max_q  exp(q . k_i) / sum_l exp(q . k_l)
    euclidean       max_q  exp(-c |q - k_i|^2) / sum_l exp(-c |q - k_l|^2)
    stick_breaking  max_q  sigmoid(q . k_i) prod_{l > i} (1 - sigmoid(q . k_l))                       (paper eq. 1)

A softmax over dot products is largest where q . k_i is, which no q makes it for a key inside the hull: with k_i a mean
of others that has weights w, Jensen's inequality leaves it w_max / (1 + w_max) at most, never more than a half. |q| has
to be bounded because the supremum of a vertex, 1, is for |q| to infinity. Up to what all keys share, euclidean logits
are x . k_l - c |k_l|^2 with x = 2 c q: the same problem with a bias. Here |x| <= R as well, distances are taken from
the keys' mean (they do not depend on it), and c = R / (2 max |k|), the largest for which such a q lies on every key.

All three logarithms are concave in q, so that ascent from anywhere ends at the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

ATTENTIONS = ("softmax", "euclidean", "stick_breaking")
MAX_HEAD_DIM = 8  # the facets that Qhull makes grow exponentially with the dimension
_BARRIERS = (1.0, 1e-2, 1e-4)
_MAX_STEPS = 200
_MAX_HALVINGS = 60
_DECREMENT = 1e-9

# The logarithm of the attention of problem i to key i for logits (n, n), its gradient with respect to them, and the
# weights (n, n) of keys whose second moment, around their mean where the flag says so, is minus the Hessian.
_Derivatives = tuple[Tensor, Tensor, Tensor, bool]


def on_hull(keys: np.ndarray) -> np.ndarray:
    """Which keys are vertices of the convex hull of all: bool (n,). keys: (n, d), d from 2 to 8, n > d + 1.

    Raises ValueError for other shapes, and for keys that lie in a plane of fewer dimensions.
    """
    from scipy.spatial import ConvexHull, QhullError

    if keys.ndim != 2 or not 2 <= keys.shape[1] <= MAX_HEAD_DIM or len(keys) < keys.shape[1] + 2:
        raise ValueError(
            f"keys has shape {keys.shape}; (n, d) with d from 2 to {MAX_HEAD_DIM} and n of at least d + 2 is allowed"
        )
    vertices = np.zeros(len(keys), dtype=bool)
    try:
        vertices[ConvexHull(keys).vertices] = True
    except QhullError as error:
        raise ValueError(
            f"keys has no convex hull of dimension {keys.shape[1]}: {error.args[0].splitlines()[0]}"
        ) from error
    return vertices


def largest_attention(keys: Tensor, attention: str, query_norm: float) -> Tensor:
    """The most attention each key can get from one query: (n,) float64, correct to a ten-thousandth of itself.

    keys: (n, d) float64, oldest first; the query is newer than all. attention: one of ATTENTIONS. query_norm: R.
    Newton's method on the logarithm plus mu log(1 - |q|^2 / R^2) for mu to 1e-4, which is then at most mu too low.
    Raises ValueError for another attention or a query_norm that is not positive; RuntimeError without convergence.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention is {attention!r}; one of {', '.join(map(repr, ATTENTIONS))} is allowed")
    if not 0 < query_norm < math.inf:
        raise ValueError(f"query_norm is {query_norm}; a finite number greater than 0 is allowed")
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
    """Newton's method with step halving, one problem for each key, all at once; queries (n, d), inside the ball."""
    products = (keys[:, :, None] * keys[:, None, :]).flatten(1)
    identity = torch.eye(keys.shape[1], dtype=keys.dtype)

    def value(at: Tensor) -> Tensor:
        room = 1 - at.square().sum(-1) / radius**2
        inside = barrier * room.clamp(min=0).log()  # -inf outside
        return derivatives(at @ keys.T + bias)[0] + inside

    for _ in range(_MAX_STEPS):
        _, towards, weights, centred = derivatives(queries @ keys.T + bias)
        room = radius**2 - queries.square().sum(-1)[:, None]
        gradient = towards @ keys - 2 * barrier * queries / room
        curvature = (weights @ products).unflatten(1, identity.shape)
        if centred:
            mean = weights @ keys
            curvature = curvature - mean[:, :, None] * mean[:, None, :]
        outer = queries[:, :, None] * queries[:, None, :]
        curvature = curvature + barrier * (2 * identity / room[..., None] + 4 * outer / room[..., None] ** 2)
        step = torch.linalg.solve(curvature, gradient)
        decrement = (gradient * step).sum(-1)
        if decrement.max() < _DECREMENT:
            return queries
        length = torch.ones_like(decrement)
        before = value(queries)
        for _ in range(_MAX_HALVINGS):
            short = value(queries + length[:, None] * step) < before + 0.1 * length * decrement - 1e-12
            if not short.any():
                break
            length = torch.where(short, length / 2, length)
        queries = queries + length[:, None] * step
    raise RuntimeError(f"the largest attention was not found in {_MAX_STEPS} steps of Newton's method")
