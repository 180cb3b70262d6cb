"""Record the streams of one GPU during a context-parallel attention: which transfers run under which kernels.

torchrun --nproc-per-node 4 benchmarks/context_parallel_timeline.py record OUT.json
python benchmarks/context_parallel_timeline.py draw OUT.json OUT.png
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import add_modes, whole_number
from attention import draw_inputs
from context_parallel import calls_over, join_ranks
from pictures import pyplot_for_files, record_or_draw
from timing import machine

import megatron_sb as sb
from megatron_sb.planning.context_parallel import MODES

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
TRANSFERS, COMPUTE, REST = "NCCL", "block kernels", "the rest"
COLOURS = {TRANSFERS: "tab:orange", COMPUTE: "tab:blue", REST: "tab:gray"}


def kind_of(name: str) -> str:
    """Return the kind of a kernel, which sets its colour in the picture."""
    if "nccl" in name:
        return TRANSFERS
    return COMPUTE if "megatron_sb" in name else REST


def trace(call) -> dict:
    """Trace a call.

    Returns:
        events: name, stream, start and duration in microseconds of each device event. host_ms: median time that the
        host needs to queue the call.
    """
    host_ms = []
    for _ in range(8):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host_ms.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    events = [e for e in events if e.get("cat") in DEVICE_CATEGORIES]
    first = min(e["ts"] for e in events)
    rows = [[e["name"][:120], e["args"]["stream"], round(e["ts"] - first, 1), e["dur"]] for e in events]
    return {"host_ms": statistics.median(host_ms), "events": sorted(rows, key=lambda row: row[2])}


def record(options: argparse.Namespace) -> None:
    """Trace each length and mode on the ranks of torchrun. Rank 0 writes its own trace."""
    join_ranks()
    traces = []
    for s in options.lengths:
        plan = sb.ContextParallelPlan(dist.group.WORLD, s)
        local = [sb.shard_sequence(x, dist.group.WORLD) for x in draw_inputs("full", 1, s, 12, 128)]
        for comm in options.modes:
            traces.append({"length": s, "comm": comm, **trace(calls_over(plan, comm, local)["both"])})
    if dist.get_rank() == 0:
        about = {**machine(), "ranks": dist.get_world_size(), "heads": 12, "head_dim": 128}
        options.json.write_text(json.dumps({"machine": about, "traces": traces}))
    dist.destroy_process_group()


def draw(options: argparse.Namespace) -> None:
    """Draw a panel for each mode of one length, with a line for each stream."""
    pyplot = pyplot_for_files()
    from matplotlib.patches import Patch

    recorded = json.loads(options.json.read_text())
    about = recorded["machine"]
    traces = [t for t in recorded["traces"] if t["length"] == options.length]
    if not traces:
        lengths = sorted({t["length"] for t in recorded["traces"]})
        raise SystemExit(f"--length must be one of {lengths}, the lengths in {options.json}, got {options.length}")
    longest = max(start + duration for t in traces for *_, start, duration in t["events"]) / 1e3
    figure, panels = pyplot.subplots(len(traces), 1, figsize=(12, 2 * len(traces) + 0.5), squeeze=False, sharex=True)
    for panel, one in zip(panels[:, 0], traces, strict=True):
        streams = sorted({stream for _, stream, _, _ in one["events"]})
        for name, stream, start, duration in one["events"]:
            panel.broken_barh(
                [(start / 1e3, duration / 1e3)], (streams.index(stream) - 0.4, 0.8), color=COLOURS[kind_of(name)]
            )
        panel.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
        panel.set_xlim(0, longest)
        panel.set_title(one["comm"], loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("ms")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="lower right", ncols=len(handles))
    figure.suptitle(
        f"One of {about['ranks']} GPUs ({about['gpu'].partition(',')[0]}), forward and backward of {options.length} "
        f"positions, {about['heads']} heads of {about['head_dim']}"
    )
    figure.tight_layout()
    figure.savefig(options.picture, dpi=110)


def main() -> None:
    """Record or draw."""
    parser, recording, drawing = record_or_draw(__doc__, record, draw, measured="traces")
    recording.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number(1),
        default=[16384, 65536],
        help="sequence lengths (default: %(default)s)",
    )
    add_modes(recording, MODES)
    drawing.add_argument(
        "--length", type=whole_number(1), default=65536, help="the length to draw (default: %(default)s)"
    )
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
