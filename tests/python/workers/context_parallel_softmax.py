"""Checks that softmax attention over several ranks equals that of one rank. Every rank calls each with the group."""

import itertools
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from context_parallel_accuracy import EXCHANGING, groups_for
from support.messages import mentions

import megatron_sb as sb
from megatron_sb.baselines.softmax import RotaryScaling, SoftmaxAttention, context_parallel_softmax, kernels, shards

LAYOUTS = ("zigzag", "contiguous", "balanced")
ROWS, HEAD_DIM = 48, 8  # 2 * ranks * 6 for 4 ranks
# Name: offsets of the documents, packing, rows. Some documents are empty, and some rows are after the last document.
STREAMS = {
    "dense": (None, "per_document", ROWS),
    "per document": ((0, 5, 19, 19, 40), "per_document", ROWS),
    "whole stream": ((0, 3, 3, 37, 38, 45), "whole_stream", ROWS),
    "equal documents": ((0, 16, 32, 48), "whole_stream", ROWS),
    "dense of any length": (None, "per_document", 37),
    "per document of any length": ((0, 5, 19, 19, 40), "per_document", 41),
    "whole stream of any length": ((0, 3, 3, 37, 38), "whole_stream", 38),
    "fewer rows than ranks": ((0, 1), "whole_stream", 1),
}
VARIANTS = {
    "none": {"position": "none", "scale": 0.7},
    "rope": {"rotary_base": 100.0},
    "rope window": {"window": 7},
    "window 1": {"position": "none", "window": 1},
    "alibi": {"position": "alibi"},
    "alibi window": {"position": "alibi", "window": 11},
    "fire": {"position": "fire", "fire_threshold": 4.7},
    "fire window": {"position": "fire", "window": 9, "fire_threshold": 2.3},
    "stable": {"stable_mask_gamma": 0.03},
    "stable alibi": {"position": "alibi", "stable_mask_gamma": 0.1, "window": 13},
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def heads_of(group) -> tuple[int, int]:
    """Return numbers of heads and KV heads that the ranks can exchange. Two KV heads go to four ranks."""
    size = dist.get_world_size(group)
    return (6, 3) if size == 3 else (4, 2)


EVERY_RANK = ("p2p", "all_gather", "a2a")  # modes that need no groups of their own


def comms_of(group) -> list[str]:
    """Return the modes that are possible in a group."""
    size = dist.get_world_size(group)
    return [*EVERY_RANK, "auto"] + ["a2a+p2p"] * (size > EXCHANGING and size % EXCHANGING == 0)


def make_module(group, options, dtype=torch.float64) -> SoftmaxAttention:
    """Make a module whose parameters are the same on every rank and differ between heads."""
    heads = heads_of(group)[0]
    gamma = options.get("stable_mask_gamma")
    options = options if gamma is None else options | {"stable_mask_gamma": [gamma * (1 + i) for i in range(heads)]}
    module = SoftmaxAttention(heads, HEAD_DIM, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def make_inputs(group, packed: bool, gates: bool, dtype=torch.float64, rows=ROWS) -> list:
    """Draw q, k, v, the gradient of o, and the logarithms of gates or None; the same on every rank."""
    heads, kv_heads = heads_of(group)
    shape = (rows,) if packed else (2, rows)
    inputs = [torch.randn(*shape, h, HEAD_DIM, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads)]
    log_gates = torch.nn.functional.logsigmoid(2 + torch.randn(*shape, kv_heads, dtype=torch.float64))
    return [*inputs, log_gates if gates else None]


def results_of(call, inputs, module) -> tuple[dict, list]:
    """Return o and the gradients of the inputs by name, and the gradients of the module's parameters."""
    q, k, v, do, log_gates = inputs
    leaves = {"q": q, "k": k, "v": v} | ({} if log_gates is None else {"log_gates": log_gates})
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    o = call(leaves["q"], leaves["k"], leaves["v"], leaves.get("log_gates"))
    assert o.dtype == q.dtype and o.shape == q.shape
    parameters = list(module.parameters())
    grads = torch.autograd.grad(o, [*leaves.values(), *parameters], do)
    return {"o": o.detach(), **dict(zip(leaves, grads, strict=False))}, list(grads[len(leaves) :])


def of_one_rank(module, inputs, offsets):
    """Compute the documents on this rank. Rows after the last document have o = 0 and no gradients."""

    def call(q, k, v, log_gates):
        if offsets is None:
            return module(q, k, v, None, log_gates)
        end = offsets[-1]
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        o = module(q[:end], k[:end], v[:end], cu_seqlens, None if log_gates is None else log_gates[:end])
        return torch.cat((o, q[end:] * 0))

    return results_of(call, inputs, module)


def assert_same(group, name, options, layout, comm, gates=False, dtype=torch.float64, tolerance=EXACT) -> None:
    """Compare the local results with the rows of one rank's."""
    offsets, packing, rows = STREAMS[name]
    module, inputs = make_module(group, options, dtype), make_inputs(group, offsets is not None, gates, dtype, rows)
    if options.get("rotary_base"):
        module.scaling = RotaryScaling("linear", 2.0)
    expected, expected_parameters = of_one_rank(module, inputs, offsets)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    plan = sb.ContextParallelPlan(group, rows, cu_seqlens, layout, packing)
    dim = 1 if offsets is None else 0

    def local(x):
        return None if x is None else sb.shard_sequence(x, group, dim, layout, cu_seqlens, packing)

    def call(q, k, v, log_gates):
        return context_parallel_softmax(module, q, k, v, log_gates, plan=plan, comm=comm, **groups_for(comm))

    actual, parameters = results_of(call, [local(x) for x in inputs], module)
    for key, value in expected.items():
        message = f"{key} of {name}, {options}, {layout}, {comm}"
        torch.testing.assert_close(actual[key], local(value), **tolerance, msg=lambda text, m=message: f"{m}: {text}")
    for mine, whole in zip(parameters, expected_parameters, strict=True):
        dist.all_reduce(mine, group=group)
        torch.testing.assert_close(mine, whole, **tolerance)


def softmax_layouts_and_modes(group):
    """Every layout, mode and stream, with rotary positions and grouped heads."""
    for name, layout, comm in itertools.product(STREAMS, LAYOUTS, comms_of(group)):
        assert_same(group, name, VARIANTS["rope"], layout, comm)


def softmax_variants(group):
    """Positions, windows and StableMask in every mode. Layouts take turns, and so do dense and packed batches."""
    streams = list(itertools.product(LAYOUTS, ("per document", "dense of any length")))
    for (i, options), (j, comm) in itertools.product(enumerate(VARIANTS.values()), enumerate(EVERY_RANK)):
        layout, name = streams[(i + j) % len(streams)]
        assert_same(group, name, options, layout, comm)


def softmax_forget_gates(group):
    """Gates multiply along the whole document, over the ranks that share it."""
    for name, layout, comm in itertools.product(("dense", "per document of any length"), LAYOUTS, EVERY_RANK):
        assert_same(group, name, VARIANTS["rope"], layout, comm, gates=True)


def softmax_in_blocks_of_rows(group):
    """Blocks that are computed a few rows at a time give the same results."""
    with mock.patch.object(kernels, "MAX_WEIGHTS_PER_BLOCK", 4 * 2 * 3 * 9):
        for options, comm in itertools.product(("rope", "fire window", "stable alibi"), ("p2p", "all_gather")):
            assert_same(group, "dense", VARIANTS[options], "zigzag", comm)


def softmax_in_half_precision(group):
    """The error of bf16 is that of rounding. Autocast computes in bf16, and the output is bf16."""
    for comm in comms_of(group):
        tolerance = {"rtol": 3e-2, "atol": 3e-2}
        assert_same(group, "per document", VARIANTS["rope"], "zigzag", comm, dtype=torch.bfloat16, tolerance=tolerance)
    module, (q, k, v, *_) = make_module(group, {}), make_inputs(group, False, False, torch.float32)
    plan = sb.ContextParallelPlan(group, ROWS)
    q, k, v = (sb.shard_sequence(x, group).requires_grad_() for x in (q, k, v))
    with torch.autocast(q.device.type, torch.bfloat16):
        o = context_parallel_softmax(module, q, k, v, plan=plan, comm="p2p")
        o.sum().backward()
    assert o.dtype == torch.bfloat16 and q.grad.dtype == torch.float32 and q.grad.isfinite().all()


def softmax_a2a_gives_the_bits_of_one_rank(group):
    """Each head is computed as on one rank."""
    exact = {"rtol": 0, "atol": 0}
    with mock.patch(f"{__name__}.heads_of", lambda group: (8, 4)):
        for name, layout in itertools.product(("dense", "per document"), LAYOUTS):
            for variant in ("rope", "alibi window"):
                options = VARIANTS[variant]
                assert_same(group, name, options, layout, "a2a", dtype=torch.float32, tolerance=exact)


def softmax_shares_a_plan_with_stick_breaking(group):
    """One plan serves layers of both kinds, and its blocks are computed once for all layers."""
    module, (q, k, v, *_) = make_module(group, {}), make_inputs(group, False, False)
    plan = sb.ContextParallelPlan(group, ROWS)
    q, k, v = (sb.shard_sequence(x, group).requires_grad_() for x in (q, k, v))
    with mock.patch.object(shards, "shard_positions", wraps=shards.shard_positions) as positions:
        with torch.inference_mode():
            context_parallel_softmax(module, q, k, v, plan=plan, comm="all_gather")
        for _ in range(2):
            o = context_parallel_softmax(module, q, k, v, plan=plan, comm="all_gather")
            o = sb.context_parallel_attention(o, k, v, plan=plan, comm="all_gather")
    assert positions.call_count == 1
    o.sum().backward()
    assert q.grad.isfinite().all() and q.grad.abs().sum() > 0


def softmax_without_the_last_rank(group):
    """If the last rank does not call, the others raise an error after the timeout of the group, in both directions."""
    rank, size, timeout = dist.get_rank(), dist.get_world_size(), 1.0
    for comm, arrives in itertools.product(EVERY_RANK, (False, True)):
        short = dist.new_group(timeout=timedelta(seconds=timeout))
        plan = sb.ContextParallelPlan(short, ROWS)
        module, (q, k, v, *_) = make_module(group, {}), make_inputs(group, False, False)
        q, k, v = (sb.shard_sequence(x, short).requires_grad_() for x in (q, k, v))
        if arrives:
            o = context_parallel_softmax(module, q, k, v, plan=plan, comm=comm)
        if rank < size - 1:
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=mentions(f"context parallelism rank {rank} {size} failed")):
                o.sum().backward() if arrives else context_parallel_softmax(module, q, k, v, plan=plan, comm=comm)
            assert time.monotonic() - start < timeout * size + 5
        dist.barrier(group)


def softmax_blocks_with_another_default_device(group):
    """The tables of rows and blocks are on the host, wherever new tensors are."""
    offsets = torch.tensor((0, 5, 19, 19, 40), dtype=torch.int32)
    plan = sb.ContextParallelPlan(group, ROWS, cu_seqlens=offsets, layout="balanced")
    here, window = torch.device("cpu"), 7
    expected = shards.Shards(plan, 1)
    blocks, whole = expected.blocks_by_member(window), expected.blocks_of_stream(None)
    with torch.device("meta"):
        found = shards.Shards(plan, 1)
        assert found.blocks_by_member(window) == blocks and found.blocks_of_stream(None) == whole
        indices = found.indices(here)
    assert blocks != [()] * len(blocks) and whole
    for name, index in vars(expected.indices(here)).items():
        assert torch.equal(getattr(indices, name), index), name


def softmax_without_documents(group):
    """All rows are after the last document: o and all gradients are 0, whatever the rows hold."""
    rows = 2 * dist.get_world_size(group) + 1
    plan = sb.ContextParallelPlan(group, rows, torch.tensor([0, 0], dtype=torch.int32))
    module = make_module(group, {"position": "none"})
    for comm, gates in itertools.product(comms_of(group), (False, True)):
        inputs = make_inputs(group, True, gates, rows=plan.local_len)
        *inputs, log_gates = (None if x is None else torch.full_like(x, torch.nan) for x in inputs)
        inputs[3] = torch.ones_like(inputs[3])

        def call(*tensors, comm=comm):
            return context_parallel_softmax(module, *tensors, plan=plan, comm=comm, **groups_for(comm))

        results, _ = results_of(call, [*inputs, log_gates], module)
        for name, x in results.items():
            assert torch.equal(x, torch.zeros_like(x)), f"{name} with {comm}"


def refuses_wrong_softmax_calls(group):
    """Every rank raises the error before it communicates."""
    size = dist.get_world_size(group)
    module, (q, k, v, *_) = make_module(group, {}), make_inputs(group, False, False)
    plan = sb.ContextParallelPlan(group, ROWS)
    q, k, v = (sb.shard_sequence(x, group) for x in (q, k, v))
    packed = sb.ContextParallelPlan(group, ROWS, torch.tensor([0, 20], dtype=torch.int32))
    odd = SoftmaxAttention(3, HEAD_DIM)
    twice = {"plan": plan, "hierarchical_groups": (group, group)}
    calls = {
        "attention SoftmaxAttention Linear": (torch.nn.Linear(1, 1), q, k, v, {"plan": plan}),
        "plan ContextParallelPlan NoneType": (module, q, k, v, {"plan": None}),
        "comm auto p2p ring": (module, q, k, v, {"plan": plan, "comm": "ring"}),
        f"q {ROWS // size} {ROWS // size - 1} rows": (module, q[:, 1:], k[:, 1:], v[:, 1:], {"plan": plan}),
        "q (t, h, d) with cu_seqlens": (module, q, k, v, {"plan": packed}),
        "q (b, s, h, d) without cu_seqlens": (module, q[0], k[0], v[0], {"plan": plan}),
        f"comm a2a heads multiple {size} 3 all_gather p2p": (
            *(odd, q[:, :, :3], k[:, :, :1], v[:, :, :1]),
            {"plan": plan, "comm": "a2a"},
        ),
        "hierarchical_groups two groups None": (module, q, k, v, {"plan": plan, "comm": "a2a+p2p"}),
        "hierarchical_groups None a2a": (module, q, k, v, twice | {"comm": "a2a"}),
        f"hierarchical_groups {size} ranks": (module, q, k, v, twice | {"comm": "a2a+p2p"}),
    }
    for words, (attention, *inputs, options) in calls.items():
        with pytest.raises((TypeError, ValueError), match=mentions(words)):
            context_parallel_softmax(attention, *inputs, **options)
    alone = sb.ContextParallelPlan(dist.new_group([dist.get_rank()], use_local_synchronization=True), q.shape[1])
    for comm, groups in (("a2a", (group, group)), ("a2a+p2p", None), ("a2a+p2p", (group, group))):
        with pytest.raises(ValueError, match=mentions("hierarchical_groups")):
            context_parallel_softmax(module, q, k, v, plan=alone, comm=comm, hierarchical_groups=groups)
    with pytest.raises(ValueError, match=mentions("log_gates shape")):
        context_parallel_softmax(module, q, k, v, torch.zeros(1, dtype=torch.float64), plan=plan)
    dist.destroy_process_group(alone.cp_group)
    with pytest.raises(ValueError, match=mentions("plan's cp_group destroyed")):
        context_parallel_softmax(module, q, k, v, plan=alone)
