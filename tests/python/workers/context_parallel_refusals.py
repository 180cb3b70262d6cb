"""Checks that invalid calls raise an error with a message on every rank. Every rank calls each check."""

import functools
import re

import torch
import torch.distributed as dist
from context_parallel_accuracy import ROWS, comms_of, groups_for, hierarchy, local_inputs
from support.messages import mentions

import megatron_sb as sb


def expect_on_every_rank(call, expected: str, error: type[Exception] = ValueError) -> None:
    """Assert that `call` raises `error` on every rank, with a message that matches."""
    try:
        call()
        mine = "no error"
    except error as raised:
        mine = f"raised: {raised}"
    messages = [""] * dist.get_world_size()
    dist.all_gather_object(messages, mine)
    for rank, message in enumerate(messages):
        assert message.startswith("raised: ") and re.search(expected, message), f"rank {rank}: {message!r}"


def offsets(*cu_seqlens: int) -> torch.Tensor:
    """Return cu_seqlens as a tensor."""
    return torch.tensor(cu_seqlens, dtype=torch.int32)


def new_group(group) -> dist.ProcessGroup:
    """Return a group of the same ranks, for which every call is new. A rank sends data at once in a known call."""
    return dist.new_group(dist.get_process_group_ranks(group))


def refuses_unequal_chunks(group) -> None:
    """With equal_chunks, the message names the length and the required multiple, or the document."""
    multiple = 2 * dist.get_world_size()
    for layout, chunks in (("zigzag", multiple), ("contiguous", multiple // 2), ("balanced", multiple // 2)):
        expect_on_every_rank(
            lambda layout=layout: sb.ContextParallelPlan(group, 100 * multiple + 1, layout=layout, equal_chunks=True),
            mentions(f"seq_len {100 * multiple + 1} multiple {chunks} {layout}"),
        )
    expect_on_every_rank(
        lambda: sb.ContextParallelPlan(group, local_len=3, equal_chunks=True),
        mentions(f"seq_len {3 * multiple // 2} multiple {multiple}"),
    )
    expect_on_every_rank(
        lambda: sb.ContextParallelPlan(
            group, cu_seqlens=offsets(0, multiple, 2 * multiple + 3, 3 * multiple), equal_chunks=True
        ),
        mentions(f"document 1 cu_seqlens {multiple + 3} multiple {multiple}"),
    )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for arguments in (  # the length of the stream is that of cu_seqlens, or the sum over the ranks
        {"cu_seqlens": offsets(0, 5, multiple + 1), "packing": "whole_stream"},
        {"cu_seqlens": offsets(0, 5, multiple + 1), "layout": "balanced"},
        {"local_len": 2 + (rank == 0), "layout": "contiguous"},
    ):
        chunks = ranks if "layout" in arguments else multiple
        assert sb.ContextParallelPlan(group, **arguments).seq_len == multiple + 1
        expect_on_every_rank(
            lambda arguments=arguments: sb.ContextParallelPlan(group, equal_chunks=True, **arguments),
            mentions(f"seq_len {multiple + 1} multiple {chunks}"),
        )
    expect_on_every_rank(
        lambda: sb.ContextParallelPlan(group, multiple, equal_chunks=rank == 1),
        mentions("disagree equal_chunks rank 0 False 1 True"),
    )
    expect_on_every_rank(lambda: sb.ContextParallelPlan(group, 7, equal_chunks="no"), "^raised: equal_chunks .*'no'")
    for field, name in (("layout", "zig"), ("packing", "tight")):  # which have no number of chunks
        expect_on_every_rank(
            lambda field=field, name=name: sb.ContextParallelPlan(group, 7, equal_chunks=True, **{field: name}),
            rf'^raised: {field} must be .*"{name}"',
        )


def refuses_bad_offsets(group) -> None:
    """Invalid types, shapes and values of cu_seqlens and seq_len."""
    for cu_seqlens, expected in (
        (offsets(1, ROWS), mentions("cu_seqlens 1 0")),
        (offsets(0, 96, 48, ROWS), mentions("cu_seqlens decrease 96 48")),
        (offsets(0, 2 * ROWS), mentions(f"cu_seqlens seq_len {2 * ROWS} {ROWS}")),
        (offsets(), mentions("cu_seqlens")),
        (offsets(0, ROWS).long(), mentions("cu_seqlens torch.int64")),
        (offsets(0, ROWS)[None], mentions("cu_seqlens 2")),
        ([0, ROWS], mentions("cu_seqlens list")),
        (offsets(0, ROWS).to("meta"), mentions("cu_seqlens dense values meta")),
        (offsets(0, ROWS).to_sparse(), mentions("cu_seqlens dense torch.sparse_coo")),
    ):
        expect_on_every_rank(lambda c=cu_seqlens: sb.ContextParallelPlan(group, ROWS, c), expected)
        expect_on_every_rank(
            lambda c=cu_seqlens: sb.shard_sequence(torch.zeros(ROWS), group, 0, cu_seqlens=c), expected
        )
    expect_on_every_rank(lambda: sb.ContextParallelPlan(group), mentions("seq_len cu_seqlens"))
    expect_on_every_rank(lambda: sb.ContextParallelPlan(group, 0), mentions("seq_len 0 1"))
    for arguments, expected in (
        ({"seq_len": 64.0}, "^raised: seq_len must be an int, got 64.0"),
        ({"seq_len": 2**70}, rf"^raised: seq_len must be from 1 to .*got {2**70}"),
        ({"local_len": "8"}, "^raised: local_len must be an int, got '8'"),
        ({"local_len": -1}, "^raised: local_len must be from 0 to .*got -1"),
        ({"local_len": 2**70}, rf"^raised: local_len must be from 0 to .*got {2**70}"),
        ({"cu_seqlens": offsets()}, "^raised: cu_seqlens must have .*got none"),
        ({"cu_seqlens": offsets(), "local_len": 8}, "^raised: cu_seqlens must have .*got none"),
        ({"cu_seqlens": offsets(0)}, r"^raised: cu_seqlens must end at .*got cu_seqlens\[-1\] = 0"),
    ):
        expect_on_every_rank(lambda arguments=arguments: sb.ContextParallelPlan(group, **arguments), expected)
    expect_on_every_rank(lambda: sb.ContextParallelPlan(group, 64, local_len=8), mentions("local_len seq_len 64 8"))
    expect_on_every_rank(lambda: sb.ContextParallelPlan(group, 64, layout="striped"), mentions('layout "striped"'))
    expect_on_every_rank(lambda: sb.ContextParallelPlan(group, 64, layout=3), mentions('layout "layout=3"'))
    expect_on_every_rank(lambda: sb.ContextParallelPlan(group, 64, packing="tight"), mentions('packing "tight"'))


def refuses_ranks_that_disagree(group) -> None:
    """Ranks differ in the plan, shapes or options, or one rank has an invalid argument."""
    group = new_group(group)
    odd = dist.get_rank() == 1
    q, k, v = local_inputs(group)
    plan = sb.ContextParallelPlan(group, ROWS)

    def plan_of(**arguments):
        return lambda: sb.ContextParallelPlan(group, **arguments)

    def disagreement(field: str, *values) -> str:
        """Return a pattern for the message that ranks 0 and 1 have different values of a field."""
        return mentions(" ".join(["disagree", field, "rank", "0", "1", *map(str, values)]))

    expect_on_every_rank(plan_of(seq_len=2 * ROWS if odd else ROWS), disagreement("seq_len", ROWS, 2 * ROWS))
    expect_on_every_rank(
        plan_of(seq_len=ROWS, layout="contiguous" if odd else "zigzag"),
        disagreement("layout", "zigzag", "contiguous"),
    )
    expect_on_every_rank(
        plan_of(cu_seqlens=offsets(0, 48, ROWS), packing="whole_stream" if odd else "per_document"),
        disagreement("packing", "per_document", "whole_stream"),
    )
    expect_on_every_rank(
        plan_of(cu_seqlens=offsets(0, 48, ROWS) if odd else offsets(0, ROWS)), disagreement("cu_seqlens", 2, 3)
    )
    expect_on_every_rank(
        plan_of(cu_seqlens=offsets(0, 96 if odd else 48, ROWS)), mentions("cu_seqlens[1] rank 0 1 48 96")
    )
    expect_on_every_rank(
        plan_of(local_len=8, seq_len=None) if odd else plan_of(seq_len=ROWS), disagreement("seq_len", ROWS, "sum")
    )
    # The last rank lacks a row, so the second-last one has a row too many.
    ranks, rank = dist.get_world_size(), dist.get_rank()
    wrong = 8 + (rank == ranks - 2) - (rank == ranks - 1)
    expected = mentions(f"local_len 8 rank {ranks - 2} {8 * ranks} 9")
    for layout in ("zigzag", "contiguous", "balanced"):
        expect_on_every_rank(plan_of(local_len=wrong, layout=layout), expected)
    rows = torch.zeros(1, wrong, 4, 8)
    expect_on_every_rank(lambda: sb.context_parallel_attention(rows, rows, rows, group), expected)
    for field in ("layout", "packing"):  # the ranks do not compare a packing without documents
        names = {field: "tight"} if odd else {}
        expect_on_every_rank(plan_of(seq_len=ROWS, **names), mentions(f'{field} must be "tight"'))

    def call(*tensors, **options):
        return lambda: sb.context_parallel_attention(*tensors, plan=plan, **options)

    expect_on_every_rank(call(*(x[:1] if odd else x for x in (q, k, v))), disagreement("q's shape"))
    expect_on_every_rank(call(q, k, v[..., :16] if odd else v), disagreement("v's shape"))
    expect_on_every_rank(call(*(x.bfloat16() if odd else x for x in (q, k, v))), disagreement("q's dtype"))
    expect_on_every_rank(call(q, k, v, comm="p2p" if odd else "all_gather"), disagreement("comm", "all_gather", "p2p"))
    expect_on_every_rank(call(q, k, v, scale=0.5 if odd else 0.25), disagreement("scale", 0.25, 0.5))
    expect_on_every_rank(call(q, k, v, return_mass=odd), disagreement("return_mass", False, True))
    for name, x in (("query_bias", q), ("key_bias", k)):
        bias = {name: torch.zeros(x.shape[:-1])} if odd else {}
        expect_on_every_rank(call(q, k, v, **bias), disagreement(name, "no", "yes"))
    expect_on_every_rank(call(q[:, :-1] if odd else q, k, v), mentions("q local rows plan"))
    expect_on_every_rank(call(torch.zeros(()) if odd else q, k, v), mentions("q 0 4"))
    expect_on_every_rank(call(q, k, v, comm="a2a+p2p" if odd else "auto"), mentions("hierarchical_groups a2a+p2p"))
    expect_on_every_rank(lambda: sb.unshard_sequence(q[:1] if odd else q, group), disagreement("x's shape"))
    rows, ranks = q.shape[1], dist.get_world_size()
    expect_on_every_rank(
        lambda: sb.unshard_sequence(q[:, 2:] if odd else q, group),
        mentions(f"x rows {rows - 1} rank 0 {ranks * rows - 2} {rows}"),
    )
    for of_rank_1, of_others in (((0, 96), (0, 48)), ((0, 48, 96), (0, 96)), (None, (0, 96))):
        cu_seqlens = of_rank_1 if odd else of_others
        lengths = (len(of_others), "none" if of_rank_1 is None else len(of_rank_1))
        expect_on_every_rank(
            lambda cu=cu_seqlens: sb.unshard_sequence(q, group, cu_seqlens=None if cu is None else offsets(*cu)),
            disagreement("cu_seqlens unshard_sequence", *lengths),
        )
    assert call(q, k, v)().isfinite().all(), "the plan must still work after errors"


def refuses_plans_of_other_batches(group) -> None:
    """Ranks use plans that differ in documents alone, or one makes a plan while the others gather a sequence."""
    group = new_group(group)
    odd = dist.get_rank() == 1
    q, k, v = (x[0] for x in local_inputs(group))

    def no_plan():
        return sb.unshard_sequence(q, group, 0) if odd else sb.ContextParallelPlan(group, ROWS)

    expect_on_every_rank(no_plan, mentions("same call plan rank 0 unshard_sequence rank 1"))
    plans = [sb.ContextParallelPlan(group, cu_seqlens=offsets(0, first, ROWS)) for first in (48, 96)]
    for comm in ("p2p", "all_gather"):
        expect_on_every_rank(
            lambda comm=comm: sb.context_parallel_attention(q, k, v, plan=plans[odd], comm=comm),
            mentions("disagree plan's cu_seqlens rank 0 3 1 3"),
        )
        for plan in plans:  # one agreement serves both
            assert sb.context_parallel_attention(q, k, v, plan=plan, comm=comm).isfinite().all()
    sb.context_parallel_attention(q, k, v, plan=plans[odd], comm="p2p")  # known: no error, and wrong outputs
    expect_on_every_rank(
        lambda: sb.context_parallel_attention(q, k, v, plan=plans[0], scale=2.0), mentions("disagree earlier documents")
    )
    expect_on_every_rank(no_plan, mentions("same call plan rank 0 unshard_sequence rank 1"))


def refuses_hierarchies_that_disagree(group) -> None:
    """Two halves of the ranks split the group in different ways, each of them valid."""
    group = new_group(group)
    q, k, v = local_inputs(group)
    groups = [hierarchy(exchanging) for exchanging in (2, 4)]
    mine = groups[dist.get_rank() * 2 // dist.get_world_size()]
    expect_on_every_rank(
        lambda: sb.context_parallel_attention(q, k, v, group, comm="a2a+p2p", hierarchical_groups=mine),
        mentions("disagree ranks heads rank 0 2 2 4"),
    )


def refuses_bad_calls(group) -> None:
    """All ranks make the same invalid call."""
    q, k, v = local_inputs(group)
    plan = sb.ContextParallelPlan(group, ROWS)
    packed = sb.ContextParallelPlan(group, ROWS, offsets(0, 96, ROWS))
    wholes = sb.ContextParallelPlan(group, ROWS, offsets(0, 96, ROWS), layout="contiguous", packing="whole_stream")
    call = sb.context_parallel_attention

    def hierarchical(groups):
        return call(q, k, v, group, comm="a2a+p2p", hierarchical_groups=groups)

    for attempt, expected, error in (
        (lambda: call(q, k, v), "cp_group plan", ValueError),
        (lambda: call(q, k, v, "world"), "cp_group str", TypeError),
        (lambda: call(q, k, v, plan=3), "plan int", TypeError),
        (
            lambda: call(q, k, v, plan=plan, cu_seqlens=offsets(0, ROWS)),
            "cu_seqlens plan",
            ValueError,
        ),
        (
            lambda: call(q, k, v, plan=plan, layout="contiguous"),
            "layout 'contiguous' plan 'zigzag'",
            ValueError,
        ),
        (
            lambda: call(q, k, v, plan=plan, packing="whole_stream"),
            "packing 'whole_stream' plan 'per_document'",
            ValueError,
        ),
        (lambda: call(q, k, v, group, comm="ring"), 'comm "ring" "auto"', ValueError),
        (
            lambda: call(q[:, :, :3], k[:, :, :1], v[:, :, :1], group, comm="a2a"),
            'comm "a2a" q 3 k 1 4 ranks',
            ValueError,
        ),
        (lambda: call(q, k, v, group, comm="a2a+p2p"), "hierarchical_groups a2a+p2p", ValueError),
        (
            lambda: call(q, k, v, group, hierarchical_groups=(group, group)),
            "hierarchical_groups comm 'auto'",
            ValueError,
        ),
        (lambda: hierarchical((group,)), "hierarchical_groups a2a p2p", ValueError),
        (lambda: hierarchical((group, 3)), "hierarchical_groups[1] int", TypeError),
        (lambda: hierarchical((group, group)), "hierarchical_groups 4", ValueError),
        (lambda: hierarchical(hierarchy()[::-1]), "hierarchical_groups a2a neighbours", ValueError),
        (lambda: call(q[0], k[0], v[0], group), "q 3 4", ValueError),
        (lambda: call(q, k, v, group, cu_seqlens=offsets(0, ROWS)), "q 4 3", ValueError),
        (lambda: call(q, k, v, plan=packed), "q 4 3 plan packed", ValueError),
        (lambda: call(q[0], k[0], v[0], plan=plan), "q 3 4", ValueError),
        (lambda: call([1], k, v, group), "q list", TypeError),
        (lambda: call(q, k.bfloat16(), v, group), "k BFloat16 Float", TypeError),
        (lambda: call(q, k[:, :, :1], v, group), "heads k v", ValueError),
        (lambda: call(q, k[:, 1:], v, plan=plan), "k local rows", ValueError),
        (lambda: call(q, k, v, group, mass_threshold=1.5), "mass_threshold 1.5", ValueError),
        (lambda: call(q, k, v, group, scale=float("inf")), "scale inf", ValueError),
        (lambda: sb.shard_sequence(q, group, 7), "dim 7 4", ValueError),
        (lambda: sb.unshard_sequence(q, group, -5), "dim -5", ValueError),
        (lambda: sb.shard_sequence([1], group), "x list", TypeError),
        (lambda: sb.shard_sequence(torch.zeros(()), group, 0), "x dimension rows", ValueError),
        (lambda: sb.shard_sequence(q[:, :0], group), "x row dimension 1", ValueError),
        (lambda: sb.unshard_sequence(q[:, :0], group), "x row dimension 1", ValueError),
        (lambda: sb.unshard_sequence(q.to("meta"), group), "x elements meta", TypeError),
        (lambda: sb.shard_sequence(q, None), "cp_group NoneType", TypeError),
    ):
        expect_on_every_rank(attempt, mentions(expected), error)
    q3, k3, v3 = (sb.shard_sequence(torch.randn(ROWS, h, 16), group, 0) for h in (4, 2, 2))
    assert call(q3, k3, v3, plan=wholes).isfinite().all(), "default arguments must be compatible with every plan"


def refuses_wrong_groups(group) -> None:
    """A plan of another group, and a group without this rank."""
    other = dist.new_group(list(range(dist.get_world_size())))
    alone = dist.new_group([0])
    q, k, v = local_inputs(group)
    plan = sb.ContextParallelPlan(other, ROWS)
    expect_on_every_rank(
        lambda: sb.context_parallel_attention(q, k, v, group, plan=plan),
        mentions("plan group cp_group"),
    )
    if dist.get_rank() > 0:
        for attempt in (
            lambda: sb.ContextParallelPlan(alone, ROWS),
            lambda: sb.context_parallel_attention(q, k, v, alone),
            lambda: sb.shard_sequence(q, alone),
        ):
            try:
                attempt()
                raise AssertionError("a group without this rank was accepted")
            except ValueError as error:
                assert re.search(mentions(f"cp_group rank {dist.get_rank()}"), str(error))


def refuses_a_second_derivative(group) -> None:
    """The error is raised only when a second derivative is computed, of any input, alone or with the first."""

    def expect_error(loss, of) -> None:
        expect_on_every_rank(
            lambda: torch.autograd.grad(loss, of, retain_graph=True),
            "no second derivative",
            NotImplementedError,
        )

    for comm in comms_of(group):
        inputs = [x.requires_grad_() for x in local_inputs(group)]
        o = sb.context_parallel_attention(*inputs, group, comm=comm, **groups_for(comm))
        for x in inputs:
            (dx,) = torch.autograd.grad(o.sum(), x, create_graph=True)
            for other in inputs:
                expect_error(dx.sum(), other)
                expect_error(o.sum() + dx.square().sum(), other)
            expect_on_every_rank(
                functools.partial(dx.sum().backward, retain_graph=True), "no second derivative", NotImplementedError
            )
