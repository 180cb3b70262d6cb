"""Inputs, results and errors of the variants of the logit: forget gates, Euclidean logits and biases."""

import torch
from torch import Tensor

from megatron_sb import reference, stickbreaking_attention, stickbreaking_attention_varlen

from .accuracy import accumulation_type, relative_errors
from .inputs import Inputs, make_inputs

TENSORS = ("forget_gate", "query_bias", "key_bias")
BIASES = TENSORS[1:]
# The argument `logits`, and the options that are tensors.
WITHOUT_BIASES = {
    "euclidean": ("euclidean", ()),
    "gated": ("dot", ("forget_gate",)),
    "gated euclidean": ("euclidean", ("forget_gate",)),
    "reaching": ("dot", ()),
    "gated reaching": ("dot", ("forget_gate",)),
}
VARIANTS = WITHOUT_BIASES | {
    "biased": ("dot", BIASES),
    "query bias": ("dot", BIASES[:1]),
    "key bias": ("dot", BIASES[1:]),
    "biased euclidean": ("euclidean", BIASES),
    "gated biased": ("dot", TENSORS),
}
REACH = (0.5, 9.0)  # of the variants named "reaching"
# Values of forget gates, from standard normal numbers. "mixed" has values from nearly 0 to nearly 1.
GATES = {
    "mixed": lambda x: (4 * x + 3).sigmoid(),
    "open": torch.ones_like,
    "nearly open": lambda x: 1 - 10 ** (-4 + x),
    "half open": lambda x: 0.3 + 0.4 * x.sigmoid(),
    "nearly closed": lambda x: 10 ** (-4 + x),
}
# Relative errors that are explained by rounding operands and results to this type, in sums with terms of both signs.
ALLOWED = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def reach_of(name: str) -> dict:
    """Return the option `reach` of a variant that has it."""
    return {"reach": REACH} if "reaching" in name else {}


def make_variant(name: str, regime: str = "randn", gates: str = "mixed", **sizes) -> tuple[Inputs, dict]:
    """Return inputs and options of a variant. Forget gates, of kind `gates`, and biases have the accumulation type."""
    logits, tensors = VARIANTS[name]
    x = make_inputs(regime, **sizes)
    options = {"logits": logits, **reach_of(name)}
    if x.q.dtype == torch.float16:  # as with a scaled loss, because fp16 has no numbers below 6e-8
        x.do, x.dmass = x.do * 256, x.dmass * 256
    if logits == "euclidean":
        # |q - k|^2 is about 2 d. The scale keeps logits at -8 or above in wide heads, because fp16 has no numbers below
        # 6e-8.
        options["scale"] = min(0.5 * x.q.shape[-1] ** -0.5, 4 / x.q.shape[-1])
    for seed, tensor in enumerate(tensors, start=1):
        generator = torch.Generator(x.k.device).manual_seed(seed)
        values = torch.randn((x.q if tensor == "query_bias" else x.k).shape[:-1], generator=generator)
        if tensor == "forget_gate":
            values = GATES[gates](values).clamp(1e-9, 1)
        options[tensor] = values.to(accumulation_type(x.k.dtype))
    return x, options


def tensors_of(options: dict) -> dict[str, Tensor]:
    """Return the options that are tensors."""
    return {name: value for name, value in options.items() if name in TENSORS}


def packed_options(options: dict) -> dict:
    """Return the options of a batch of one for the inputs as one stream of packed rows."""
    return options | {name: value[0] for name, value in tensors_of(options).items()}


def run_variant(attention, x: Inputs, options: dict, *args, **more) -> dict[str, Tensor]:
    """Return o, mass, dq, dk, dv, and dforget_gate and the like of the options that are tensors."""
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in "qkv"}
    tensors = {name: value.detach().requires_grad_() for name, value in tensors_of(options).items()}
    o, mass = attention(*leaves.values(), *args, return_mass=True, **(options | tensors), **more)
    leaves |= tensors
    gradients = torch.autograd.grad((o, mass), [*leaves.values()], (x.do.to(o.dtype), x.dmass.to(mass.dtype)))
    results = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"o": o.detach(), "mass": mass.detach(), **results}


def wide_inputs(x: Inputs, options: dict) -> tuple[Inputs, dict]:
    """Return the same inputs and options in float64."""
    wide = {name: value.double() for name, value in tensors_of(options).items()}
    return Inputs(*(t.double() for t in vars(x).values())), options | wide


def errors(actual: dict, expected: dict) -> dict[str, float]:
    """Return the relative Frobenius error of each result."""
    return {name: relative_errors(actual[name], expected[name])[0] for name in expected}


def assert_variant(name: str, regime: str, edges: list[int] | None = None, attend_current: bool = False, **sizes):
    """Assert that each result of a variant is within ALLOWED of the float64 oracle.

    `edges` are the offsets of packed documents. Without them the inputs are dense.
    """
    x, options = make_variant(name, regime, **sizes)
    ours, theirs, args = stickbreaking_attention, reference.stickbreaking_attention, ()
    if edges is not None:
        ours, theirs = stickbreaking_attention_varlen, reference.stickbreaking_attention_varlen
        x, args = x.packed(), (torch.tensor(edges, dtype=torch.int32),)
        options = packed_options(options)
    more = {"attend_current": attend_current, "mass_threshold": 0.0}
    actual = run_variant(ours, x, options, *args, **more)  # first, so that recycled memory cannot hold its results
    expected = run_variant(theirs, *wide_inputs(x, options), *args, **more)
    found = errors(actual, expected)
    allowed = ALLOWED[x.q.dtype]
    assert all(error <= allowed for error in found.values()), f"{found}, allowed {allowed}"
