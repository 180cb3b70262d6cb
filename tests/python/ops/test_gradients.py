"""Gradients in float64 agree with finite differences for every option. The loss contains the output and the mass."""

import pytest
import torch
from support.inputs import make_inputs

from megatron_sb import stickbreaking_attention, stickbreaking_attention_varlen

pytestmark = pytest.mark.usefixtures("one_thread")
DENSE = {
    "plain": ({"s": 6}, {}),
    "batch": ({"b": 2, "s": 4}, {}),
    "one position": ({"s": 1}, {}),
    "two KV heads": ({"s": 5, "h": 4, "h_kv": 2}, {}),
    "one KV head": ({"s": 5, "h": 4, "h_kv": 1}, {}),
    "fewer queries than keys": ({"s": 3, "s_k": 8}, {}),
    "d_v above d": ({"s": 5, "d_v": 16}, {}),
    "d_v below d": ({"s": 5, "d": 16, "d_v": 8}, {}),
    "scale": ({"s": 6}, {"scale": 0.9}),
    "negative scale": ({"s": 6}, {"scale": -0.4}),
    "without skipping": ({"s": 6}, {"mass_threshold": 0.0}),
    "saturated": ({"s": 6, "regime": "saturated +5"}, {"mass_threshold": 0.0}),
    "small weights": ({"s": 6, "regime": "mean -8"}, {}),
    "zeros": ({"s": 6, "regime": "zeros"}, {}),
}


def leaves(x):
    return [t.requires_grad_() for t in (x.q, x.k, x.v)]


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_dense(name, attend_current):
    sizes, options = DENSE[name]
    x = make_inputs(**{"h": 2, "d": 8, "dtype": torch.float64, **sizes})

    def attention(q, k, v):
        return stickbreaking_attention(q, k, v, attend_current=attend_current, return_mass=True, **options)

    assert torch.autograd.gradcheck(attention, leaves(x))


@pytest.mark.parametrize("result", [0, 1], ids=["output", "mass"])
def test_loss_of_one_result(result):
    x = make_inputs(s=6, h=2, h_kv=1, d=8, dtype=torch.float64)

    def attention(q, k, v):
        return stickbreaking_attention(q, k, v, return_mass=True)[result]

    assert torch.autograd.gradcheck(attention, leaves(x))


def test_several_tiles():
    """Restart records and prefixes connect the tiles. Finite differences are taken along random directions."""
    x = make_inputs("mean -3.2", s=150, s_k=210, h=2, h_kv=1, d=8, dtype=torch.float64)

    def attention(q, k, v):
        return stickbreaking_attention(q, k, v, mass_threshold=0.0, return_mass=True)

    assert torch.autograd.gradcheck(attention, leaves(x), fast_mode=True)


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("edges_k", [None, [0, 5, 7, 8, 12]], ids=["self", "longer keys"])
def test_varlen(edges_k, attend_current):
    """The documents include an empty one and one of length 1. Two rows lie after the last document."""
    edges = [0, 4, 4, 5, 8]
    x = make_inputs(s=10, s_k=14 if edges_k else 10, h=2, h_kv=1, d=8, dtype=torch.float64).packed()
    cu_seqlens = torch.tensor(edges, dtype=torch.int32)
    options = {"cu_seqlens_k": torch.tensor(edges_k, dtype=torch.int32)} if edges_k else {}

    def attention(q, k, v):
        return stickbreaking_attention_varlen(
            q, k, v, cu_seqlens, attend_current=attend_current, return_mass=True, **options
        )

    assert torch.autograd.gradcheck(attention, leaves(x))


def test_strided_inputs():
    """The inputs are transposed (s, b, h, d) tensors. k and v are views of one projection."""
    q = torch.randn(5, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(5, 2, 2, 16, dtype=torch.float64, requires_grad=True)

    def attention(q, kv):
        k, v = kv.transpose(0, 1).split(8, dim=-1)
        return stickbreaking_attention(q.transpose(0, 1), k, v, return_mass=True)

    assert torch.autograd.gradcheck(attention, (q, kv))
