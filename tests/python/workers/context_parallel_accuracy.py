"""Checks that several ranks give the results of one. Every rank calls each check with the group."""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from support.accuracy import RESULTS, assert_errors, floors, run
from support.inputs import Inputs, make_inputs
from support.variants import VARIANTS, make_variant, packed_options, run_variant, tensors_of, wide_inputs
from torch import Tensor

import megatron_sb as sb
from megatron_sb import reference

answers_folder = Path()  # context_parallel_run.py sets it
EXCHANGING = 2  # ranks of an a2a group of "a2a+p2p"
LAYOUTS = ("zigzag", "contiguous", "balanced")
ROWS = 192  # 2 * ranks * 12 for 8 ranks


@dataclass(frozen=True)
class Stream:
    """A stream of ROWS rows: a batch of two documents of that length, or packed documents."""

    cu_seqlens: tuple[int, ...] | None = None
    packing: str = "per_document"

    @property
    def offsets(self) -> Tensor | None:
        """Return cu_seqlens as a tensor."""
        return None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, dtype=torch.int32)

    @property
    def dim(self) -> int:
        """Return the sequence dimension of q."""
        return 1 if self.cu_seqlens is None else 0

    def inputs(self, regime: str, dtype: torch.dtype) -> Inputs:
        """Return inputs with grouped heads and d_v != d, which are the same on every rank."""
        batch = 2 if self.cu_seqlens is None else 1
        inputs = make_inputs(regime, b=batch, s=ROWS, h=4, h_kv=2, d=16, d_v=24, dtype=dtype)
        return inputs if self.cu_seqlens is None else inputs.packed()

    def one_rank(self, q, k, v, **options) -> tuple[Tensor, Tensor]:
        """Call the operator for whole sequences."""
        if self.cu_seqlens is None:
            return sb.stickbreaking_attention(q, k, v, return_mass=True, **options)
        return sb.stickbreaking_attention_varlen(q, k, v, self.offsets, return_mass=True, **options)

    def oracle(self, q, k, v, **options) -> tuple[Tensor, Tensor]:
        """Call the float64 oracle."""
        if self.cu_seqlens is None:
            return reference.stickbreaking_attention(q, k, v, return_mass=True, **options)
        return reference.stickbreaking_attention_varlen(q, k, v, self.offsets, return_mass=True, **options)


STREAMS = {
    "dense": Stream(),
    "per document": Stream((0, 5, 52, 52, 143)),
    "per document, equal chunks": Stream((0, 48, 48, 144)),
    "whole stream": Stream((0, 5, 5, 100, 101, 180), "whole_stream"),
}


def comms_of(group) -> list[str]:
    """Return the modes that are possible in a group, with the 4 heads of the inputs."""
    size = dist.get_world_size(group)
    comms = ["p2p", "all_gather"] + ["a2a"] * (4 % size == 0)
    return comms + ["a2a+p2p"] * (group is dist.group.WORLD and size > EXCHANGING and size % EXCHANGING == 0)


def modes_of(group, layouts=LAYOUTS) -> list[tuple[str, str]]:
    """Return each (layout, mode) that is possible in a group."""
    return list(itertools.product(layouts, comms_of(group)))


@functools.cache
def hierarchy(exchanging: int = EXCHANGING) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's a2a and p2p groups, as Megatron makes them. The first call is a collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a2a = [dist.new_group(list(range(i, i + exchanging))) for i in range(0, size, exchanging)]
    p2p = [dist.new_group(list(range(i, size, exchanging))) for i in range(exchanging)]
    return a2a[rank // exchanging], p2p[rank % exchanging]


def groups_for(comm: str) -> dict:
    """Return the arguments of a call for groups other than cp_group."""
    return {"hierarchical_groups": hierarchy()} if comm == "a2a+p2p" else {}


def run_over(group, stream: Stream, inputs: Inputs, layout: str, comm: str, **options) -> dict[str, Tensor]:
    """Run the context-parallel operator on this rank's rows and gather the results."""
    (results,) = run_modes(group, stream, inputs, [(layout, comm)], **options).values()
    return results


def run_modes(
    group, stream: Stream, inputs: Inputs, modes: list[tuple[str, str]], **options
) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Do the same for several modes, which are sorted by layout. Return {mode: results}."""
    gathered = {}
    for layout, modes_of_layout in itertools.groupby(modes, key=lambda mode: mode[0]):
        cut = {"layout": layout, "cu_seqlens": stream.offsets, "packing": stream.packing}
        dims = dict.fromkeys(("q", "k", "v", "do"), stream.dim) | {"dmass": stream.dim + 1 if stream.dim else 1}
        local = Inputs(**{name: sb.shard_sequence(x, group, dims[name], **cut) for name, x in vars(inputs).items()})
        results = {}
        for mode in modes_of_layout:
            arguments = {"comm": mode[1], "return_mass": True, **groups_for(mode[1]), **cut, **options}
            results[mode] = run(sb.context_parallel_attention, local, group, **arguments)
        gathered |= gather(group, stream, results, cut)
    return gathered


def gather(group, stream: Stream, results: dict, cut: dict) -> dict:
    """Gather the tensors of {mode: results} in one message, as columns of one matrix. Few messages save most time."""
    tensors = [
        (mode, name, x.transpose(stream.dim, stream.dim + 1) if name == "mass" else x)  # (.., rows, heads, ..)
        for mode, by_name in results.items()
        for name, x in by_name.items()
    ]
    columns = [x.flatten(stream.dim + 1) for _, _, x in tensors]
    whole = sb.unshard_sequence(torch.cat(columns, dim=-1), group, stream.dim, **cut)
    gathered = {mode: {} for mode in results}
    for (mode, name, local), x in zip(tensors, whole.split([x.shape[-1] for x in columns], dim=-1), strict=True):
        x = x.unflatten(-1, local.shape[stream.dim + 1 :]).to(local.dtype)  # a wider dtype holds the same numbers
        gathered[mode][name] = x.transpose(stream.dim, stream.dim + 1) if name == "mass" else x
    return gathered


def exact_answer(stream: Stream, inputs: Inputs, **options) -> dict[str, Tensor]:
    """Return the results of the oracle."""
    return run(stream.oracle, Inputs(*(x.double() for x in vars(inputs).values())), **options)


def compare(group, dtypes, regimes, layouts=LAYOUTS) -> None:
    """Compare all streams and modes with float64, with the factor and floors of support/accuracy.py.

    Rank 0 compares. It collects the failures, so that it stays in step with the other ranks.
    """
    failures = []
    for (name, stream), dtype, regime in itertools.product(STREAMS.items(), dtypes, regimes):
        inputs = stream.inputs(regime, dtype)
        # Gradients of saturated logits are so small that skipping may drop them.
        options = {"mass_threshold": 0.0} if regime.startswith("saturated") else {}
        # Run all modes before the oracle leaves its results in recycled memory.
        results = run_modes(group, stream, inputs, modes_of(group, layouts), **options)
        failures += failures_of(f"{name}, {dtype}, {regime}", stream, inputs, results, options)
    assert not failures, "\n".join(failures)


def failures_of(name: str, stream: Stream, inputs: Inputs, results: dict, options: dict) -> list[str]:
    """Compare {mode: results} with float64 on rank 0 and return its failures."""
    if dist.get_rank() > 0:
        return []
    alone, exact = run(stream.one_rank, inputs, **options), exact_answer(stream, inputs)
    failures = []
    for mode, result in results.items():
        try:
            assert_errors(result, alone, exact, floors(inputs.q.dtype, inputs.q.shape[stream.dim]))
        except AssertionError as error:
            failures.append(f"{name}, {mode}: {error}")
    return failures


def same_answer_as_one_rank(group) -> None:
    """Results equal those of one rank in fp32 and bf16, for all layouts, packings and modes."""
    compare(group, (torch.float32, torch.bfloat16), ("randn", "mean -3.2", "saturated +5", "saturated +15"))


def same_answer_as_one_rank_in_short(group) -> None:
    """A shorter version of the check, for many ranks."""
    compare(group, (torch.float32,), ("mean -3.2",), layouts=("zigzag",))


def assert_bits_of_one_rank(group, stream: Stream, inputs: Inputs) -> None:
    """With "a2a" a rank has whole heads, so outputs and gradients are bit for bit those of one rank."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    options = {"reach": (0.3, 7.1)}  # each rank computes the offsets of its heads
    expected = run_over(alone, stream, inputs, "contiguous", "a2a", **options)
    for layout in LAYOUTS:
        if layout == "balanced" and stream.packing == "whole_stream":
            continue  # the balanced layout has one form only
        results = run_over(group, stream, inputs, layout, "a2a", **options)
        for name in RESULTS:
            assert torch.equal(results[name], expected[name]), f"{stream}, {layout}: {name} has other bits"


def a2a_gives_the_bits_of_one_rank(group) -> None:
    """All streams and layouts, with as many KV heads as there are ranks, in fp32 and bf16."""
    size = dist.get_world_size()
    for stream, dtype in itertools.product(STREAMS.values(), (torch.float32, torch.bfloat16)):
        inputs = make_inputs("mean -3.2", s=ROWS, h=2 * size, h_kv=size, d=16, d_v=24, dtype=dtype)
        assert_bits_of_one_rank(group, stream, inputs if stream.cu_seqlens is None else inputs.packed())


def exact_answer_at_2k(stream: Stream, inputs: Inputs) -> dict[str, Tensor]:
    """Return the results of the oracle. They take 4 s of one core, so the folder keeps them for other group sizes."""
    file = answers_folder / "2k.pt"
    if file.exists():
        kept = torch.load(file, map_location=inputs.q.device, weights_only=True)
        if all(torch.equal(kept["inputs"][name], x) for name, x in vars(inputs).items()):
            return kept["results"]
    results = exact_answer(stream, inputs)
    torch.save({"inputs": vars(inputs), "results": results}, file)
    return results


def streams_of_any_length(group) -> None:
    """Lengths that do not divide among the ranks, in every layout and mode.

    Documents are empty, of one row, or so long that most ranks share one. One stream has fewer rows than ranks.
    """
    failures = []
    for lengths, packing, rows in (
        ((301, 1, 0, 1, 57, 200, 38), "per_document", 599),
        ((301, 1, 0, 1, 57, 200, 38), "whole_stream", 598),
        ((1,) * 9, "per_document", 9),
        ((7, 612), "per_document", 619),
        ((0, 0), "per_document", 7),
        ((1,), "whole_stream", 1),
        (None, "per_document", 613),
        (None, "per_document", 1),
    ):
        stream = Stream(None if lengths is None else (0, *itertools.accumulate(lengths)), packing)
        inputs = make_inputs("mean -3.2", s=rows, h=4, h_kv=2, d=16, d_v=24)
        inputs = inputs if lengths is None else inputs.packed()
        results = run_modes(group, stream, inputs, modes_of(group))
        failures += failures_of(f"{lengths} of {rows} rows, {packing}", stream, inputs, results, {})
    assert not failures, "\n".join(failures)


def same_answer_at_2k(group) -> None:
    """A sequence of 2048 rows in every mode. Rank 0 compares."""
    stream = Stream()
    inputs = make_inputs("mean -6", s=2048, h=4, h_kv=2, d=16)
    results = run_modes(group, stream, inputs, modes_of(group, ("zigzag",)))
    if dist.get_rank() > 0:
        return
    alone, exact = run(stream.one_rank, inputs), exact_answer_at_2k(stream, inputs)
    for (_, comm), result in results.items():
        try:
            assert_errors(result, alone, exact, floors(torch.float32, 2048))
        except AssertionError as error:
            raise AssertionError(f"{comm}: {error}") from error


def options_are_passed_on(group) -> None:
    """attend_current, scale and mass_threshold reach the operator."""
    stream = STREAMS["whole stream"]
    inputs = stream.inputs("randn", torch.float64)
    for options in ({"attend_current": True}, {"scale": 0.5}):
        exact = exact_answer(stream, inputs, **options)
        for comm in comms_of(group):
            results = run_over(group, stream, inputs, "zigzag", comm, mass_threshold=0, **options)
            for name in RESULTS:
                torch.testing.assert_close(results[name], exact[name], rtol=1e-10, atol=1e-11)


def variants_of_the_logit(group) -> None:
    """Each variant works in every mode. Gradients of the gates and biases return to their ranks."""
    on_cpu = torch.get_default_device().type == "cpu"
    dtype, tolerance = (torch.float64, 1e-10) if on_cpu else (torch.float32, 1e-4)
    for name, stream in itertools.product(VARIANTS, (STREAMS["dense"], STREAMS["per document"])):
        x, options = make_variant(name, b=1 + stream.dim, s=ROWS, h=4, h_kv=2, d=16, d_v=24, dtype=dtype)
        if stream.dim == 0:
            x, options = x.packed(), packed_options(options)

        def oracle(*args, return_mass, of=stream, **options):
            return of.oracle(*args, **options)

        exact = run_variant(oracle, *wide_inputs(x, options))
        cut = {"cu_seqlens": stream.offsets, "packing": stream.packing}
        local = {
            part: sb.shard_sequence(t, group, stream.dim + (part == "dmass"), **cut) for part, t in vars(x).items()
        }
        options |= {part: sb.shard_sequence(t, group, stream.dim, **cut) for part, t in tensors_of(options).items()}
        results = {}
        for comm in comms_of(group):
            more = {"comm": comm, "mass_threshold": 0, **groups_for(comm), **cut}
            results[comm] = run_variant(sb.context_parallel_attention, Inputs(**local), options, group, **more)
        for by_name in gather(group, stream, results, cut).values():
            for result, whole in by_name.items():
                torch.testing.assert_close(whole.double(), exact[result], rtol=tolerance, atol=tolerance / 10)


def repeats_bit_for_bit(group) -> None:
    """Two runs of each mode give bitwise the same outputs and gradients."""
    stream = STREAMS["per document"]
    inputs = stream.inputs("randn", torch.bfloat16)
    for comm in comms_of(group):
        first, second = (run_over(group, stream, inputs, "zigzag", comm) for _ in range(2))
        for name in RESULTS:
            assert torch.equal(first[name], second[name]), f"{comm}: {name} differs between two runs"


def groups_of_one_rank(group) -> None:
    """A group of one rank equals the operator, also with comm="auto"."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]
    for stream in STREAMS.values():
        inputs = stream.inputs("randn", torch.float64)
        exact = exact_answer(stream, inputs)
        for comm in (*comms_of(mine), "auto"):
            results = run_over(mine, stream, inputs, "zigzag", comm, mass_threshold=0)
            for name in RESULTS:
                torch.testing.assert_close(results[name], exact[name], rtol=1e-10, atol=1e-11)


def subgroups(group) -> None:
    """Two groups work at the same time. Their rank numbers differ from those of the world."""
    size = dist.get_world_size()
    groups = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
    mine = groups[dist.get_rank() % 2]
    stream = STREAMS["dense"]
    inputs = stream.inputs("randn", torch.float64)
    exact = exact_answer(stream, inputs)
    for comm in comms_of(mine):
        results = run_over(mine, stream, inputs, "zigzag", comm, mass_threshold=0)
        for name in RESULTS:
            torch.testing.assert_close(results[name], exact[name], rtol=1e-10, atol=1e-11)


def local_inputs(group, dtype=torch.float32) -> list[Tensor]:
    """Return this rank's rows of q, k and v of the dense stream."""
    inputs = STREAMS["dense"].inputs("randn", dtype)
    return [sb.shard_sequence(x, group) for x in (inputs.q, inputs.k, inputs.v)]


def a_plan_serves_many_calls(group) -> None:
    """One plan serves calls with several dtypes, with and without gradients. Its fields describe it."""
    plan = sb.ContextParallelPlan(group, ROWS)
    ranks = dist.get_world_size()
    assert (plan.rank, plan.size, plan.seq_len, plan.local_len) == (dist.get_rank(), ranks, ROWS, ROWS // ranks)
    assert plan.key_rows == plan.key_rows_p2p == ROWS
    odd = sb.ContextParallelPlan(group, ROWS + 1)
    assert odd.local_len == ROWS // ranks + (odd.rank == 0)
    assert sb.ContextParallelPlan(group, local_len=odd.local_len).seq_len == ROWS + 1
    short = torch.arange(0, ROWS + 1, 4, dtype=torch.int32)
    assert sb.ContextParallelPlan(group, cu_seqlens=short, layout="balanced").key_rows == ROWS // ranks
    assert sb.ContextParallelPlan(group, cu_seqlens=short, packing="whole_stream").key_rows_p2p == ROWS // ranks
    assert (plan.layout, plan.packing, plan.packed) == ("zigzag", "per_document", False)
    rows = f"local_len={ROWS // ranks}, key_rows={ROWS}, key_rows_p2p={ROWS}"
    assert repr(plan) == f"ContextParallelPlan(rank {plan.rank} of {ranks}, seq_len={ROWS}, layout='zigzag', {rows})"
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = local_inputs(group, dtype)
        expected = sb.context_parallel_attention(q, k, v, group, comm="p2p")
        for cp_group in (None, group):
            assert torch.equal(sb.context_parallel_attention(q, k, v, cp_group, plan=plan, comm="p2p"), expected)
        q.requires_grad_()
        o = sb.context_parallel_attention(q, k, v, plan=plan, comm="p2p")
        assert torch.equal(o.detach(), expected)
        o.sum().backward()
        assert q.grad.isfinite().all() and q.grad.any()


def strides_are_taken_as_they_are(group) -> None:
    """Inputs may be Megatron's (s, b, h, d), with k and v as views of a fused projection."""
    q, k, v = (x[..., :16] for x in local_inputs(group))
    fused = torch.cat((q, k, v), 2).transpose(0, 1).contiguous().transpose(0, 1)
    views = fused.split([4, 2, 2], 2)
    assert not any(x.is_contiguous() for x in views)
    for comm in comms_of(group):
        expected = sb.context_parallel_attention(q, k, v.contiguous(), group, comm=comm, **groups_for(comm))
        assert torch.equal(sb.context_parallel_attention(*views, group, comm=comm, **groups_for(comm)), expected)


def negated_views(group) -> None:
    """Views such as x.conj().imag, whose elements are stored with the other sign, as inputs and as gradients."""
    for comm in comms_of(group):
        results = []
        for view in (torch.clone, lambda x: torch._neg_view(-x)):
            leaves = [view(x).requires_grad_() for x in local_inputs(group)]
            out = sb.context_parallel_attention(*leaves, group, comm=comm, return_mass=True, **groups_for(comm))
            gradients = torch.autograd.grad(out, leaves, [view(torch.ones_like(x)) for x in out])
            results.append((*out, *gradients))
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected)


def autocast(group) -> None:
    """Under autocast, fp32 tensors give the results of bf16 tensors."""
    q, k, v = local_inputs(group)
    expected = sb.context_parallel_attention(*(x.bfloat16() for x in (q, k, v)), group)
    with torch.autocast(q.device.type, torch.bfloat16):
        assert torch.equal(sb.context_parallel_attention(q, k, v, group), expected)


def gradients_of_one_result(group) -> None:
    """Gradients are right for a loss of the mass only, and of o only."""
    for comm, wanted in itertools.product(comms_of(group), ("o", "mass")):
        inputs = STREAMS["dense"].inputs("randn", torch.float64)
        (inputs.dmass if wanted == "o" else inputs.do).zero_()
        exact = exact_answer(STREAMS["dense"], inputs)
        q, k, v = (x.requires_grad_() for x in local_inputs(group, torch.float64))
        options = {"comm": comm, "return_mass": True, "mass_threshold": 0, **groups_for(comm)}
        o, mass = sb.context_parallel_attention(q, k, v, group, **options)
        if wanted == "o":
            gradients = torch.autograd.grad(o, (q, k, v), sb.shard_sequence(inputs.do, group))
        else:
            gradients = torch.autograd.grad(mass, (q, k), sb.shard_sequence(inputs.dmass, group, 2))
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=False):
            expected = sb.shard_sequence(exact[name], group)
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-11)


def mass_in_one_ranks_loss(group) -> None:
    """Gradients are right for a loss that contains the mass on rank 0 only."""
    stream, on_gpus = STREAMS["dense"], torch.get_default_device().type == "cuda"
    dtype = torch.float32 if on_gpus else torch.float64
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if on_gpus else {"rtol": 1e-10, "atol": 1e-11}
    inputs = stream.inputs("randn", dtype)
    first = dist.get_rank() == 0
    for comm in comms_of(group):
        dmass = sb.shard_sequence(inputs.dmass, group, 2)
        whole = Inputs(**vars(inputs) | {"dmass": sb.unshard_sequence(dmass * first, group, 2)})
        exact = exact_answer(stream, whole)
        q, k, v = (x.requires_grad_() for x in local_inputs(group, dtype))
        options = {"comm": comm, "return_mass": True, "mass_threshold": 0, **groups_for(comm)}
        o, mass = sb.context_parallel_attention(q, k, v, group, **options)
        loss = (o * sb.shard_sequence(inputs.do, group)).sum()
        gradients = torch.autograd.grad(loss + (mass * dmass).sum() if first else loss, (q, k, v))
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            expected = sb.shard_sequence(exact[name].to(dtype), group)
            torch.testing.assert_close(gradient, expected, **tolerance)


def shard_and_unshard(group) -> None:
    """The functions are inverses in any dimension and dtype, and the backward of one is the other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    odd = ((Stream(), 41), (Stream((0, 5, 5, 38)), 43), (Stream((0, 5, 38), "whole_stream"), 38), (Stream(), 1))
    cases = [*((stream, ROWS) for stream in STREAMS.values()), *odd]
    for (stream, rows), layout in itertools.product(cases, LAYOUTS):
        cut = {"layout": layout, "cu_seqlens": stream.offsets, "packing": stream.packing}
        for dim, x in ((0, torch.arange(rows)), (-1, torch.randn(2, 3, rows)), (1, torch.randn(2, rows, 3).bfloat16())):
            local = sb.shard_sequence(x, group, dim, **cut)
            assert local.shape[dim] in (rows // ranks, -(-rows // ranks)) and local.dtype == x.dtype
            assert torch.equal(sb.unshard_sequence(local, group, dim, **cut), x)
        # Each rank has its own weights; gradients are those of the sum of all ranks' losses.
        weights = [torch.randn(3, rows, generator=torch.Generator(x.device).manual_seed(r)) for r in range(ranks)]
        x = torch.randn(3, rows).requires_grad_()
        local = sb.shard_sequence(x, group, 1, **cut)
        (local * sb.shard_sequence(weights[rank], group, 1, **cut)).sum().backward()
        owned = [torch.zeros(rows) for _ in range(ranks)]
        dist.all_gather(owned, owned_rows(group, cut, rows))
        expected = sum(w * rows for w, rows in zip(weights, owned, strict=True))
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)

        leaf = local.detach().requires_grad_()
        (sb.unshard_sequence(leaf, group, 1, **cut) * weights[rank]).sum().backward()
        expected = sb.shard_sequence(sum(weights), group, 1, **cut)
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-6, atol=1e-6)


def shard_and_unshard_dtypes(group) -> None:
    """Rows of dtypes that gloo and NCCL do not support, and gradients of complex numbers."""
    for dtype in (torch.int16, torch.bool, torch.float16, torch.float8_e5m2, torch.complex128):
        for x in (torch.arange(7), torch.arange(28).reshape(2, 7, 2)):
            x, dim = x.to(dtype), -x.dim() // 2
            found = sb.unshard_sequence(sb.shard_sequence(x, group, dim), group, dim)
            assert found.dtype == dtype and torch.equal(found.to(torch.float64), x.to(torch.float64))
    one = torch.randn(1, 1, 32)[..., 0]  # a rank's only element, in a contiguous tensor with strides of 32
    assert torch.equal(sb.unshard_sequence(one, group)[:, dist.get_rank()], one[:, 0])

    x = torch.randn(3, 7, dtype=torch.complex128).requires_grad_()
    weight = torch.randn(3, 7, dtype=torch.complex128)
    local = sb.shard_sequence(x, group)
    (local * sb.shard_sequence(weight, group)).abs().square().sum().backward()
    expected = 2 * weight.abs().square() * x.detach()
    torch.testing.assert_close(x.grad, expected)

    leaf = local.detach().requires_grad_()
    (sb.unshard_sequence(leaf.conj(), group) * weight).abs().square().sum().backward()
    torch.testing.assert_close(leaf.grad, dist.get_world_size() * sb.shard_sequence(expected, group))


def owned_rows(group, cut: dict, num_rows: int) -> Tensor:
    """Return 1 for each row of the stream that this rank holds, else 0."""
    rows = sb.shard_sequence(torch.arange(num_rows), group, 0, **cut)
    return torch.zeros(num_rows).index_fill(0, rows, 1.0)
