"""Measure what forget gates and Euclidean logits cost compared with plain attention on one GPU.

The contenders of a row take turns, each with a cold L2 cache; times are medians. The portable kernels serve Euclidean
logits with head_dim above 120. Set MEGATRON_SB_KERNELS=portable to use them for all contenders.
The inputs are the "full" ones of attention.py, where nothing can be skipped. "both" is forward and backward, including
the gradients of the gates.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from attention import calls_of, draw_inputs
from peers import ours
from table import table_main
from timing import DRY_RUN_FACTOR, FACTORS, on_gpu, take_turns

SHAPES = ((2, 16384, 12, 128), (2, 16384, 24, 64))


def measure(shape: tuple[int, int, int, int], seconds: float) -> list[dict]:
    """Measure every contender by direction: milliseconds, and TFLOP/s that count the operations of plain attention."""
    b, s, h, d = shape
    inputs = draw_inputs("full", *shape)
    gates = torch.full((b, s, h), 0.99, device=inputs[0].device).requires_grad_()
    # |q - k|^2 is about 2 d + 44 sqrt(d) here. The logits are so far below 0 that nothing can be skipped.
    euclidean = {"logits": "euclidean", "scale": 0.25 * d**-0.5}
    contenders = {
        "plain": ours(),
        "gated": ours(forget_gate=gates),
        "euclidean": ours(**euclidean),
        "gated euclidean": ours(forget_gate=gates, **euclidean),
    }
    calls = {name: calls_of(contender, inputs) for name, contender in contenders.items()}
    rows = []
    for direction in ("forward", "both"):
        ms = take_turns({name: of[direction] for name, of in calls.items()}, seconds=seconds)
        flops = 2 * b * h * s**2 * d * FACTORS[direction]
        tflops = {name: flops / value / 1e9 for name, value in ms.items()}
        rows.append({"shape": f"b={b} h={h} d={d} L={s}", "direction": direction, "ms": ms, "tflops": tflops})
    return rows


def line(row: dict) -> str:
    """Format a row of the table."""
    cells = " | ".join(f"{row['ms'][name]:.2f}, {row['tflops'][name]:.0f}" for name in row["ms"])
    return f"| {row['shape']} | {row['direction']} | {cells} |"


def rows(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the rows of every shape."""
    for b, length, h, d in SHAPES:
        yield from measure((b, length if on_gpu() else length // DRY_RUN_FACTOR, h, d), options.seconds)


def main(args: list[str] | None = None) -> None:
    """Measure every shape and print the table: milliseconds, TFLOP/s."""
    heads = ["shape", "direction", "plain", "gated", "euclidean", "gated euclidean"]
    table_main(__doc__, args, heads, rows, line)


if __name__ == "__main__":
    sys.exit(main())
