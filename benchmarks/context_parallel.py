"""Compare every mode of context parallelism on the GPUs of a host with one GPU and with softmax over several GPUs.

torchrun --nproc-per-node 4 benchmarks/context_parallel.py

Peers are torch's context_parallel with cuDNN, and an exchange of heads around an attention of `peers.py`.

TFLOP/s per GPU use the causal model count: 2 b h s^2 d operations in the forward, 3.5 times as many in forward and
backward; for packed inputs 2 h d (sum of squared document lengths) in the forward. Logits are around -11, so nothing is
skipped. A time is the median over rounds that all ranks start together, each the time of the slowest rank; in brackets
back to back. MiB is the peak of forward and backward over the inputs. "one GPU" has the whole sequence on each GPU, all
at the same time.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from arguments import add_modes, seconds, whole_number
from attention import draw_inputs, draw_lengths
from exchanged_heads import exchanged_heads
from peers import NAMES, Contender, contenders
from report import output_file
from timing import Call, Stopwatch, back_to_back, machine
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import megatron_sb as sb
from megatron_sb.planning.context_parallel import MODES

DOCUMENTS, SHORTEST, LONGEST = 27, 100, 16384
HEAD_START_CYCLES = 3_000_000  # about 1.5 ms of device time, in which the host queues a call


def calls_of(attention: Callable, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Call]:
    """Return the forward, and the forward and backward ("both"), of attention(q, k, v)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return {
        "forward": lambda: attention(*leaves),
        "both": lambda: torch.autograd.grad(attention(*leaves), leaves, do),
    }


def calls_over(plan: sb.ContextParallelPlan, comm: str, local: list[Tensor]) -> dict[str, Call]:
    """Return the same calls in the mode `comm`. local: this rank's q, k, v, do."""
    return calls_of(functools.partial(sb.context_parallel_attention, plan=plan, comm=comm), *local)


def replays_of(calls: dict[str, Call]) -> dict[str, Call]:
    """Return calls that replay a CUDA graph of each call. Every rank must capture the same calls in the same order."""
    replays = {}
    for name, call in calls.items():
        with torch.cuda.stream(torch.cuda.Stream()):  # torch requires a warm-up on a side stream
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog may call CUDA meanwhile
            call()
        replays[name] = graph.replay
    return replays


def join_ranks() -> None:
    """Join the process group of torchrun. Each rank uses the GPU of its local rank."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("This benchmark needs the ranks of torchrun. Start it with torchrun --nproc-per-node GPUS.")
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a GPU for each rank, and torch sees none.")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)


def median_ms(call: Call, seconds: float) -> float:
    """Return the milliseconds of the slowest rank, median over rounds that all ranks start together."""
    aligned = torch.zeros(1, device="cuda")

    def timed() -> Stopwatch:
        torch.cuda._sleep(HEAD_START_CYCLES)
        dist.all_reduce(aligned)
        watch = Stopwatch()
        call()
        return watch.stop()

    for _ in range(2):
        call()
    rounds = torch.tensor(min(30, max(5, int(seconds * 1e3 / timed().milliseconds()))), device="cuda")
    dist.broadcast(rounds, 0)
    watches = [timed() for _ in range(int(rounds))]
    return statistics.median(of_slowest_rank([watch.milliseconds() for watch in watches]))


def of_slowest_rank(values: list[float]) -> list[float]:
    """Return each value's maximum over the ranks."""
    slowest = torch.tensor(values, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def peak_mib(call: Call) -> float:
    """Return the peak MiB of a call over what was allocated before, of the rank with the highest peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return max(of_slowest_rank([(torch.cuda.max_memory_allocated() - before) / 2**20]))


@contextlib.contextmanager
def torch_context_parallel(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Iterator[dict[str, Call]]:
    """Yield the calls of torch's context_parallel with cuDNN. q, k, v, do: the whole sequence."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),))
    buffers = [x.transpose(1, 2).contiguous() for x in (q, k, v, do)]

    def attention(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # the context replaces it

    with (
        sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
    ):
        yield calls_of(attention, *(x.clone() for x in buffers))


def rows_first(peer: Contender) -> Callable:
    """Return attention(q, k, v) of (b, s, h, d) tensors."""
    if not peer.heads_first:
        return peer.dense
    return lambda *qkv: peer.dense(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)


class Benchmark:
    """The options of a run, and the rows measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows = options, []
        self.exchanged = contenders(options.exchanged)

    def measure(self, what: str, name: str, calls: dict[str, Call], forward_flops: float) -> None:
        """Measure and print a row: TFLOP/s per GPU of the forward, and of forward and backward."""
        row = {"what": what, "name": name}
        try:
            for direction, factor in (("forward", 1.0), ("both", 3.5)):
                ms = median_ms(calls[direction], self.options.seconds)
                (steady,) = of_slowest_rank([back_to_back(calls[direction], ms, self.options.sustained)])
                rates = [factor * forward_flops / t / 1e9 for t in (ms, steady)]
                row[direction] = {"ms": ms, "tflops": rates[0], "sustained": rates[1]}
            row["peak_mib"] = peak_mib(calls["both"])
        except (RuntimeError, ValueError) as error:  # out of memory, or not supported by the peer or the mode
            row["error"] = str(error).splitlines()[0][:200]
        self.report(row)

    def report(self, row: dict) -> None:
        """Keep and print a row."""
        self.rows.append(row)
        if dist.get_rank() == 0:
            print(_line(row), flush=True)

    def dense(self, s: int, h: int, h_kv: int, d: int) -> None:
        """Measure one sequence: on one GPU, in every mode, and with torch's context_parallel."""
        ranks, flops = dist.get_world_size(), 2 * h * s**2 * d
        heads = f"{h}" if h == h_kv else f"{h}:{h_kv}"
        what, whole = f"L={s} h={heads} d={d}", draw_inputs("full", 1, s, h, d, h_kv=h_kv)
        self.measure(what, "one GPU", calls_of(sb.stickbreaking_attention, *whole), flops)
        plan = sb.ContextParallelPlan(dist.group.WORLD, s)
        local = [sb.shard_sequence(x, dist.group.WORLD) for x in whole]
        for comm in self.options.modes:
            calls = calls_over(plan, comm, local)
            self.measure(what, comm, calls, flops / ranks)
            if self.options.graphs and "error" not in self.rows[-1]:
                self.measure(what, f"{comm}, graph", replays_of(calls), flops / ranks)
        if self.options.peer and h == h_kv:
            with torch_context_parallel(*whole) as calls:
                self.measure(what, "torch, cuDNN", calls, flops / ranks)
        self.exchange(what, rows_first, [x.chunk(ranks, 1)[dist.get_rank()] for x in whole], flops / ranks)

    def exchange(self, what: str, attention_of: Callable, local: list[Tensor], flops: float) -> None:
        """Measure the exchange of heads around attention_of(peer) of each peer. local: q, k, v, do of the rank's rows.

        A peer for which attention_of returns None is left out.
        """
        for peer in self.exchanged:
            name = f"{peer.name}, a2a"
            if peer.missing:
                self.report({"what": what, "name": name, "error": peer.missing})
            elif (attention := attention_of(peer)) is not None:
                self.measure(what, name, calls_of(exchanged_heads(attention), *local), flops)

    def packed(self, tokens: int, h: int, d: int) -> None:
        """Measure documents of 100 to 16K tokens: padded per document, balanced, and a dense batch with as many pairs.

        Zigzag needs each document's length to be a multiple of twice the ranks. The balanced layout takes any length.
        """
        ranks = dist.get_world_size()
        unit = 2 * ranks
        drawn = draw_lengths(tokens // unit, DOCUMENTS, -(-SHORTEST // unit), LONGEST // unit, seed=0)
        self.packed_in_layout("zigzag", [unit * n for n in drawn], h, d)
        self.packed_in_layout("balanced", draw_lengths(tokens, DOCUMENTS, SHORTEST, LONGEST, seed=0), h, d)
        squares = sum((unit * n) ** 2 for n in drawn)
        dense_length = round(squares / tokens / unit) * unit
        batch = round(squares / dense_length**2)
        q, k, v, do = draw_inputs("full", batch, dense_length, h, d)
        plan = sb.ContextParallelPlan(dist.group.WORLD, dense_length)
        local = [sb.shard_sequence(x, dist.group.WORLD) for x in (q, k, v, do)]
        what = f"dense b={batch} L={dense_length} h={h} d={d}"
        self.measure(what, "a2a", calls_over(plan, "a2a", local), 2 * batch * h * dense_length**2 * d / ranks)

    def packed_in_layout(self, layout: str, lengths: list[int], h: int, d: int) -> None:
        """Measure packed documents on one GPU and in every mode that the layout has."""
        tokens, flops = sum(lengths), 2 * h * d * sum(n * n for n in lengths)
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        whole = [x[0] for x in draw_inputs("full", 1, tokens, h, d)]
        what = f"{tokens} tokens in {len(lengths)} documents, {layout}, h={h} d={d}"
        alone = functools.partial(
            sb.stickbreaking_attention_varlen, cu_seqlens=cu_seqlens.cuda(), max_seqlen=max(lengths)
        )
        self.measure(what, "one GPU", calls_of(alone, *whole), flops)
        cut = {"cu_seqlens": cu_seqlens, "layout": layout}
        plan = sb.ContextParallelPlan(dist.group.WORLD, **cut)
        local = [sb.shard_sequence(x, dist.group.WORLD, dim=0, **cut) for x in whole]
        ranks = dist.get_world_size()
        for comm in self.options.modes:
            self.measure(what, comm, calls_over(plan, comm, local), flops / ranks)
        documents = {"cu_seqlens": cu_seqlens.cuda(), "longest": max(lengths)}

        def of_documents(peer: Contender) -> Callable | None:
            return peer.packed and functools.partial(peer.packed, **documents)

        self.exchange(what, of_documents, [x.chunk(ranks)[dist.get_rank()] for x in whole], flops / ranks)


def _line(row: dict) -> str:
    if "error" in row:
        return f"{row['what']:36s} {row['name']:34s} {row['error']}"
    cells = [f"{row[d]['ms']:9.3f} ms {row[d]['tflops']:4.0f} ({row[d]['sustained']:.0f})" for d in ("forward", "both")]
    return f"{row['what']:36s} {row['name']:34s} {' | '.join(cells)} | {row['peak_mib']:6.0f} MiB"


def head_counts(text: str) -> tuple[int, int]:
    """Return the numbers of query heads and of KV heads in HEADS:KV_HEADS. A type for argparse."""
    found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
    if found is None or int(found[1]) % int(found[2]):
        raise argparse.ArgumentTypeError(
            f"must be HEADS:KV_HEADS, such as 32:8, with a multiple of KV_HEADS, got {text}"
        )
    return int(found[1]), int(found[2])


def main() -> None:
    """Measure the requested rows on the ranks of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    lengths = [16384, 65536, 131072]
    add(
        "--lengths",
        nargs="*",
        type=whole_number(1),
        default=lengths,
        help="lengths with 12 heads (default: %(default)s)",
    )
    grouped = [(12, 4), (32, 8)]
    add("--grouped", nargs="*", type=head_counts, default=grouped, help="query heads:KV heads (default: 12:4 32:8)")
    add(
        "--grouped-length",
        type=whole_number(1),
        default=65536,
        help="length of the rows of --grouped (default: %(default)s)",
    )
    add(
        "--packed",
        type=whole_number(0),
        default=65536,
        help="tokens of the packed rows; 0 skips them (default: %(default)s)",
    )
    add_modes(parser, MODES)
    add("--graphs", action="store_true", help="also replay each dense call as a CUDA graph (default: off)")
    add("--no-peer", dest="peer", action="store_false", help="skip torch's context_parallel (default: off)")
    peers = {"nargs": "*", "choices": NAMES, "default": []}
    add("--exchanged", **peers, help="attentions that ranks exchange heads around (default: none)")
    add("--seconds", type=seconds, default=0.3, help="device time for the rounds of a cell (default: %(default)s)")
    add("--sustained", type=seconds, default=0.3, help="seconds of each back-to-back run (default: %(default)s)")
    add("--json", type=output_file, help="file for all measurements (default: none)")
    options = parser.parse_args()
    join_ranks()
    if dist.get_rank() == 0:
        print({**machine(), "ranks": dist.get_world_size(), "nccl": torch.cuda.nccl.version()}, flush=True)
    bench = Benchmark(options)
    for s in options.lengths:
        bench.dense(s, 12, 12, 128)
    for h, h_kv in options.grouped:
        bench.dense(options.grouped_length, h, h_kv, 128)
    if options.packed:
        bench.packed(options.packed, 12, 128)
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps({"machine": machine(), "rows": bench.rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
