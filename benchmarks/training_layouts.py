"""Compare training on one GPU with every parallel layout: losses, tokens/s and memory on the same rows.

python benchmarks/training_layouts.py record OUT.json --model dense --lengths 16384 65536
python benchmarks/training_layouts.py draw OUT.json OUT.png --more MORE.json

The script runs `megatron-sb train` with each layout for which this machine has enough GPUs, on the bytes of the Python
standard library, and reads the logs. "1 GPU again" processes two rows at a time instead of one. Its distance from
"1 GPU" shows the effect of rounding alone. tokens/s is the median over the second half of the steps.

With --layouts, layouts of four ranks also run on two GPUs, as a job of two machines that share the GPUs. NCCL then
communicates over sockets. The losses are valid, the times are not.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from arguments import record_file, whole_number
from pictures import pyplot_for_files, record_or_draw
from timing import machine

from megatron_sb.processes import module_command

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
SEVERAL_MACHINES = ROOT / "tests" / "python" / "support" / "several_machines.sh"
LIMIT_SECONDS = 500
ALONE = "1 GPU"
TP2 = {"parallel.tensor_parallel_size": 2, "parallel.sequence_parallel": True}


def cp(size: int) -> dict:
    """Return the fields of a context-parallel layout."""
    return {"stages.0.context_parallel_size": size}


def ep(size: int) -> dict:
    """Return the fields of an expert-parallel layout."""
    return {"parallel.expert_parallel_size": size}


AGAIN = {"stages.0.rows_per_micro_batch": 2}
LAYOUTS = {  # name -> number of ranks, fields
    "dense": {
        ALONE: (1, {}),
        "1 GPU again": (1, AGAIN),
        "CP2": (2, cp(2)),
        "TP2": (2, TP2),
        "CP4": (4, cp(4)),
        "TP2 CP2": (4, TP2 | cp(2)),
    },
    "moe": {
        ALONE: (1, {}),
        "1 GPU again": (1, AGAIN),
        "CP2 EP2": (2, cp(2) | ep(2)),
        "TP2 EP2": (2, TP2 | ep(2)),
        "TP2 CP2 EP2": (4, TP2 | cp(2) | ep(2)),
        "CP4 EP4": (4, cp(4) | ep(4)),
    },
}
BYTES = ["model.num_parameters=null", "model.make_vocab_size_divisible_by=128"]  # a vocabulary of bytes
MODELS = {
    "dense": (CONFIGS / "dense_350m.yaml", BYTES),
    # A quarter of the layers and experts of the 6.5B model.
    "moe": (CONFIGS / "moe_6_5b.yaml", [*BYTES, "model.num_layers=10", "model.moe.num_experts=16"]),
}


def settings(options: argparse.Namespace, length: int, num_ranks: int) -> dict:
    """Return the fields that all layouts share."""
    stage = {
        "name": "steps",
        "context_length": length,
        "steps": options.steps,
        "rows_per_step": max(2, options.tokens // length),
        "rows_per_micro_batch": 1,
        "pad_multiple": 8,  # four ranks need it; all layouts then have the same rows
        "learning_rate": 3e-4,
        "warmup_steps": 5,
    }
    return {
        "data": {"kind": "text", "paths": ["python-stdlib"], "validation_fraction": 0.3},
        "stages": [stage],
        "evaluation": {"windows": 1, "target_tokens": 256, "length_factor": 1},
        "parallel.ranks": num_ranks,
        "parallel.expert_parallel_size": 1,
        "report": {"tensorboard": False},
    }


def train(config: Path, overrides: list[str], folder: Path, machines: int) -> list[dict]:
    """Run a job and return the lines of its log. Raise RuntimeError with the end of its output if it fails."""
    start = module_command("megatron_sb.training") if machines == 1 else [SEVERAL_MACHINES]
    command = [*map(str, [*start, config, *overrides, "--out", folder])]
    environment = {**os.environ, "PYTHON": sys.executable, "SECONDS_AT_MOST": str(LIMIT_SECONDS)}
    environment |= {"NODES": str(machines), "RANKS_PER_NODE": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS + 20, env=environment)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-30:]))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def layouts_of(options: argparse.Namespace) -> Iterator[tuple[str, int, dict]]:
    """Yield name, ranks and fields of the requested layouts. Default: all for which there are enough GPUs."""
    for name, (num_ranks, fields) in LAYOUTS[options.model].items():
        if name in options.layouts if options.layouts else num_ranks <= torch.cuda.device_count():
            yield name, num_ranks, fields


def record(options: argparse.Namespace) -> None:
    """Measure every length and layout that the file lacks. If a layout fails, its error is recorded."""
    config, overrides = MODELS[options.model]
    arguments = {name: getattr(options, name) for name in ("model", "steps", "tokens", "set")}
    recorded = json.loads(options.json.read_text()) if options.json.exists() else {"machine": arguments, "rows": []}
    if recorded["machine"] | arguments != recorded["machine"]:
        raise SystemExit(
            f"{options.json} must have been recorded with {arguments}, got {recorded['machine']}. Name another file."
        )
    rows = [row for row in recorded["rows"] if "error" not in row]
    for length in options.lengths:
        for name, num_ranks, layout in layouts_of(options):
            if any((row["length"], row["layout"]) == (length, name) for row in rows):
                continue
            chosen = settings(options, length, num_ranks) | layout
            words = [*options.set, *(f"{field}={json.dumps(value)}" for field, value in chosen.items())]
            machines = 1 if num_ranks <= torch.cuda.device_count() else 2
            row = {"length": length, "layout": name, "machines": machines}
            with tempfile.TemporaryDirectory() as folder:
                try:
                    lines = train(config, [*overrides, *words], Path(folder) / "run", machines)
                    rows.append(row | measured(lines))
                    print(line_of(rows[-1], rows), flush=True)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    rows.append(row | {"error": str(error)})
                    print(length, name, error, flush=True)
            options.json.write_text(json.dumps({"machine": machine() | arguments, "rows": rows}, indent=1))


def measured(lines: list[dict]) -> dict:
    """Summarise the log of a run."""
    later = lines[len(lines) // 2 :]
    return {
        "losses": [line["loss"] for line in lines],
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in later),
        "model_tflops": statistics.median(line["model_tflops"] for line in later),
        "gib": lines[-1]["peak_gib"],
    }


def line_of(row: dict, rows: list[dict]) -> str:
    """Format a row, with the largest difference of its losses from those of one GPU."""
    alone = next((x for x in rows if (x["length"], x["layout"]) == (row["length"], ALONE) and "losses" in x), row)
    off = max(abs(a - b) for a, b in zip(row["losses"], alone["losses"], strict=True))
    line = (
        f"{row['length']:6d} {row['layout']:12s} loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}, at most "
        f"{off:.1e} from one GPU's; {row['gib']:5.1f} GiB; "
    )
    if row["machines"] > 1:
        return line + "ranks share GPUs: no times"
    return line + f"{row['tokens_per_second']:9,.0f} tokens/s, {row['model_tflops']:4.0f} model TFLOP/s a GPU"


def draw(options: argparse.Namespace) -> None:
    """Draw a column for each record and length: losses by step, and their distance from those of one GPU."""
    columns: dict[str, dict[str, list[float]]] = {}
    for file in (options.json, *options.more):
        recorded = json.loads(file.read_text())
        words = (recorded["machine"]["model"], *recorded["machine"]["set"])
        for row in recorded["rows"]:
            if "losses" in row:
                columns.setdefault(f"{', '.join(words)}, {row['length']} tokens", {})[row["layout"]] = row["losses"]
    pyplot = pyplot_for_files()
    figure, axes = pyplot.subplots(2, len(columns), figsize=(6 * len(columns), 6), squeeze=False, sharex=True)
    for (title, runs), (above, below) in zip(columns.items(), axes.T, strict=True):
        for name, losses in runs.items():
            steps = range(1, len(losses) + 1)
            above.plot(steps, losses, label=name, linewidth=1)
            if name != ALONE and ALONE in runs:
                off = [abs(a - b) for a, b in zip(losses, runs[ALONE], strict=True)]
                below.plot(steps, off, label=name, linewidth=1)
        above.set(title=title, ylabel="loss (nats per token)")
        below.set(xlabel="step", ylabel=f"distance from {ALONE}", yscale="log")
        for part in (above, below):
            if part.lines:
                part.legend()
            part.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(options.picture, dpi=110)


def main() -> None:
    """Record or draw."""
    parser, recording, drawing = record_or_draw(__doc__, record, draw)
    add = recording.add_argument
    add("--model", choices=MODELS, default="dense", help="default: %(default)s")
    add("--lengths", nargs="+", type=whole_number(1), default=[16384], help="tokens of a row (default: %(default)s)")
    add("--layouts", nargs="+", help="names of layouts (default: all for which there are enough GPUs)")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of the model; repeatable")
    add("--steps", type=whole_number(1), default=50, help="training steps (default: %(default)s)")
    add(
        "--tokens",
        type=whole_number(1),
        default=65536,
        help="tokens of a step, at least two rows (default: %(default)s)",
    )
    drawing.add_argument(
        "--more",
        nargs="+",
        type=record_file("machine", "rows"),
        default=[],
        help="more records, drawn in further columns (default: none)",
    )
    options = parser.parse_args()
    if options.run is record:
        unknown = sorted(set(options.layouts or ()) - set(LAYOUTS[options.model]))
        if unknown:
            known = ", ".join(map(repr, LAYOUTS[options.model]))
            parser.error(f"--layouts must be some of {known} with --model {options.model}, got {', '.join(unknown)}")
        if not torch.cuda.device_count():
            parser.error("torch sees no GPU, and every layout needs one.")
    options.run(options)


if __name__ == "__main__":
    main()
