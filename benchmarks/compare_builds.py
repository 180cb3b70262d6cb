"""Compare the attention of several builds of this library on a GPU, for example before and after a change of a kernel.

Two operator libraries cannot be loaded into one process. So each build has its own process, the builds take turns for
some rounds, and the result is the median over the rounds. With --cudnn each process also times cuDNN's softmax, and the
table shows the ratio to it. The inputs have logits around -11, so that nothing can be skipped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from arguments import seconds, whole_number
from gpu_suite import library_folder
from timing import DRY_RUN_FACTOR, FACTORS, machine, on_gpu, take_turns

ROWS = tuple(
    f"{direction}:{d}:2:{h}:{h}:16384" for direction in ("forward", "backward") for d, h in ((64, 24), (128, 12))
)
LIMIT_S = 300  # of a process; a kernel that hangs ends earlier, with an error that names its waits


@dataclass(frozen=True)
class Row:
    """A call to time: direction, a key of FACTORS, and the sizes of the inputs."""

    direction: str
    d: int
    b: int
    h: int
    h_kv: int
    s: int

    @staticmethod
    def parse(text: str) -> "Row":
        """Parse DIRECTION:HEAD_DIM:BATCH:HEADS:KV_HEADS:LENGTH."""
        direction, *sizes = text.split(":")
        are_sizes = len(sizes) == 5 and all(size.isdecimal() and int(size) for size in sizes)
        if direction not in FACTORS or not are_sizes:
            raise argparse.ArgumentTypeError(
                f"a row must be DIRECTION:HEAD_DIM:BATCH:HEADS:KV_HEADS:LENGTH with a direction of {[*FACTORS]} and "
                f"sizes of at least 1, got {text!r}"
            )
        return Row(direction, *map(int, sizes))

    def __str__(self) -> str:
        return f"{self.direction} b={self.b} h={self.h}:{self.h_kv} d={self.d} L={self.s}"

    @property
    def flops(self) -> float:
        """Operations by the causal model count, as in attention.py."""
        return FACTORS[self.direction] * 2 * self.b * self.h * self.s**2 * self.d


def measure(rows: list[Row], peers: list[str], seconds: float) -> list[dict[str, float]]:
    """Return the TFLOP/s of this process's build and of the peers, for each row."""
    # They import the package. The process that starts the others has none, unless one is installed.
    from attention import calls_of, draw_inputs
    from peers import contenders

    results = []
    for row in rows:
        inputs = draw_inputs("full", row.b, row.s, row.h, row.d, h_kv=row.h_kv)
        calls = {c.name: calls_of(c, inputs)[row.direction] for c in contenders(["ours", *peers])}
        results.append({name: row.flops / ms / 1e9 for name, ms in take_turns(calls, seconds=seconds).items()})
    return results


def measure_build(package: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Run `measure` in a process that imports the package in this folder."""
    command = [sys.executable, __file__, "--measure", f"--seconds={options.seconds}", "--rows", *options.row_texts]
    command += ["--cudnn"] * options.cudnn + ["--dry-run"] * options.dry_run
    folders = [str(package), str(Path(__file__).parent)]
    # The safe path keeps Python from importing the checkout's package, which has no library.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"The measurement of {package} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def package_of(build: str) -> Path:
    """Return the folder with the package of a build: its own one, or this checkout's with its libraries."""
    folder = Path(build).resolve()
    has_package = (folder / "megatron_sb/__init__.py").exists() and any(folder.glob("megatron_sb/lib/*.so"))
    return folder if has_package else library_folder(folder)


def column_names(builds: list[str]) -> dict[str, str]:
    """Return the builds by the name of their column. A build can be given twice, which shows the noise."""
    names: dict[str, str] = {}
    for build in builds:
        count = [*names.values()].count(build) + 1
        names[build if count == 1 else f"{build}, {count}"] = build
    return names


def table(options: argparse.Namespace, rounds: dict[str, list[list[dict[str, float]]]]) -> str:
    """Return the medians as Markdown. `rounds` has the results of `measure` of each build and round."""
    lines = ["| row | " + " | ".join(rounds) + " |", "| --- |" + " ---: |" * len(rounds)]
    for index, row in enumerate(options.rows):
        cells = []
        for results in rounds.values():
            ours = statistics.median(result[index]["ours"] for result in results)
            cell = f"{ours:.0f}"
            if options.cudnn:
                ratio = statistics.median(result[index]["ours"] / result[index]["cuDNN"] for result in results)
                cell += f" ({ratio:.3f} of cuDNN)"
            cells.append(cell)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(args: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("builds", nargs="*", metavar="BUILD", help="folder with the lib/ of a build, or with a package megatron_sb")
    add("--rows", nargs="+", default=list(ROWS), metavar="ROW", help="DIRECTION:HEAD_DIM:BATCH:HEADS:KV_HEADS:LENGTH")
    add("--rounds", type=whole_number(1), default=3, help="processes of each build (default: %(default)s)")
    add("--seconds", type=seconds, default=0.3, help="device time of a row in a process (default: %(default)s)")
    add("--cudnn", action="store_true", help="also time cuDNN's softmax attention (default: off)")
    add("--dry-run", action="store_true", help="try this script at toy sizes without a GPU (default: off)")
    add("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    options.row_texts = options.rows
    try:
        options.rows = [Row.parse(text) for text in options.rows]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if not options.measure and not options.builds:
        parser.error("needs a BUILD, got none")
    if not on_gpu() and not options.dry_run:
        parser.error("torch sees no GPU. Use --dry-run to try this script at toy sizes.")
    if not on_gpu():
        options.rows = [replace(row, s=max(1, row.s // DRY_RUN_FACTOR)) for row in options.rows]
    if options.cudnn and not on_gpu():
        parser.error("--cudnn needs a GPU: cuDNN's attention does not run on CPUs")
    return options


def main(args: list[str] | None = None) -> int:
    """Measure the builds by turns and print the table."""
    options = parse(args)
    if options.measure:
        print(json.dumps(measure(options.rows, ["cudnn"] * options.cudnn, options.seconds)))
        return 0
    packages = {name: package_of(build) for name, build in column_names(options.builds).items()}
    print(machine(), flush=True)
    rounds: dict[str, list[list[dict[str, float]]]] = {build: [] for build in packages}
    for _ in range(options.rounds):
        for build, package in packages.items():
            rounds[build].append(measure_build(package, options))
            rates = ", ".join(f"{result['ours']:.0f}" for result in rounds[build][-1])
            print(f"# {build}: {rates}", flush=True)
    print(f"\nTFLOP/s, medians of {options.rounds} rounds, torch {torch.__version__}\n\n{table(options, rounds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
