"""Compare this library with softmax attention (cuDNN, FlashAttention) and published stick-breaking kernels on a GPU.

All contenders run in one process. TFLOP/s use the causal model count, whatever a kernel computes or skips: 2 b h s^2 d
operations in the forward and 2.5 times as many in the backward (b h s^2 times d + d_v and 3 d + 2 d_v, if heads of v
have another width d_v); for packed inputs 2 h d (sum of squared document lengths) in the forward. "full" inputs have
logits around -11, so nothing can be skipped. "randn" inputs are standard normal: a stick is used up after about 30
keys, and the GPU draws less power.

A time is the median over rounds in which all contenders of a row take turns, each with a cold L2 cache. "sustained" is
half a second of one call back to back. A forward is one for training: each contender keeps what its backward needs.
"both" is a forward followed by its backward, as in a training step.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from arguments import seconds
from peers import NAMES, Contender, contenders, ours
from report import FLASH_4, FLASH_4_DETERMINISTIC, markdown, output_file
from timing import DRY_RUN_FACTOR, FACTORS, Call, Sensors, back_to_back, ceilings, machine, on_gpu, take_turns
from torch import Tensor

FULL_LOGIT = -11.0
SHAPES = tuple((b, s, h, d) for d, h in ((128, 12), (64, 24)) for s, b in ((4096, 8), (16384, 2), (65536, 1)))
SLOW_LENGTH = 16384  # slow contenders run at this length only
# (b, s, query heads, KV heads): few heads, as on a rank of tensor parallelism, and whole models
KV_HEADS = (
    (1, 8192, 2, 2),
    (1, 16384, 4, 4),
    (1, 16384, 8, 1),
    (1, 16384, 16, 1),
    (1, 16384, 16, 2),
    (1, 16384, 32, 8),
    (1, 65536, 8, 1),
    (2, 16384, 12, 12),
    (2, 16384, 12, 4),
)
# (s, heads, head_dim) of one sequence: few heads, which may not fill the GPU, and other head_dims than 64 and 128
HEADS = (
    *((s, h, 128) for s in (16384, 65536) for h in (1, 4, 12)),
    *((16384, 12, d) for d in (32, 72, 80, 96, 112, 192, 256)),
)
VALUE_DIMS = ((16384, 12, 192, 128),)  # the same with head_dim_v: latent attention
# The lengths of the rows that --lengths selects from.
LENGTHS_OF = {"dense": {s for _, s, _, _ in SHAPES}, "kv_heads": {s for _, s, _, _ in KV_HEADS}}
LENGTHS_OF["skip"] = {s for _, s, _, d in SHAPES if d == 128}
LENGTHS = sorted(set().union(*LENGTHS_OF.values()))
STEADY = ("ours", "cuDNN", FLASH_4, FLASH_4_DETERMINISTIC)  # also timed back to back
VARLEN = {"tokens": 32768, "documents": 100, "shortest": 10, "longest": 4000, "seed": 0}


@dataclass
class Measurement:
    """One contender in one row."""

    group: str
    inputs: str  # "full" or "randn"
    direction: str  # "forward", "backward" or "both"
    shape: str
    contender: str
    ms: float
    tflops: float
    sustained_tflops: float | None = None
    watts: float | None = None
    sm_mhz: float | None = None


def draw_inputs(kind: str, *shape: int, h_kv: int | None = None) -> list[Tensor]:
    """Draw q, k, v and do, (..., h, d) in bf16 with h_kv heads in k and v, on the device from a fixed seed."""
    device = "cuda" if on_gpu() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    *rows, h, d = shape
    heads = (h, h_kv or h, h_kv or h, h)
    q, k, v, do = (torch.randn(*rows, n, d, device=device, dtype=torch.bfloat16, generator=generator) for n in heads)
    if kind == "full":
        shift_logits(q, k, FULL_LOGIT)
    return [q, k, v, do]


def shift_logits(q: Tensor, k: Tensor, mean: float) -> None:
    """Overwrite the first column of standard normal q and k so that their logits have this negative mean."""
    shift = math.sqrt(-mean) * q.shape[-1] ** 0.25
    q[..., 0], k[..., 0] = shift, -shift


class Benchmark:
    """The options of a run, and its measurements and notes."""

    def __init__(self, options: argparse.Namespace, sensors: Sensors) -> None:
        self.options, self.sensors = options, sensors
        self.measurements: list[Measurement] = []
        self.notes: list[str] = []
        self.failed = False  # whether this library could not run a case
        requested = contenders(options.contenders)
        self.notes += [f"{c.name}: {c.missing}" for c in requested if c.missing]
        self.contenders = [c for c in requested if not c.missing]

    def shrunk(self, length: int) -> int:
        """Return the length, or a small one in a dry run."""
        return length if on_gpu() else length // DRY_RUN_FACTOR

    def directions(self, *more: str) -> tuple[str, ...]:
        """Return the directions to measure: forward, and unless --forward-only backward and `more`."""
        return ("forward",) if self.options.forward_only else ("forward", "backward", *more)

    def measure(self, calls: dict[str, Call], flops: float, sustained: tuple[str, ...] = (), **about: str) -> None:
        """Time the calls in turns, and those named in `sustained` also back to back. Print a line."""
        ready = {name: call for name, call in calls.items() if self._can_run(name, call, about)}
        medians = take_turns(ready, seconds=self.options.seconds) if ready else {}
        line = []
        for name, ms in medians.items():
            result = Measurement(**about, contender=name, ms=ms, tflops=flops / ms / 1e9)
            if name in sustained:
                begin = time.monotonic()
                result.sustained_tflops = flops / back_to_back(ready[name], ms, self.options.sustained) / 1e9
                read = self.sensors.since(begin + 0.2 * self.options.sustained)
                result.watts, result.sm_mhz = read.get("watts"), read.get("sm_mhz")
            self.measurements.append(result)
            steady = f" ({result.sustained_tflops:.0f})" if result.sustained_tflops else ""
            line.append(f"{name} {ms:.3f} ms {result.tflops:.0f}{steady}")
        what = f"{about['group']:9s}{about['inputs']:6s}{about['direction']:9s}{about['shape']}"
        print(f"{what}: {' | '.join(line)}", flush=True)

    def _can_run(self, name: str, call: Call, about: dict[str, str]) -> bool:
        """Make the first call, which compiles kernels. If it fails, note the contender, which is then left out."""
        begin = time.monotonic()
        try:
            call()
            if on_gpu():
                torch.cuda.synchronize()
        except Exception as error:  # also errors of compilers
            self.failed |= name.startswith("ours")
            lines = str(error).splitlines() or [""]
            why = f"{type(error).__name__}: {lines[0]}" + (f" ... {lines[-1]}" if len(lines) > 1 else "")
            self.note(f"{name} cannot run {about['group']} {about['direction']}, {about['shape']}: {why[:300]}")
            return False
        if time.monotonic() - begin > 5:
            print(f"# the first {about['direction']} of {name} took {time.monotonic() - begin:.0f} s", flush=True)
        return True

    def note_step(self, names: Iterable[str], calls: dict[str, dict[str, Call]], shape: str) -> None:
        """Note the memory and the number of kernels of a training step, for the named contenders that ran."""
        ran = {m.contender for m in self.measurements if m.shape == shape and m.direction == "both"}
        if not on_gpu():
            return
        costs = [f"{n} {_step_costs(calls[n]['forward'], calls[n]['both'])}" for n in names if n in ran]
        what = "MiB over inputs kept after a forward, most in forward and backward, kernels of both"
        self.note(f"{what}, {shape}: {', '.join(costs)}")

    def note(self, text: str) -> None:
        """Add a sentence to the record, unless it is there."""
        if text not in self.notes:
            self.notes.append(text)


def _step_costs(forward: Call, both: Call) -> str:
    before = torch.cuda.memory_allocated()
    kept = forward()
    after = torch.cuda.memory_allocated()
    del kept
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = torch.cuda.max_memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        both()
        torch.cuda.synchronize()
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    return f"{(after - before) / 2**20:.0f}, {(peak - before) / 2**20:.0f}, {kernels}"


def calls_of(contender: Contender, inputs: list[Tensor], *packing) -> dict[str, Call]:
    """Return the calls of a contender by direction. The first backward call also runs the forward, once."""
    q, k, v, do = (contender.in_layout(x) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attention = contender.packed if packing else contender.dense
    kept: list[Tensor] = []

    def forward():
        return attention(*leaves, *packing)

    def backward():
        if not kept:
            kept.append(forward())
        return torch.autograd.grad(kept[0], leaves, do, retain_graph=True)

    def both():
        return torch.autograd.grad(forward(), leaves, do)

    return {"forward": forward, "backward": backward, "both": both}


def run_dense(bench: Benchmark) -> None:
    """Measure every shape: all directions with nothing to skip, and the forward on randn with threshold 0."""
    for b, full_length, h, d in SHAPES:
        if bench.options.lengths and full_length not in bench.options.lengths:
            continue
        s = bench.shrunk(full_length)
        flops, shape = 2 * b * h * s**2 * d, f"b={b} h={h} d={d} L={s}"
        fast_enough = [c for c in bench.contenders if full_length == SLOW_LENGTH or not c.slow]
        about = {"group": "dense", "shape": shape}
        inputs = draw_inputs("full", b, s, h, d)
        calls = {c.name: calls_of(c, inputs) for c in fast_enough}
        for direction in bench.directions("both"):
            chosen = {c.name: calls[c.name][direction] for c in fast_enough if direction != "both" or not c.slow}
            bench.measure(chosen, FACTORS[direction] * flops, STEADY, inputs="full", direction=direction, **about)
        if full_length == SLOW_LENGTH and not bench.options.forward_only:
            bench.note_step(chosen, calls, shape)
        del calls
        inputs = draw_inputs("randn", b, s, h, d)
        unskipped = [ours("ours", mass_threshold=0.0) if c.name == "ours" else c for c in fast_enough if not c.slow]
        calls = {c.name: calls_of(c, inputs)["forward"] for c in unskipped}
        bench.measure(calls, flops, inputs="randn", direction="forward", **about)


def run_kv_heads(bench: Benchmark) -> None:
    """Compare with the peers where several query heads share a KV head, and where there are few heads."""
    fast = [c for c in bench.contenders if not c.slow]
    for d in (128, 64):
        for b, full_length, h, h_kv in KV_HEADS:
            if bench.options.lengths and full_length not in bench.options.lengths:
                continue
            s = bench.shrunk(full_length)
            about = {"group": "kv_heads", "inputs": "full", "shape": f"b={b} h={h}:{h_kv} d={d} L={s}"}
            compare(bench, fast, draw_inputs("full", b, s, h, d, h_kv=h_kv), about)


def compare(bench: Benchmark, chosen: list[Contender], inputs: list[Tensor], about: dict, *more: str) -> None:
    """Measure these contenders on inputs of one shape, also in the directions `more`."""
    b, s, h, d = inputs[0].shape
    d_v = inputs[2].shape[-1]
    calls = {c.name: calls_of(c, inputs) for c in chosen}
    columns = {"forward": d + d_v, "backward": 3 * d + 2 * d_v, "both": 4 * d + 3 * d_v}
    for direction in bench.directions(*more):
        ready = {name: of[direction] for name, of in calls.items()}
        bench.measure(ready, b * h * s**2 * columns[direction], ("ours",), direction=direction, **about)


def draw_lengths(tokens: int, documents: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Draw document lengths with the sum `tokens`: shortest * (longest / shortest)^(u^c), u uniform in [0, 1).

    A bisection finds the exponent c at which the sum is right, so the lengths cover the whole range. c = 1 would be
    log-uniform.
    """
    if not shortest * documents <= tokens <= longest * documents:
        least, most = shortest * documents, longest * documents
        raise ValueError(
            f"tokens must be from {least} to {most} for {documents} documents of {shortest} to {longest}, got {tokens}"
        )
    rng = random.Random(seed)
    drawn = [rng.random() for _ in range(documents)]

    def lengths_at(exponent: float) -> list[int]:
        return [round(shortest * (longest / shortest) ** (u**exponent)) for u in drawn]

    low, high = 1e-3, 1e3  # of the exponent; the sum decreases with it
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sum(lengths_at(middle)) > tokens else (low, middle)
    lengths = lengths_at(high)
    for i in sorted(range(documents), key=lambda i: lengths[i]):  # correct the rounding
        change = max(shortest - lengths[i], min(longest - lengths[i], tokens - sum(lengths)))
        lengths[i] += change
    return lengths


def run_varlen(bench: Benchmark) -> None:
    """Compare packed random documents with a dense call that has nearly as many pairs."""
    sizes = {**VARLEN, "tokens": bench.shrunk(VARLEN["tokens"] * 8), "longest": bench.shrunk(VARLEN["longest"] * 8)}
    sizes = VARLEN if on_gpu() else {**sizes, "documents": 20}
    lengths = draw_lengths(**sizes)
    h, d, squares = 12, 128, sum(n * n for n in lengths)
    dense_length = max(64, round(squares / sizes["tokens"] / 64) * 64)
    batch = max(1, round(squares / dense_length**2))
    packed_inputs = draw_inputs("full", sizes["tokens"], h, d)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cu_seqlens = offsets.to(packed_inputs[0].device)
    dense_inputs = draw_inputs("full", batch, dense_length, h, d)
    bench.note(
        f"varlen: {len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, seed "
        f"{sizes['seed']} (draw_lengths), {squares / 2e6:.1f}M pairs; dense call: b={batch} L={dense_length}, "
        f"{batch * dense_length**2 / 2e6:.1f}M pairs"
    )
    packed = [c for c in bench.contenders if c.packed]
    pairs = {c.name: calls_of(c, packed_inputs, cu_seqlens, max(lengths)) for c in packed}
    dense = {c.name: calls_of(c, dense_inputs) for c in bench.contenders if not c.slow}
    for direction in bench.directions():
        factor = 2 * h * d * FACTORS[direction]
        about = {"group": "varlen", "inputs": "full", "direction": direction}
        shape = f"{sum(lengths)} tokens, {len(lengths)} documents, h={h} d={d}"
        bench.measure({n: c[direction] for n, c in pairs.items()}, factor * squares, STEADY, shape=shape, **about)
        shape = f"dense b={batch} h={h} d={d} L={dense_length}"
        chosen = {n: c[direction] for n, c in dense.items()}
        bench.measure(chosen, factor * batch * dense_length**2, STEADY, shape=shape, **about)


def run_skip(bench: Benchmark) -> None:
    """Measure randn with skipping, and two thresholds on inputs where nothing can be skipped.

    Both thresholds test for used-up sticks. Only a build without the test could show what the test costs.
    """
    for b, full_length, h, d in SHAPES:
        if d != 128 or (bench.options.lengths and full_length not in bench.options.lengths):
            continue
        s = bench.shrunk(full_length)
        flops, about = 2 * b * h * s**2 * d, {"group": "skip", "shape": f"b={b} h={h} d={d} L={s}"}
        inputs = draw_inputs("randn", b, s, h, d)
        calls = calls_of(ours(), inputs)
        for direction in bench.directions("both"):
            bench.measure(
                {"ours": calls[direction]}, FACTORS[direction] * flops, inputs="randn", direction=direction, **about
            )
        inputs = draw_inputs("full", b, s, h, d)
        both = [ours("ours, default threshold"), ours("ours, threshold 0", mass_threshold=0.0)]
        calls = {c.name: calls_of(c, inputs)["forward"] for c in both}
        bench.measure(calls, flops, tuple(calls), inputs="full", direction="forward", **about)
        on, off = ([m for m in bench.measurements if m.contender == c.name][-1:] for c in both)
        if on and off:
            differences = [off[0].tflops / on[0].tflops - 1, off[0].sustained_tflops / on[0].sustained_tflops - 1]
            text = ", ".join(f"{difference:+.1%}" for difference in differences)
            what = "speed of threshold 0 over the default threshold where nothing can be skipped"
            bench.note(f"{what}, {about['shape']}: {text} (median, sustained)")


def run_heads(bench: Benchmark) -> None:
    """Compare with the peers on one sequence, by the number of heads and by head_dim."""
    fast = [c for c in bench.contenders if not c.slow]
    for full_length, h, d, d_v in (*((*row, row[-1]) for row in HEADS), *VALUE_DIMS):
        s = bench.shrunk(full_length)
        q, k, v, do = draw_inputs("full", 1, s, h, d)
        inputs = [q, k, *(x[..., :d_v].contiguous() for x in (v, do))]
        width = f"d={d}" if d == d_v else f"d={d}/{d_v}"
        about = {"group": "heads", "inputs": "full", "shape": f"b=1 h={h} {width} L={s}"}
        compare(bench, fast, inputs, about, "both")


def run_portable(bench: Benchmark) -> None:
    """Measure the portable kernels in a process that uses only these."""
    if os.environ.get("MEGATRON_SB_KERNELS") == "portable":
        b, s, h, d = 2, bench.shrunk(16384), 12, 128
        name, flops = "ours, portable", 2 * b * h * s**2 * d
        calls = calls_of(ours(name), draw_inputs("full", b, s, h, d))
        about = {"group": "portable", "inputs": "full", "shape": f"b={b} h={h} d={d} L={s}"}
        for direction in bench.directions():
            factor = FACTORS[direction]
            bench.measure({name: calls[direction]}, factor * flops, (name,), direction=direction, **about)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "portable.json"
        command = [
            sys.executable,
            __file__,
            "--rows",
            "portable",
            "--peers",
            "--json",
            str(out),
            "--no-ceilings",
        ]
        command += [f"--seconds={bench.options.seconds}", f"--sustained={bench.options.sustained}"]
        command += ["--forward-only"] * bench.options.forward_only + ["--dry-run"] * (not on_gpu())
        status = subprocess.run(command, env={**os.environ, "MEGATRON_SB_KERNELS": "portable"}, timeout=300).returncode
        bench.failed |= status != 0
        if out.exists():
            record = json.loads(out.read_text())
            bench.measurements += [Measurement(**m) for m in record["measurements"]]
            for note in record["notes"]:
                bench.note(note)


RUNNERS = {
    "dense": run_dense,
    "kv_heads": run_kv_heads,
    "varlen": run_varlen,
    "skip": run_skip,
    "heads": run_heads,
    "portable": run_portable,
}


def parse(args: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rows", nargs="+", choices=RUNNERS, default=list(RUNNERS), help="groups of rows to measure (default: all)"
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=NAMES[1:],
        default=list(NAMES[1:]),
        help="what to compare with (default: all; no name: nothing)",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        choices=LENGTHS,
        help="sequence lengths of the rows dense, kv_heads and skip (default: all)",
    )
    parser.add_argument("--forward-only", action="store_true", help="measure no backward (default: off)")
    parser.add_argument(
        "--seconds", type=seconds, default=0.3, help="device time for the rounds of a line (default: %(default)s)"
    )
    parser.add_argument(
        "--sustained", type=seconds, default=0.5, help="seconds of each back-to-back run (default: %(default)s)"
    )
    parser.add_argument("--no-ceilings", action="store_true", help="measure no matrix product and copy (default: off)")
    parser.add_argument("--json", type=output_file, help="file for all measurements (default: none)")
    parser.add_argument("--markdown", type=output_file, help="file for the tables (default: none)")
    parser.add_argument(
        "--dry-run", action="store_true", help="try this script at toy sizes without a GPU (default: off)"
    )
    options = parser.parse_args(args)
    if not on_gpu() and not options.dry_run:
        parser.error("torch sees no GPU. Use --dry-run to try this script at toy sizes.")
    rows, measured = " ".join(options.rows), sorted(set().union(*(LENGTHS_OF.get(row, ()) for row in options.rows)))
    if options.lengths and not measured:
        parser.error(
            f"--lengths selects from the rows {', '.join(LENGTHS_OF)}, got --rows {rows}. Leave out --lengths to "
            "measure every length of these rows."
        )
    if not set(options.lengths or ()) <= set(measured):
        parser.error(f"--lengths must be some of {measured} with --rows {rows}, got {options.lengths}")
    options.contenders = ["ours", *options.peers]
    return options


def main(args: list[str] | None = None) -> int:
    """Measure the requested rows, and print and write the tables. A run that is stopped writes what it has measured."""
    options = parse(args)
    begin = time.monotonic()
    with Sensors() as sensors:
        bench = Benchmark(options, sensors)
        record = {"machine": machine(), "idle": sensors.since(0), "ceilings": {}}
        print(record["machine"], flush=True)
        if not options.no_ceilings:
            record["ceilings"] = ceilings()
            print(record["ceilings"], flush=True)
        try:
            for row in options.rows:
                RUNNERS[row](bench)
        except BaseException:
            bench.notes.append("The run was stopped before its end.")
            raise
        finally:
            record["seconds"] = round(time.monotonic() - begin, 1)
            write(bench, record)
    return int(bench.failed)


def write(bench: Benchmark, record: dict) -> None:
    """Print the notes and the tables, and write the files."""
    print("\n".join(f"# {note}" for note in bench.notes))
    record |= {"notes": bench.notes, "measurements": [dataclasses.asdict(m) for m in bench.measurements]}
    text = markdown(record)
    print(text)
    for path, content in ((bench.options.json, json.dumps(record, indent=1)), (bench.options.markdown, text)):
        if path:
            path.write_text(content)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
