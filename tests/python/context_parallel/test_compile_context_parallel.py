"""torch.compile of a model that calls context parallelism: its graph breaks there, and fullgraph=True says why."""

import pytest
import torch
import torch.distributed as dist
from support.messages import mentions
from torch._dynamo.testing import CompileCounter

import megatron_sb as sb
from megatron_sb.baselines.softmax import SoftmaxAttention, context_parallel_softmax


@pytest.fixture(autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


def attention(**plan):
    """Return a function with operators before and after the attention."""
    plan = plan or {"cp_group": dist.group.WORLD}
    return lambda x: sb.context_parallel_attention(2 * x, x, x, **plan) + 1


def softmax():
    """Return a function with operators before and after softmax attention."""
    layer, plan = SoftmaxAttention(2, 8), sb.ContextParallelPlan(dist.group.WORLD, 8)
    return lambda x: context_parallel_softmax(layer, 2 * x, x, x, plan=plan) + 1


def sharding():
    """Return a function with operators before, between and after the two functions."""
    group = dist.group.WORLD  # torch.compile skips a function that reads this property

    def function(x):
        local = sb.shard_sequence(2 * x, group)
        whole = sb.unshard_sequence(local + 1, group)
        return 3 * whole

    return function


def planning():
    """Return a function that makes a plan."""
    return lambda x: 2 * x * sb.ContextParallelPlan(dist.group.WORLD, x.shape[1]).local_len


CASES = {
    "attention with a plan": (lambda: attention(plan=sb.ContextParallelPlan(dist.group.WORLD, 8)), 2),
    "attention": (attention, 2),
    "softmax": (softmax, 2),
    "sharding": (sharding, 3),
    "plan": (planning, None),
}
cases = pytest.mark.parametrize(("make", "num_graphs"), CASES.values(), ids=CASES)


@cases
def test_the_graph_breaks(make, num_graphs):
    """Nothing inside the call is compiled. Results and gradients are those without torch.compile."""
    function, counter = make(), CompileCounter()
    x, y = (torch.linspace(-1, 1, 8 * 2 * 8).view(1, 8, 2, 8).requires_grad_() for _ in range(2))
    expected, found = function(x), torch.compile(function, backend=counter)(y)
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert num_graphs is None or counter.frame_count == num_graphs


@cases
def test_fullgraph_says_why(make, num_graphs):
    expected = mentions("context parallelism graph ranks fullgraph=True")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=expected):
        torch.compile(make(), fullgraph=True, backend="eager")(torch.zeros(1, 8, 2, 8))
