"""The group of every context-parallel function: the error names the argument and says what to do."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.messages import mentions
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_sb as sb
from megatron_sb.ops.context_parallel import shard_positions

X = torch.zeros(1, 4, 2, 8)
CALLS = {
    "attention": lambda group: sb.context_parallel_attention(X, X, X, group),
    "plan": lambda group: sb.ContextParallelPlan(group, 4),
    "shard": lambda group: sb.shard_sequence(X, group),
    "unshard": lambda group: sb.unshard_sequence(X, group),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every_call
def test_without_torch_distributed(call):
    with pytest.raises(ValueError, match=mentions("cp_group torch.distributed.init_process_group")):
        call("a group")


@every_call
def test_another_object(call, one_rank):
    with pytest.raises(TypeError, match=mentions("cp_group ProcessGroup str torch.distributed.group.WORLD")):
        call("a group")


@every_call
def test_a_group_without_this_rank(call, one_rank):
    with pytest.raises(ValueError, match=mentions("cp_group this rank 0 torch.distributed.new_group")):
        call(dist.GroupMember.NON_GROUP_MEMBER)


@every_call
def test_a_group_that_was_destroyed(call, one_rank):
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match=mentions("cp_group destroyed torch.distributed.new_group")):
        call(group)


@pytest.mark.parametrize(
    ("group", "error", "words"),
    [
        ("a group", TypeError, "hierarchical_groups[0] ProcessGroup str"),
        (dist.GroupMember.NON_GROUP_MEMBER, ValueError, "hierarchical_groups[0] this rank 0"),
    ],
    ids=["another object", "without this rank"],
)
def test_hierarchical_groups(group, error, words, one_rank):
    with pytest.raises(error, match=mentions(words)):
        groups = {"comm": "a2a+p2p", "hierarchical_groups": (group, dist.group.WORLD)}
        sb.context_parallel_attention(X, X, X, dist.group.WORLD, **groups)


@pytest.mark.parametrize("function", [sb.shard_sequence, sb.unshard_sequence])
def test_a_quantized_tensor(function, one_rank):
    with pytest.raises(TypeError, match=mentions("x dense quantized")):
        function(torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), dist.group.WORLD)


def test_no_group_at_all():
    with pytest.raises(ValueError, match=mentions("cp_group plan neither")):
        sb.context_parallel_attention(X, X, X)


NO_INTEGERS = {
    "positions: ranks": (lambda: shard_positions(2.0, 8), "num_ranks int 2.0"),
    "positions: rows": (lambda: shard_positions(2, 8 / 2), "seq_len int 4.0"),
    "positions: a bool": (lambda: shard_positions(True, 8), "num_ranks int True"),
    "shard": (lambda: sb.shard_sequence(X, dist.group.WORLD, 1.0), "dim int 1.0"),
    "unshard": (lambda: sb.unshard_sequence(X, dist.group.WORLD, "1"), "dim int '1'"),
    "shared sequence": (lambda: shared(dim="1"), "dim int '1'"),
}


def shared(**options):
    """Enter a block with a tensor of 4 rows."""
    with sb.shared_sequence(sb.ContextParallelPlan(dist.group.WORLD, 4), X, **options):
        pass


@pytest.mark.parametrize(("call", "words"), NO_INTEGERS.values(), ids=NO_INTEGERS)
def test_numbers_that_are_no_integers(call, words, one_rank):
    with pytest.raises(TypeError, match=mentions(words)):
        call()


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**32 + 2, 2**70])
def test_numbers_of_ranks_and_rows(value):
    for name, most, arguments in (("num_ranks", "2^30 - 1", (value, 8)), ("seq_len", "2^31 - 1", (2, value))):
        with pytest.raises(ValueError, match=mentions(f"{name} 1 {most} {value}")):
            shard_positions(*arguments)


def test_ranks_whose_chunks_an_int32_does_not_count():
    """Zigzag has two chunks for each rank. Their number became negative."""
    with pytest.raises(ValueError, match=mentions("num_ranks 2^30 - 1 1073741824")):
        shard_positions(2**30, 8)
    for value in (0, 2**30, 2**32 + 2):
        with pytest.raises(ValueError, match=mentions(f"ranks 1 1073741823 {value}")):
            torch.ops.megatron_sb.shard_positions(value, 8, "zigzag", None, "per_document")


def test_integers_of_numpy_are_accepted(one_rank):
    assert shard_positions(np.int64(2), np.int32(8)).tolist() == shard_positions(2, 8).tolist()
    shared(dim=np.int64(-3))


def test_a_plan_of_a_group_that_was_destroyed(one_rank):
    """The next group gets the name of the destroyed one, and may have other ranks."""
    plan, x = sb.ContextParallelPlan(dist.group.WORLD, 4), X.clone().requires_grad_()
    o = sb.context_parallel_attention(x, x, x, plan=plan)
    dist.destroy_process_group()
    destroyed = mentions("cp_group plans destroyed new plan")
    with pytest.raises(RuntimeError, match=destroyed):
        sb.context_parallel_attention(x, x, x, plan=plan)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match=destroyed):
        sb.context_parallel_attention(x, x, x, plan=plan)
    with pytest.raises(RuntimeError, match=destroyed):
        o.sum().backward()


def test_a_group_of_the_backend_fake():
    """This backend, for dry runs of one rank, has no timeout and no store over which ranks could agree."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        plan = sb.ContextParallelPlan(dist.group.WORLD, 8)
        with pytest.raises(RuntimeError, match=mentions("rank 0 2 agreement failed")):
            sb.context_parallel_attention(X, X, X, plan=plan)
    finally:
        dist.destroy_process_group()
