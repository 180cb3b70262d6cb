"""Predict the time of the context-parallel modes from the speed of a block, of memory and of the links.

The model is megatron_sb.planning.context_parallel. This script compares it with records, and prints tables for more
ranks than were measured.

No dense row of the records below is off by more than 8%, except p2p on 4 H200s, which had more passes over memory when
it was measured. The largest errors:

- on 2 GPUs at 16K the forward of p2p took 6% less than predicted, as it computes short blocks side by side; at 64K that
  of all_gather took 8% longer;
- on 4 GPUs at 16K the forward of a2a and all_gather took 6% to 7% less, one GPU up to 6% longer.

Back to back, on 2026-11-28, the model was within 8% from 64K rows on, and p2p of 16K rows on 4 GPUs, which the host
limited. At 16K it predicted up to 13% too few TFLOP/s for the rest: the model assumes that the power limit lowers the
clocks, and with several GPUs at 16K it hardly did.

python benchmarks/context_parallel_model.py compare benchmarks/results/2026-11-30-2xh200-context-parallel.json
python benchmarks/context_parallel_model.py compare benchmarks/results/2026-11-28-4xh200-context-parallel.json
python benchmarks/context_parallel_model.py table
"""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from arguments import at_least_0, record_file

from megatron_sb.planning.context_parallel import BACK_TO_BACK, CALLS, FLOPS, MODES, Machine, Model, Shape

LENGTHS, RANKS = [2**16, 2**18, 2**20, 2**22], [8, 16, 32, 64, 128, 256, 512]
LINKS = {"NVLink": Machine.link_gbytes, "slower links": 50.0}
SHAPE, MOST_GATHERED = Shape(0, heads=32, kv_heads=8), 20e9  # bytes


def measured_rows(path: Path) -> list[tuple[Shape, int, dict]]:
    """Return (shape, ranks, row) for each dense row of a JSON file of context_parallel.py, or of several in one."""
    measured, found = json.loads(path.read_text()), []
    runs = [measured] if "rows" in measured else measured.values()
    for row in (row for run in runs if isinstance(run, dict) for row in run.get("rows", [])):
        sizes = re.fullmatch(r"L=(\d+) h=(\d+)(?::(\d+))? d=(\d+)", row.get("what", ""))
        if not sizes or "error" in row or row["name"] not in (*MODES, "one GPU"):
            continue
        length, heads, kv_heads, head_dim = (int(n or 0) for n in sizes.groups())
        shape = Shape(length, heads, kv_heads or heads, head_dim)
        found.append((shape, round(shape.forward_flops() / row["forward"]["ms"] / row["forward"]["tflops"] / 1e9), row))
    return found


def predicted_ms(shape: Shape, ranks: int, name: str, call: str) -> float:
    """Return the predicted milliseconds of a row of that name. call: "forward" or "both"."""
    return Model(Machine(), shape, ranks).time(name, *CALLS[call]) / 1e3


def compare(path: Path, within: float) -> bool:
    """Print predictions and measurements. Return whether there are dense rows and none is off by more than `within`."""
    rows = measured_rows(path)
    if not rows:
        print(f"{path} must have dense rows of context_parallel.py, and has none.", file=sys.stderr)
    good = bool(rows)
    print("| | | GPUs | forward ms | measured | ratio | forward and backward ms | measured | ratio | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for shape, ranks, row in rows:
        cells, off = [], False
        for call in CALLS:
            predicted, measured = predicted_ms(shape, ranks, row["name"], call), row[call]["ms"]
            off |= abs(predicted / measured - 1) > within
            cells += [f"{predicted:.3f}", f"{measured:.3f}", f"{predicted / measured:.2f}"]
        good &= not off
        print(f"| {row['what']} | {row['name']} | {ranks} | {' | '.join(cells)} | {'off' if off else ''} |")
    return good


def best(shape: Shape, ranks: int, link_gbytes: float, call: str) -> str:
    """Return TFLOP/s per GPU and the name of the fastest mode that supports the shape."""
    model = Model(replace(BACK_TO_BACK, link_gbytes=link_gbytes), shape, ranks)
    rates = {mode: model.tflops(mode, *CALLS[call]) for mode in MODES if model.possible(mode)}
    if max(model.gather_bytes(direction) for direction in CALLS[call]) > MOST_GATHERED:
        del rates["all_gather"]
    mode = max(rates, key=rates.get)
    return f"{rates[mode]:.0f} {mode}"


def tables() -> None:
    """Print the predicted tables by length and ranks, and the modes that they omit."""
    for link, gbytes in LINKS.items():
        for call, directions in CALLS.items():
            title = f"{' and '.join(directions)}, {link} of {gbytes:.0f} GB/s a GPU and direction"
            print(f"**Predicted**, {title}: TFLOP/s per GPU and the best mode\n")
            print(f"| tokens | {' | '.join(f'{n} GPUs' for n in RANKS)} |\n| ---: |{' ---: |' * len(RANKS)}")
            for length in LENGTHS:
                cells = [best(replace(SHAPE, length=length), n, gbytes, call) for n in RANKS]
                print(f"| {length // 1024}K | {' | '.join(cells)} |")
            print()
    print(f"{SHAPE.heads}:{SHAPE.kv_heads} heads of {SHAPE.head_dim}, bf16, calls back to back, nothing skipped.\n")
    without = [str(n) for n in RANKS if not Model(Machine(), SHAPE, n).possible("a2a")]
    print(f"- a2a: omitted for {', '.join(without)} GPUs, which do not divide the heads.")
    print(f"- all_gather: omitted where it would hold more than {MOST_GATHERED / 1e9:.0f} GB of the stream. It holds")
    for length in LENGTHS:
        model = Model(Machine(), replace(SHAPE, length=length), RANKS[0])
        held = [f"{model.gather_bytes(direction) / 1e9:.1f} GB ({direction})" for direction in FLOPS]
        print(f"  {' and '.join(held)} at {length // 1024}K;")


def main() -> None:
    """Print the predicted tables, or compare predictions with measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="print Markdown tables for more ranks than were measured")
    comparison = commands.add_parser(
        "compare", help="compare predictions with measurements; fails if a row is too far off"
    )
    comparison.add_argument("measured", type=record_file(), help="JSON file of context_parallel.py")
    comparison.add_argument(
        "--within", type=at_least_0, default=10.0, help="largest error of a row in percent (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.command == "table":
        tables()
    elif not compare(options.measured, options.within / 100):
        sys.exit(1)


if __name__ == "__main__":
    main()
