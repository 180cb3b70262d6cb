"""Call each operator with tensors of one subclass, on one rank of gloo, and print `OPERATOR: OUTCOME` for each.

    tensor_subclasses.py dtensor|fake|wrapper|own

"wrapper" is a user's subclass that wraps a tensor and implements __torch_dispatch__. "own" implements it too and holds
its own elements. The outcome is "same values", "no values" (a FakeTensor) or the error.
"""

import sys

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh
from torch.utils._pytree import tree_map

import megatron_sb as sb


class Wrapper(torch.Tensor):
    """Hold a tensor, and no elements."""

    @staticmethod
    def __new__(cls, inner):
        """Make a tensor without elements."""
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        """Hold the tensor."""
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Call the operator with the tensors inside."""
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        return tree_map(lambda x: Wrapper(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


class Own(torch.Tensor):
    """Hold its own elements."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Call the operator."""
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def wrap_with(kind: str):
    """Return the function that makes a tensor of the subclass."""
    if kind == "dtensor":
        mesh = init_device_mesh("cpu", (1,))
        return lambda x: distribute_tensor(x, mesh, [Replicate()])
    if kind == "fake":
        return FakeTensorMode().from_tensor
    return Wrapper if kind == "wrapper" else lambda x: torch.Tensor._make_subclass(Own, x)


def outcome(call, wrap, tensors) -> str:
    """Call an operator with plain tensors, then with the subclass, and compare."""
    expected = call(*tensors)
    try:
        found = call(*map(wrap, tensors))
    except Exception as error:
        return f"{type(error).__name__} {error}".replace("\n", " ")
    if isinstance(found, FakeTensor):
        return "no values"
    if isinstance(found, (DTensor, Wrapper)):
        found = found.to_local() if isinstance(found, DTensor) else found.inner
    return "same values" if torch.equal(found, expected) else "other values"


def main(kind: str) -> None:
    """Print the outcomes. Each line is flushed, because the next call may crash."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrap = wrap_with(kind)
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    plan = sb.ContextParallelPlan(dist.group.WORLD, seq_len=8)
    length = torch.tensor([8], dtype=torch.int32)
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    calls = {
        "attention": (sb.stickbreaking_attention, (q, k, v)),
        "varlen": (sb.stickbreaking_attention_varlen, (q[0], k[0], v[0], offsets)),
        "kvcache": (
            lambda q, k, v, n: sb.stickbreaking_attention_with_kvcache(q, k, v, cache_seqlens=n),
            (q[:, 7:], k, v, length),
        ),
        "context_parallel": (lambda *x: sb.context_parallel_attention(*x, plan=plan, comm="p2p"), (q, k, v)),
    }
    for name in ("forget_gate", "query_bias", "key_bias"):
        calls[name] = (
            lambda x, name=name: sb.context_parallel_attention(q, k, v, plan=plan, comm="p2p", **{name: x}),
            (torch.zeros(1, 8, 2),),
        )
    for name, (call, tensors) in calls.items():
        print(f"{name}: {outcome(call, wrap, tensors)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
    dist.destroy_process_group()
