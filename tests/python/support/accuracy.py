"""Compare an operator's errors against the float64 oracle with the errors of a plain computation.

The plain computation sums logarithms in the kernels' accumulation type (fp64 for fp64 inputs, fp32 for all others) and
rounds its results to the inputs' type. Kernels for half precision on a GPU must also round their weights. For these
kernels the plain computation is the exact one, rounded in the same places (support/rounded.py).

An operator's error may be a factor above that of the plain computation, plus some units in the last place, which grow
with the number of keys. There is no absolute tolerance.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_sb import reference

from .inputs import Inputs
from .rounded import rounded_results, rounds_weights

RESULTS = ("o", "mass", "dq", "dk", "dv")
_FACTOR = 2.0
_FLOOR_ULPS = 16.0
_FLOOR_ULPS_PER_KEY = 0.004
_MASS_FLOOR_ULPS_PER_KEY = 0.06  # a mass is a product over all keys, so it contains the rounding error of each logit


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, attend_current: bool = False) -> tuple[Tensor, Tensor]:
    """Return output and mass from the definition, computed in the accumulation type with the default scale.

    The output is rounded to the type of q.
    """
    accumulation = accumulation_type(q.dtype)
    num_queries, num_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q_, k_, v_ = (x.to(accumulation).transpose(1, 2) for x in (q, k, v))
    k_, v_ = (x.repeat_interleave(group, dim=1) for x in (k_, v_))
    age = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    hidden = age < 0 if attend_current else age <= 0
    z = (q_ @ k_.mT) * q.shape[-1] ** -0.5
    log_rest = logsigmoid(-z).masked_fill(hidden, 0.0)
    log_newer = log_rest.flip(-1).cumsum(-1).flip(-1) - log_rest
    weights = (logsigmoid(z) + log_newer).masked_fill(hidden, -torch.inf).exp()
    return (weights @ v_).transpose(1, 2).to(q.dtype), log_rest.sum(-1).exp()


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which kernels for inputs of this dtype compute sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def run(attention: Callable, inputs: Inputs, *args, mass_in_loss: bool = True, **options) -> dict[str, Tensor]:
    """Return o, mass, dq, dk, dv of attention(q, k, v, *args, **options), which returns (o, mass).

    The attention gets the inputs with the strides that they have.
    """
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    o, mass = attention(q, k, v, *args, **options)
    outputs, gradients = (o, mass), (inputs.do.to(o.dtype), inputs.dmass.to(mass.dtype))
    if not mass_in_loss:
        outputs, gradients = outputs[:1], gradients[:1]
    d_inputs = torch.autograd.grad(outputs, (q, k, v), gradients)
    return dict(zip(RESULTS, (o.detach(), mass.detach(), *d_inputs), strict=True))


def relative_errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the relative errors in the Frobenius norm and of the largest element. They are NaN if a tensor has a NaN.

    If the norm of `expected` is below tiny / eps, the errors are relative to tiny / eps. Such masses can be subnormal,
    and kernels may treat their rows as used up.
    """
    tiny = torch.finfo(actual.dtype).tiny / torch.finfo(actual.dtype).eps
    expected = expected.double()
    difference = actual.double() - expected
    if not expected.numel() or not (expected.any() or difference.any()):
        return 0.0, 0.0
    return (
        (difference.norm() / expected.norm().clamp_min(tiny)).item(),
        (difference.abs().max() / expected.abs().max().clamp_min(tiny)).item(),
    )


def floors(dtype: torch.dtype, num_keys: int) -> dict[str, float]:
    """Return the relative error of each result that is accepted even if the plain computation has no error."""
    ulp = torch.finfo(accumulation_type(dtype)).eps
    per_key = dict.fromkeys(RESULTS, _FLOOR_ULPS_PER_KEY) | {"mass": _MASS_FLOOR_ULPS_PER_KEY}
    return {name: ulp * (_FLOOR_ULPS + growth * num_keys) for name, growth in per_key.items()}


def assert_accurate(
    attention: Callable, inputs: Inputs, *, attend_current: bool = False, names: tuple[str, ...] = RESULTS, **options
) -> None:
    """Assert that the results of a dense attention are accurate. Only the operator gets `options`.

    The operator runs first, so that recycled memory of the oracle cannot hold its results.
    """
    actual = run(attention, inputs, attend_current=attend_current, return_mass=True, **options)
    if rounds_weights(inputs.q):
        plain = rounded_results(inputs, attend_current=attend_current)
    else:
        plain = run(plain_attention, inputs, attend_current=attend_current)
    exact = Inputs(*(x.double() for x in vars(inputs).values()))
    oracle = run(reference.stickbreaking_attention, exact, attend_current=attend_current, return_mass=True)
    assert_errors(actual, plain, oracle, floors(inputs.q.dtype, inputs.k.shape[1]), names)


def assert_errors(
    actual: dict[str, Tensor],
    plain: dict[str, Tensor],
    oracle: dict[str, Tensor],
    allowed: dict[str, float],
    names: tuple[str, ...] = RESULTS,
) -> None:
    """Assert for each named result: error <= _FACTOR * error of the plain computation + `allowed`."""
    for name in names:
        assert actual[name].shape == oracle[name].shape, f"{name}: {actual[name].shape}, expected {oracle[name].shape}"
        ours, theirs = (relative_errors(x[name], oracle[name]) for x in (actual, plain))
        for kind, our, their in zip(("Frobenius", "largest"), ours, theirs, strict=True):
            bound = _FACTOR * their + allowed[name]
            assert our <= bound, f"{name}: {kind} error {our:.3g} is above {bound:.3g} (plain computation {their:.3g})"
