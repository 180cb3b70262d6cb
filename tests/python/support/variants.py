"""Inputs, results and errors of the variants of the logit: forget gates and Euclidean logits."""

import torch
from torch import Tensor

from megatron_sb import reference, stickbreaking_attention, stickbreaking_attention_varlen

from .accuracy import accumulation_type, relative_errors
from .inputs import Inputs, make_inputs

# The argument `logits`, and whether there is a forget gate.
VARIANTS = {"euclidean": ("euclidean", False), "gated": ("dot", True), "gated euclidean": ("euclidean", True)}
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


def make_variant(name: str, regime: str = "randn", gates: str = "mixed", **sizes) -> tuple[Inputs, dict]:
    """Return inputs and options of a variant. Forget gates, of kind `gates`, have the accumulation type."""
    logits, gated = VARIANTS[name]
    x = make_inputs(regime, **sizes)
    options = {"logits": logits}
    if x.q.dtype == torch.float16:  # as with a scaled loss, because fp16 has no numbers below 6e-8
        x.do, x.dmass = x.do * 256, x.dmass * 256
    if logits == "euclidean":
        # |q - k|^2 is about 2 d. The scale keeps logits at -8 or above in wide heads, because fp16 has no numbers below
        # 6e-8.
        options["scale"] = min(0.5 * x.q.shape[-1] ** -0.5, 4 / x.q.shape[-1])
    if gated:
        generator = torch.Generator(x.k.device).manual_seed(1)
        gate = GATES[gates](torch.randn(x.k.shape[:-1], generator=generator)).clamp(1e-9, 1)
        options["forget_gate"] = gate.to(accumulation_type(x.k.dtype))
    return x, options


def run_variant(attention, x: Inputs, options: dict, *args, **more) -> dict[str, Tensor]:
    """Return o, mass, dq, dk, dv, and dgate if there is a forget gate."""
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in "qkv"}
    if "forget_gate" in options:
        leaves["gate"] = options["forget_gate"].detach().requires_grad_()
        options = {**options, "forget_gate": leaves["gate"]}
    o, mass = attention(leaves["q"], leaves["k"], leaves["v"], *args, return_mass=True, **options, **more)
    gradients = torch.autograd.grad((o, mass), [*leaves.values()], (x.do.to(o.dtype), x.dmass.to(mass.dtype)))
    results = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"o": o.detach(), "mass": mass.detach(), **results}


def wide_inputs(x: Inputs, options: dict) -> tuple[Inputs, dict]:
    """Return the same inputs and options in float64."""
    gate = {"forget_gate": options["forget_gate"].double()} if "forget_gate" in options else {}
    return Inputs(*(t.double() for t in vars(x).values())), {**options, **gate}


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
        options = {key: value[0] if key == "forget_gate" else value for key, value in options.items()}
    more = {"attend_current": attend_current, "mass_threshold": 0.0}
    actual = run_variant(ours, x, options, *args, **more)  # first, so that recycled memory cannot hold its results
    expected = run_variant(theirs, *wide_inputs(x, options), *args, **more)
    found = errors(actual, expected)
    allowed = ALLOWED[x.q.dtype]
    assert all(error <= allowed for error in found.values()), f"{found}, allowed {allowed}"
