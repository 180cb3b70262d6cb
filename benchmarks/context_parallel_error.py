"""Measure the error of context-parallel attention against float64 for 1, 2, 4, ... ranks.

The error should not grow with the number of ranks. With --device cpu the ranks use gloo, and --ranks forks them, which
takes less memory than torchrun. "a2a" is measured with up to as many ranks as heads.

torchrun --nproc-per-node 4 benchmarks/context_parallel_error.py record OUT.json
python benchmarks/context_parallel_error.py record OUT.json --device cpu --ranks 64 --length 2048 --head-dim 64
python benchmarks/context_parallel_error.py draw OUT.json OUT.png
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from arguments import add_modes, at_most_0, whole_number
from attention import shift_logits
from forked_ranks import run_forked
from pictures import pyplot_for_files, record_or_draw
from timing import machine

import megatron_sb as sb
from megatron_sb import reference
from megatron_sb.planning.context_parallel import MODES

RESULTS = ("o", "dq", "dk", "dv")
HEADS = 8
LAYOUT = "zigzag"


def errors(results, exact) -> dict[str, float]:
    """Return the relative Frobenius error of each result."""
    pairs = zip(RESULTS, results, exact, strict=True)
    return {name: ((x.double() - y).norm() / y.norm()).item() for name, x, y in pairs}


def results_of(attention, q, k, v, do) -> list:
    """Return o, dq, dk and dv of attention(q, k, v)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def over(group, comm: str, whole: list) -> list:
    """Run the attention over a group and return the gathered results."""
    plan = sb.ContextParallelPlan(group, whole[0].shape[1], layout=LAYOUT)
    local = [sb.shard_sequence(x, group, layout=LAYOUT) for x in whole]
    parts = results_of(lambda q, k, v: sb.context_parallel_attention(q, k, v, plan=plan, comm=comm), *local)
    return [sb.unshard_sequence(x, group, layout=LAYOUT) for x in parts]


def record(options: argparse.Namespace) -> None:
    """Measure on the ranks that torchrun has started, or fork options.ranks of them on this machine's CPUs."""
    if options.ranks is None:
        record_rank(options)
        return
    run_forked(record_rank, options.ranks, options)


def record_rank(options: argparse.Namespace) -> None:
    """Measure every number of ranks, mode and mean logit. Rank 0 writes the errors."""
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= dist.get_world_size()]
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    rows = []
    for mean in options.means:
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, options.length, HEADS, options.head_dim)
        q, k, v, do = (torch.randn(shape, device=device, generator=generator) for _ in range(4))
        shift_logits(q, k, mean)
        whole = [x.to(getattr(torch, options.dtype)) for x in (q, k, v, do)]
        for size in sizes:
            if dist.get_rank() >= size:
                continue
            modes = [comm for comm in options.modes if comm != "a2a" or HEADS % size == 0]
            results = {comm: over(groups[size], comm, whole) for comm in modes}
            if dist.get_rank() > 0:
                continue
            exact = results_of(reference.stickbreaking_attention, *(x.double() for x in whole))
            for comm in modes:
                rows.append({"mean": mean, "ranks": size, "comm": comm, **errors(results[comm], exact)})
                print(rows[-1], flush=True)
        dist.barrier()
    if dist.get_rank() == 0:
        about = machine() | ({"gpu": "none: CPUs over gloo"} if device.type == "cpu" else {})
        about |= {"length": options.length, "head_dim": options.head_dim, "dtype": options.dtype}
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1))
    dist.destroy_process_group()


def draw(options: argparse.Namespace) -> None:
    """Draw a panel for each result, with a line for each mode and mean logit."""
    pyplot = pyplot_for_files()
    recorded = json.loads(options.json.read_text())
    about, rows = recorded["machine"], recorded["rows"]
    figure, panels = pyplot.subplots(1, len(RESULTS), figsize=(3 * len(RESULTS), 3.2), sharey=True)
    for panel, name in zip(panels, RESULTS, strict=True):
        for mean, comm in sorted({(row["mean"], row["comm"]) for row in rows}):
            line = [row for row in rows if (row["mean"], row["comm"]) == (mean, comm)]
            panel.plot(
                [r["ranks"] for r in line], [r[name] for r in line], marker="o", label=f"{comm}, logits {mean:g}"
            )
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, 1.3 * max(row[other] for row in rows for other in RESULTS))
        panel.set_xticks(sorted({row["ranks"] for row in rows}), sorted({row["ranks"] for row in rows}))
        panel.set_title(name)
        panel.set_xlabel("ranks")
    panels[0].set_ylabel("relative error against float64")
    panels[0].legend(fontsize=7)
    figure.suptitle(
        f"{about['length']} positions, head_dim {about['head_dim']}, {about['dtype']}, {about['gpu'].partition(',')[0]}"
    )
    figure.tight_layout()
    figure.savefig(options.picture, dpi=110)


def main() -> None:
    """Record or draw."""
    parser, recording, _ = record_or_draw(__doc__, record, draw)
    recording.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    recording.add_argument(
        "--ranks", type=whole_number(1), help="with --device cpu: ranks to fork (default: those of torchrun)"
    )
    recording.add_argument(
        "--length", type=whole_number(1), default=8192, help="sequence length (default: %(default)s)"
    )
    recording.add_argument("--head-dim", type=whole_number(8, multiple=8), default=128, help="default: %(default)s")
    recording.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="dtype of q, k, v and do (default: %(default)s)",
    )
    recording.add_argument(
        "--means",
        nargs="+",
        type=at_most_0,
        default=[-3.2, -11.0],
        help="mean logits, at most 0 (default: %(default)s)",
    )
    add_modes(recording, MODES)
    options = parser.parse_args()
    if getattr(options, "ranks", None) is not None and options.device != "cpu":
        parser.error(f"--ranks needs --device cpu, got --device {options.device}")
    if options.run is record and options.ranks is None and "RANK" not in os.environ:
        parser.error("record needs the ranks of torchrun, or --device cpu --ranks NUMBER")
    options.run(options)


if __name__ == "__main__":
    main()
