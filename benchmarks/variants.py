"""What forget gates and Euclidean logits cost over plain attention, on one GPU, in one run.

A row's contenders take turns, each with a cold L2; times are medians. Gates go to the portable kernels, and so do heads
that Euclidean logits make wider; MEGATRON_SB_KERNELS=portable sends the plain attention there too. Inputs are those of
attention.py in which nothing can be skipped; "both" is forward and backward, with the gradients of the gates too.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from attention import DRY_RUN_FACTOR, FACTORS, calls_of, draw_inputs
from peers import ours
from timing import machine, on_gpu, take_turns

SHAPES = ((2, 16384, 12, 128), (2, 16384, 24, 64))


def measure(shape: tuple[int, int, int, int], seconds: float) -> list[dict]:
    """Milliseconds and TFLOP/s of the plain attention's operations, of every contender, by direction."""
    b, s, h, d = shape
    inputs = draw_inputs("full", *shape)
    gates = torch.full((b, s, h), 0.99, device=inputs[0].device).requires_grad_()
    # |q - k|^2 is about 2 d + 44 sqrt(d) here, so that logits are far enough below 0 for nothing to be skipped
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


def main(args: list[str] | None = None) -> None:
    """Measure every shape and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of device time for the rounds of one line")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes without a GPU, to try this script")
    options = parser.parse_args(args)
    if not on_gpu() and not options.dry_run:
        parser.error("torch sees no GPU here; --dry-run tries the script at toy sizes")
    record = {"machine": machine(), "rows": []}
    print(record["machine"], flush=True)
    print("| shape | direction | plain | gated | euclidean | gated euclidean |  (ms, TFLOP/s)")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for b, length, h, d in SHAPES:
        for row in measure((b, length if on_gpu() else length // DRY_RUN_FACTOR, h, d), options.seconds):
            record["rows"].append(row)
            cells = " | ".join(f"{row['ms'][name]:.2f}, {row['tflops'][name]:.0f}" for name in row["ms"])
            print(f"| {row['shape']} | {row['direction']} | {cells} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
