"""Inputs, results and errors of the logit's two variants: forget gates and Euclidean logits."""

import torch
from torch import Tensor

from megatron_sb import reference, stickbreaking_attention, stickbreaking_attention_varlen

from .accuracy import relative_errors
from .inputs import Inputs, make_inputs

# logits, whether there are gates
VARIANTS = {"euclidean": ("euclidean", False), "gated": ("dot", True), "gated euclidean": ("euclidean", True)}
# What rounding the operands and the results to this type explains, of numbers that are sums of both signs.
ALLOWED = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def make_variant(name: str, regime: str = "randn", **sizes) -> tuple[Inputs, dict]:
    """Inputs and the options of a variant, the gates in the accumulation type and from nearly closed to nearly open."""
    logits, gated = VARIANTS[name]
    x = make_inputs(regime, **sizes)
    options = {"logits": logits}
    if x.q.dtype == torch.float16:  # fp16 is trained with a scaled loss: gradients end at 6e-8
        x.do, x.dmass = x.do * 256, x.dmass * 256
    if logits == "euclidean":
        # |q - k|^2 is about 2 d. Logits around -8 in wide heads, not below: fp16 outputs end at 6e-8.
        options["scale"] = min(0.5 * x.q.shape[-1] ** -0.5, 4 / x.q.shape[-1])
    if gated:
        generator = torch.Generator(x.k.device).manual_seed(1)
        wide = torch.float64 if x.k.dtype == torch.float64 else torch.float32
        options["forget_gate"] = (4 * torch.randn(x.k.shape[:-1], generator=generator) + 3).sigmoid().to(wide)
    return x, options


def run_variant(attention, x: Inputs, options: dict, *args, **more) -> dict[str, Tensor]:
    """o, mass, dq, dk, dv and dgate where there are gates."""
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in "qkv"}
    if "forget_gate" in options:
        leaves["gate"] = options["forget_gate"].detach().requires_grad_()
        options = {**options, "forget_gate": leaves["gate"]}
    o, mass = attention(leaves["q"], leaves["k"], leaves["v"], *args, return_mass=True, **options, **more)
    gradients = torch.autograd.grad((o, mass), [*leaves.values()], (x.do.to(o.dtype), x.dmass.to(mass.dtype)))
    results = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"o": o.detach(), "mass": mass.detach(), **results}


def wide_inputs(x: Inputs, options: dict) -> tuple[Inputs, dict]:
    """The same values in float64."""
    gate = {"forget_gate": options["forget_gate"].double()} if "forget_gate" in options else {}
    return Inputs(*(t.double() for t in vars(x).values())), {**options, **gate}


def errors(actual: dict, expected: dict) -> dict[str, float]:
    """Relative Frobenius error of each result."""
    return {name: relative_errors(actual[name], expected[name])[0] for name in expected}


def assert_variant(name: str, regime: str, edges: list[int] | None = None, attend_current: bool = False, **sizes):
    """A variant beside the float64 oracle, dense or as packed documents; every result within ALLOWED."""
    x, options = make_variant(name, regime, **sizes)
    ours, theirs, args = stickbreaking_attention, reference.stickbreaking_attention, ()
    if edges is not None:
        ours, theirs = stickbreaking_attention_varlen, reference.stickbreaking_attention_varlen
        x, args = x.packed(), (torch.tensor(edges, dtype=torch.int32),)
        options = {key: value[0] if key == "forget_gate" else value for key, value in options.items()}
    more = {"attend_current": attend_current, "mass_threshold": 0.0}
    actual = run_variant(ours, x, options, *args, **more)  # first, so that no memory holds its answer
    expected = run_variant(theirs, *wide_inputs(x, options), *args, **more)
    found = errors(actual, expected)
    allowed = ALLOWED[x.q.dtype]
    assert all(error <= allowed for error in found.values()), f"{found}, allowed {allowed}"
