"""Measure what the remainder bias and the head norm add to the time of the attention on one GPU.

"bare" is the attention alone. "fused" adds both with `head_output`, "torch" adds the same with torch's operators. The
contenders of a row take turns, each with a cold L2 cache; times are medians. A forward is one for training. "both" is
forward and backward, including the gradients of the parameters. The inputs are the "full" ones of attention.py, where
nothing can be skipped.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from attention import SHAPES, draw_inputs
from table import table_main
from timing import DRY_RUN_FACTOR, Call, on_gpu, take_turns
from torch import Tensor
from torch.nn.functional import group_norm

from megatron_sb import head_output, stickbreaking_attention

EPS = 1e-5


def bare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the attention alone."""
    return stickbreaking_attention(q, k, v)


def fused(q: Tensor, k: Tensor, v: Tensor, remainder_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute the attention, then `head_output`."""
    o, mass = stickbreaking_attention(q, k, v, return_mass=True)
    return head_output(o, mass, remainder_bias, weight, bias, eps=EPS)


def torch_operators(q: Tensor, k: Tensor, v: Tensor, remainder_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute the attention, then the remainder bias and the head norm with torch's operators."""
    o, mass = stickbreaking_attention(q, k, v, return_mass=True)
    h, d = o.shape[2:]
    x = (o + mass.transpose(1, 2)[..., None] * remainder_bias.view(h, d)).to(o.dtype)
    return group_norm(x.view(-1, h * d), h, weight, bias, EPS).view(o.shape)


def calls_of(function, inputs: list[Tensor], parameters: list[Tensor]) -> dict[str, Call]:
    """Return the calls of a contender by direction. inputs: q, k, v, do (b, s, h, d); parameters: (h * d,) each."""
    *leaves, d_out = inputs
    leaves = [x.detach().requires_grad_() for x in (*leaves, *parameters)]

    def forward():
        return function(*leaves)

    def both():
        return torch.autograd.grad(function(*leaves), leaves, d_out)

    return {"forward": forward, "both": both}


def measure(shape: tuple[int, int, int, int], seconds: float) -> list[dict]:
    """Measure milliseconds of every contender, and the relative cost over "bare", by direction."""
    b, s, h, d = shape
    inputs = draw_inputs("full", b, s, h, d)
    generator = torch.Generator(inputs[0].device).manual_seed(1)
    like = {"device": inputs[0].device, "dtype": inputs[0].dtype, "generator": generator}
    parameters = [torch.randn(h * d, **like) for _ in range(3)]
    contenders = {
        "bare": calls_of(bare, inputs, []),
        "fused": calls_of(fused, inputs, parameters),
        "torch": calls_of(torch_operators, inputs, parameters),
    }
    rows = []
    for direction in ("forward", "both"):
        ms = take_turns({name: calls[direction] for name, calls in contenders.items()}, seconds=seconds)
        cost = {name: value / ms["bare"] - 1 for name, value in ms.items() if name != "bare"}
        rows.append({"shape": f"b={b} h={h} d={d} L={s}", "direction": direction, "ms": ms, "cost": cost})
    return rows


def line(row: dict) -> str:
    """Format a row of the table."""
    ms, cost = row["ms"], row["cost"]
    times = " | ".join(f"{ms[name]:.3f}" for name in ("bare", "fused", "torch"))
    return f"| {row['shape']} | {row['direction']} | {times} | {cost['fused']:+.1%} | {cost['torch']:+.1%} |"


def rows(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the rows of every shape."""
    for b, length, h, d in SHAPES:
        yield from measure((b, length if on_gpu() else length // DRY_RUN_FACTOR, h, d), options.seconds)


def main(args: list[str] | None = None) -> None:
    """Measure every shape and print the table."""
    heads = ["shape", "direction", "bare ms", "fused ms", "torch ms", "fused over bare", "torch over bare"]
    table_main(__doc__, args, heads, rows, line)


if __name__ == "__main__":
    sys.exit(main())
