"""Memory of a call, and tensors of more than 2^31 elements."""

import pytest
import torch
from support.accuracy import RESULTS, relative_errors, run
from support.inputs import Inputs, make_inputs

from megatron_sb import stickbreaking_attention

pytestmark = pytest.mark.gpu
MIB = 2**20
WORKSPACE_CAP = 256 * MIB


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(("dtype", "d"), [(torch.bfloat16, 128), (torch.bfloat16, 64), (torch.bfloat16, 256)], ids=str)
def test_linear_memory(dtype, d):
    """At 65536 keys, a call allocates only results, fp32 gradients, 24 bytes for each row and head, and a workspace."""
    heads = 512 // d
    x = make_inputs("mean -11", s=65536, h=heads, d=d, dtype=dtype)
    run(stickbreaking_attention, make_inputs(s=64, h=1, d=d, dtype=dtype), return_mass=True)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = stickbreaking_attention(*leaves)
    forward = torch.cuda.max_memory_allocated() - before
    gradients = torch.autograd.grad(o, leaves, x.do)
    peak = torch.cuda.max_memory_allocated() - before
    per_row = 24 * heads * x.q.shape[1]
    accumulators = 2 * bytes_of(*gradients)
    print(f"d={d}: forward {forward / MIB:.0f} MiB, peak {peak / MIB:.0f} MiB, o {bytes_of(o) / MIB:.0f} MiB")
    assert forward <= bytes_of(o) + per_row + WORKSPACE_CAP
    assert peak <= bytes_of(o, *gradients) + accumulators + per_row + WORKSPACE_CAP + 2 * MIB


def test_views_into_more_than_2_to_the_31_elements():
    """Inputs with strides of more than 2^31 elements in total give bitwise the results of contiguous inputs."""
    rows, pitch = 300, 2**23
    storage = torch.empty(rows * pitch, dtype=torch.bfloat16)
    x = make_inputs("mean -6", s=rows, h=2, d=64, dtype=torch.bfloat16)
    expected = run(stickbreaking_attention, x, return_mass=True)
    far = []
    for index, tensor in enumerate((x.q, x.k, x.v, x.do)):
        view = storage.as_strided(tensor.shape, (rows * pitch, pitch, 64, 1), 1024 * index)
        view.copy_(tensor)
        far.append(view)
    assert (rows - 1) * pitch > 2**31
    actual = run(stickbreaking_attention, Inputs(*far, x.dmass), return_mass=True)
    for name in RESULTS:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("d", [64, 128])
def test_outputs_of_more_than_2_to_the_31_elements(d):
    """With the same sequence many times, as an expanded batch, the last result is bitwise equal to the first.

    dk and dv are compared with a tolerance: each chunk of the workspace adds to them, and chunks end at different rows
    of each sequence.
    """
    b, s, h = 1100 * 128 // d, 2048, 8
    assert b * s * h * d > 2**31
    needed, (free, _) = 20 * b * s * h * d, torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")
    x = make_inputs("randn", s=s, h=h, d=d, dtype=torch.bfloat16)
    leaves = [t.expand(b, -1, -1, -1).detach().requires_grad_() for t in (x.q, x.k, x.v)]
    one = run(stickbreaking_attention, x, mass_in_loss=False, return_mass=True)
    o = stickbreaking_attention(*leaves)
    gradients = torch.autograd.grad(o, leaves, x.do.expand(b, -1, -1, -1))
    for name, result in zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=True):
        for index in (0, b // 2, b - 1):
            assert max(relative_errors(result[index], one[name][0])) <= 2**-7, name
        assert name in ("dk", "dv") or torch.equal(result[0], result[-1]), name
    del o, gradients, leaves, result
    torch.cuda.empty_cache()


def test_a_batch_of_70000():
    """gridDim.y and gridDim.z are at most 65535, so the kernels must not use them for batch elements and heads."""
    x = make_inputs("randn", b=70000, s=5, h=1, d=64, dtype=torch.bfloat16)
    whole = run(stickbreaking_attention, x, return_mass=True)
    last = run(stickbreaking_attention, Inputs(*(t[-3:] for t in vars(x).values())), return_mass=True)
    for name in RESULTS:
        assert torch.equal(whole[name][-3:], last[name]), name
