"""Checks of context parallelism on GPUs with the fast kernels. Each is a function of the group, run by every rank."""

import torch
import torch.distributed as dist
from context_parallel_accuracy import (
    LAYOUTS,
    RESULTS,
    Stream,
    assert_bits_of_one_rank,
    comms_of,
    groups_for,
    modes_of,
    run_over,
)
from support.bars import BARRED, SPIKES, Bar, barred_inputs, threshold_of
from support.inputs import make_inputs

import megatron_sb as sb

HEADS = {"h": 4, "d": 128}
RUNS = {  # ranges of rows to compare, by length
    4096: [(0, 4096)],
    16384: [(1000, 1128), (8100, 8228), (16256, 16384)],
    65536: [(1000, 1128), (32700, 32828), (65408, 65536)],
}


def within_the_bars(group) -> None:
    """Errors are within the bounds of one GPU in all modes: all regimes at 4096 rows, the hardest ones at more rows."""
    regimes = {4096: BARRED, 16384: ["mean -8", "mean -11"], 65536: ["mean -11", SPIKES]}
    for length, regime in ((length, regime) for length, some in regimes.items() for regime in some):
        x = barred_inputs(regime, length, RUNS[length], **HEADS, h_kv=2 if length == 4096 else 4)
        options = {"mass_threshold": threshold_of(regime)}
        results = {
            (layout, comm): run_over(group, Stream(), x, layout, comm, **options)
            for layout, comm in modes_of(group, LAYOUTS if length == 4096 else LAYOUTS[:1])
        }
        bar = Bar(x, RUNS[length])
        for mode, result in results.items():
            missed = bar.missed(result, regime)
            assert not missed, f"{regime}, {length}, {mode}: {'; '.join(missed)}"


def packed_within_the_bars(group) -> None:
    """Documents of any length, sharded by document or as one stream, equal one GPU up to rounding."""
    size = 2 * dist.get_world_size()
    bounds = [0, 40 * size, 41 * size, 41 * size, 300 * size, 512 * size]
    for stream in (Stream(tuple(bounds)), Stream((0, 77, 78, 2000, 512 * size - 5), "whole_stream")):
        x = make_inputs("mean -6", s=512 * size, h=4, h_kv=2, d=128, dtype=torch.bfloat16).packed()
        alone = run_over(dist.new_group([dist.get_rank()], use_local_synchronization=True), stream, x, "zigzag", "p2p")
        for layout, comm in modes_of(group):
            results = run_over(group, stream, x, layout, comm)
            for name in RESULTS:
                error = (results[name].double() - alone[name].double()).norm() / alone[name].double().norm()
                assert error < 2e-3, f"{stream}, {layout}, {comm}: {name} has an error of {error:.2g}"


def repeats_bit_for_bit_at_16k(group) -> None:
    """Ten runs of each mode give bitwise the same outputs and gradients, while transfers and kernels overlap."""
    x = make_inputs("mean -11", s=16384, dtype=torch.bfloat16, **HEADS)
    for layout, comm in modes_of(group):
        first = run_over(group, Stream(), x, layout, comm)
        for _ in range(9):
            again = run_over(group, Stream(), x, layout, comm)
            for name in RESULTS:
                assert torch.equal(first[name], again[name]), f"{layout}, {comm}: {name} differs between two runs"


def a2a_gives_the_bits_of_one_rank_at_8k(group) -> None:
    """The same check at a length that the fast kernels serve with several key tiles.

    The Hopper backward divides the keys of a head only on ranks with at most eight KV heads, so these have nine.
    """
    size = dist.get_world_size()
    for stream in (Stream(), Stream((0, 70 * size, 72 * size, 4096 * size))):
        x = make_inputs("mean -6", s=4096 * size, h=18 * size, h_kv=9 * size, d=128, dtype=torch.bfloat16)
        assert_bits_of_one_rank(group, stream, x if stream.cu_seqlens is None else x.packed())


def replays_in_a_cuda_graph(group) -> None:
    """A graph of forward and backward, captured with one input, is exact for another input, in each mode."""
    plan = sb.ContextParallelPlan(group, 4096)
    first, second = (make_inputs("mean -6", s=4096, dtype=torch.bfloat16, seed=seed, **HEADS) for seed in (0, 1))
    local, other = ([sb.shard_sequence(x, group) for x in (y.q, y.k, y.v, y.do)] for y in (first, second))
    for comm in comms_of(group):
        leaves, do = [x.clone().requires_grad_() for x in local[:3]], local[3].clone()

        def both(leaves=leaves, do=do, comm=comm):
            o = sb.context_parallel_attention(*leaves, plan=plan, comm=comm, **groups_for(comm))
            return [o, *torch.autograd.grad(o, leaves, do)]

        side = torch.cuda.Stream()  # torch requires a warm-up on a side stream
        with torch.cuda.stream(side):
            both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = both()
        with torch.no_grad():
            for x, y in zip([*leaves, do], other, strict=True):
                x.copy_(y)
        graph.replay()
        for x, y in zip(captured, both(), strict=True):
            assert torch.equal(x, y), f"{comm}: a replay differs from a call"
