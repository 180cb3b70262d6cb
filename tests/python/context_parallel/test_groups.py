"""The group of every context-parallel function: the error names the argument and says what to do."""

import pytest
import torch
import torch.distributed as dist
from support.messages import mentions

import megatron_sb as sb

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


def test_no_group_at_all():
    with pytest.raises(ValueError, match=mentions("cp_group plan neither")):
        sb.context_parallel_attention(X, X, X)
