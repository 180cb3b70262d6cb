"""Compare this library with the stick-breaking kernels of flash-linear-attention, behind the same function, on one GPU.

Both contenders have the interface of `parallel_stickbreaking_attn`: the function of flash-linear-attention, and
`megatron_sb.compat.parallel_stickbreaking_attn`, by which `megatron_sb.integrations.flash_linear_attention.install()`
replaces it. Both also compute the mass, and skip nothing. They take turns, each with a cold L2 cache; times are
medians. The inputs are the "full" ones of attention.py. "both" is forward and backward.

An error is the norm of the difference to float64 divided by the norm of the float64 result, of one head. The table has
the largest error of o and the mass (forward), or of the gradients of q, k and v (backward). "difference" compares the
two contenders in the same way, over all heads.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator

import torch
from attention import calls_of, draw_inputs
from peers import Contender
from table import table_main
from timing import DRY_RUN_FACTOR, FACTORS, on_gpu, take_turns
from torch import Tensor

from megatron_sb import compat, reference

SHAPES = tuple((b, s, h, d) for h, d in ((24, 64), (12, 128)) for b, s in ((8, 4096), (2, 16384)))
RESULTS = {"forward": slice(0, 2), "backward": slice(2, 5)}  # of results_of: o and mass, gradients

Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def functions() -> dict[str, Function]:
    """Return the contenders. Without a GPU, the reference of flash-linear-attention stands in for its kernels."""
    try:
        theirs = importlib.import_module("fla.ops.stickbreaking_attn")
    except ImportError as error:
        sys.exit(f"Python cannot import flash-linear-attention ({error}). Install it: pip install fla-core")
    kernel = theirs.parallel_stickbreaking_attn if on_gpu() else theirs.naive_stickbreaking_attn
    return {"ours": compat.parallel_stickbreaking_attn, "fla": kernel}


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same in float64."""
    o, mass = reference.stickbreaking_attention(q, k, v, return_mass=True)
    return o, mass.transpose(1, 2)


def results_of(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Return o, the mass, and the gradients of q, k and v."""
    *leaves, do = (x.detach() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    o, mass = function(*leaves)
    return [o.detach(), mass.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error of a tensor, as the docstring of this file defines it."""
    pairs = [(x.double(), y.double()) for x, y in zip(found, expected, strict=True)]
    return max(((x - y).norm() / y.norm()).item() for x, y in pairs)


def errors(contenders: dict[str, Function], inputs: list[Tensor]) -> dict[str, dict[str, float]]:
    """Return by direction the error of each contender, and their difference."""
    found = {name: results_of(function, inputs) for name, function in contenders.items()}
    expected = results_of(exact, [x[:1, :, :1].double() for x in inputs])
    by_direction = {}
    for direction, part in RESULTS.items():
        of = {name: [x[:1, :, :1] for x in results[part]] for name, results in found.items()}
        by_direction[direction] = {name: largest_error(results, expected[part]) for name, results in of.items()}
        by_direction[direction]["difference"] = largest_error(found["ours"][part], found["fla"][part])
    return by_direction


def measure(contenders: dict[str, Function], shape: tuple[int, int, int, int], seconds: float) -> list[dict]:
    """Measure a shape by direction: milliseconds, TFLOP/s and errors."""
    b, s, h, d = shape
    inputs = draw_inputs("full", *shape)
    found = errors(contenders, inputs)
    calls = {}
    for name, function in contenders.items():
        contender = Contender(name, lambda q, k, v, function=function: function(q, k, v)[0], heads_first=False)
        calls[name] = calls_of(contender, inputs)
    rows = []
    for direction, factor in FACTORS.items():
        ms = take_turns({name: of[direction] for name, of in calls.items()}, seconds=seconds)
        rate = {name: 2 * b * h * s**2 * d * factor / value / 1e9 for name, value in ms.items()}
        about = {"shape": f"b={b} h={h} d={d} L={s}", "direction": direction}
        rows.append({**about, "ms": ms, "rate": rate, "error": found.get(direction)})
    return rows


def line(row: dict) -> str:
    """Format a row of the table."""
    ms, rate, error = row["ms"], row["rate"], row["error"]
    cells = [row["shape"], row["direction"], *(f"{ms[name]:.2f}, {rate[name]:.0f}" for name in ("ours", "fla"))]
    cells.append(f"{ms['fla'] / ms['ours']:.2f}")
    cells += [f"{error[name]:.1e}" if error else "-" for name in ("ours", "fla", "difference")]
    return f"| {' | '.join(cells)} |"


def rows(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the rows of every shape."""
    contenders = functions()
    for b, length, h, d in SHAPES:
        yield from measure(contenders, (b, length if on_gpu() else length // DRY_RUN_FACTOR, h, d), options.seconds)


def main(args: list[str] | None = None) -> None:
    """Measure every shape and print the table: milliseconds and TFLOP/s, the ratio of the times, and errors."""
    heads = ["shape", "direction", "ours", "fla", "fla / ours", "error of ours", "error of fla", "difference"]
    table_main(__doc__, args, heads, rows, line)


if __name__ == "__main__":
    sys.exit(main())
