"""Measure what forget gates and Euclidean logits cost compared with plain attention on one GPU.

The contenders of a row take turns, each with a cold L2 cache; times are medians. Set MEGATRON_SB_KERNELS=portable to
use the portable kernels for all contenders. The inputs are the "full" ones of attention.py, where nothing can be
skipped. "both" is forward and backward, including the gradients of the gates. "decode" is one query for each sequence
in a cache of L keys.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from attention import calls_of, draw_inputs
from peers import ours
from table import table_main
from timing import DRY_RUN_FACTOR, FACTORS, on_gpu, take_turns

from megatron_sb import stickbreaking_attention_with_kvcache
from megatron_sb.ops.kvcache import stored_keys

SHAPES = ((2, 16384, 12, 128), (2, 16384, 24, 64))
CACHES = ((32, 16384, 8, 128), (32, 16384, 8, 64))
EUCLIDEAN_SCALE = 0.25  # times d^-0.5. |q - k|^2 is about 2 d + 44 sqrt(d), so nothing can be skipped.


def measure(shape: tuple[int, int, int, int], seconds: float) -> list[dict]:
    """Measure every contender by direction: milliseconds, and TFLOP/s that count the operations of plain attention."""
    b, s, h, d = shape
    inputs = draw_inputs("full", *shape)
    gates = torch.full((b, s, h), 0.99, device=inputs[0].device).requires_grad_()
    euclidean = {"logits": "euclidean", "scale": EUCLIDEAN_SCALE * d**-0.5}
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
        rows.append({"shape": f"b={b} h={h} d={d} L={s}", "direction": direction, "ms": ms, "rate": tflops})
    return rows


def measure_decoding(shape: tuple[int, int, int, int], seconds: float) -> dict:
    """Measure every contender: milliseconds, and GB/s that count the keys and values of plain attention."""
    b, s, h, d = shape
    q, k, v = (x.detach() for x in draw_inputs("full", *shape)[:3])
    q = q[:, -1:].contiguous()
    seqlens = torch.full((b,), s, dtype=torch.int32, device=q.device)
    gates = torch.full((b, s, h), 0.99, device=q.device)

    def call(logits="dot", forget_gate=None):
        keys = stored_keys(k, logits=logits, forget_gate=forget_gate)
        options = {"logits": logits, "forget_gate": forget_gate is not None}
        scale = EUCLIDEAN_SCALE * d**-0.5 if logits == "euclidean" else None
        return lambda: stickbreaking_attention_with_kvcache(q, keys, v, cache_seqlens=seqlens, scale=scale, **options)

    calls = {
        "plain": call(),
        "gated": call(forget_gate=gates),
        "euclidean": call("euclidean"),
        "gated euclidean": call("euclidean", gates),
    }
    with torch.no_grad():
        ms = take_turns(calls, seconds=seconds)
    rate = {name: 4 * b * s * h * d / value / 1e6 for name, value in ms.items()}
    return {"shape": f"b={b} h={h} d={d} L={s}", "direction": "decode", "ms": ms, "rate": rate}


def line(row: dict) -> str:
    """Format a row of the table."""
    cells = " | ".join(f"{row['ms'][name]:.2f}, {row['rate'][name]:.0f}" for name in row["ms"])
    return f"| {row['shape']} | {row['direction']} | {cells} |"


def rows(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the rows of every shape."""
    for b, length, h, d in SHAPES:
        yield from measure((b, length if on_gpu() else length // DRY_RUN_FACTOR, h, d), options.seconds)
    for b, length, h, d in CACHES:
        yield measure_decoding((b, length if on_gpu() else length // DRY_RUN_FACTOR, h, d), options.seconds)


def main(args: list[str] | None = None) -> None:
    """Measure every shape and print the table: milliseconds and TFLOP/s; for decoding milliseconds and GB/s."""
    heads = ["shape", "direction", "plain", "gated", "euclidean", "gated euclidean"]
    table_main(__doc__, args, heads, rows, line)


if __name__ == "__main__":
    sys.exit(main())
