"""The oracle equals the definition, written as a loop over keys, and values that are computed by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.inputs import make_inputs
from support.messages import mentions

from megatron_sb import reference


def loop(q, k, v, scale, attend_current):
    """Return o and mass of one head, key by key from newest to oldest. q: (s, d), k: (s_k, d), v: (s_k, d_v)."""
    offset = len(k) - len(q)
    o, mass = torch.zeros(len(q), v.shape[1], dtype=torch.float64), torch.ones(len(q), dtype=torch.float64)
    for j in range(len(q)):
        for i in reversed(range(offset + j + (1 if attend_current else 0))):
            beta = 1 / (1 + math.exp(-scale * float(q[j] @ k[i])))
            o[j] += mass[j] * beta * v[i]
            mass[j] *= 1 - beta
    return o, mass


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize(("s", "s_k"), [(1, 1), (7, 7), (3, 9)])
def test_computes_the_definition(s, s_k, attend_current):
    """All heads of a batch with grouped heads are right, with a scale that is not the default."""
    x = make_inputs(b=2, s=s, s_k=s_k, h=4, h_kv=2, d=8, d_v=3, dtype=torch.float64)
    options = {"scale": 0.7, "attend_current": attend_current}
    o, mass = reference.stickbreaking_attention(x.q, x.k, x.v, return_mass=True, **options)
    for b in range(2):
        for h in range(4):
            expected = loop(x.q[b, :, h], x.k[b, :, h // 2], x.v[b, :, h // 2], **options)
            torch.testing.assert_close((o[b, :, h], mass[b, h]), expected, rtol=1e-13, atol=1e-15)


def test_values_by_hand():
    """With logits of 0 each key takes half of the stick. The first query sees no key, so its output is 0."""
    q, k = torch.zeros(1, 4, 1, 8), torch.randn(1, 4, 1, 8)
    v = torch.eye(4)[None, :, None]
    o, mass = reference.stickbreaking_attention(q, k, v, return_mass=True)
    halves = [[0, 0, 0, 0], [1 / 2, 0, 0, 0], [1 / 4, 1 / 2, 0, 0], [1 / 8, 1 / 4, 1 / 2, 0]]
    assert o[0, :, 0].numpy() == pytest.approx(np.array(halves), rel=1e-15)
    assert mass[0, 0].tolist() == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8], rel=1e-15)
    assert o.dtype == mass.dtype == torch.float64


def test_infinite_logits():
    """A key with logit +inf takes all mass that is left. A key with logit -inf takes nothing."""
    q, k = torch.ones(1, 4, 1, 1), torch.tensor([0.0, math.inf, -math.inf, 0.0])[None, :, None, None]
    o, mass = reference.stickbreaking_attention(
        q, k, torch.eye(4)[None, :, None], attend_current=True, return_mass=True
    )
    assert o[0, 3, 0].tolist() == [0, 0.5, 0, 0.5]
    assert mass[0, 0].tolist() == [0.5, 0, 0, 0]


def test_small_blocks_of_rows_give_the_same_results(monkeypatch):
    x = make_inputs(b=2, s=21, s_k=30, h=2, d=8, dtype=torch.float64)

    def results():
        leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        o, mass = reference.stickbreaking_attention(*leaves, return_mass=True)
        return o, mass, *torch.autograd.grad((o, mass), leaves, (x.do, x.dmass))

    whole = results()
    monkeypatch.setattr(reference, "_MAX_WEIGHTS_PER_BLOCK", 2 * 2 * 30 * 4)
    torch.testing.assert_close(results(), whole, rtol=1e-13, atol=1e-14)


def test_gradients_agree_with_finite_differences():
    """The loss contains the output and the mass."""
    x = make_inputs(b=1, s=4, s_k=6, h=2, h_kv=1, d=3, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    assert torch.autograd.gradcheck(lambda *t: reference.stickbreaking_attention(*t, return_mass=True), leaves)


def test_varlen_gives_the_results_of_each_document_alone():
    """Rows after the last document have output 0 and mass 1."""
    x = make_inputs(s=12, s_k=16, h=2, d=8, dtype=torch.float64).packed()
    edges, edges_k = torch.tensor([0, 4, 4, 5, 10]), torch.tensor([0, 6, 6, 7, 14])
    o, mass = reference.stickbreaking_attention_varlen(x.q, x.k, x.v, edges, cu_seqlens_k=edges_k, return_mass=True)
    for (begin, end), (k_begin, k_end) in zip(pairwise(edges), pairwise(edges_k), strict=True):
        alone = (x.q[None, begin:end], x.k[None, k_begin:k_end], x.v[None, k_begin:k_end])
        o_alone, mass_alone = reference.stickbreaking_attention(*alone, return_mass=True)
        assert torch.equal(o[begin:end], o_alone[0])
        assert torch.equal(mass[:, begin:end], mass_alone[0])
    assert not o[10:].any()
    assert (mass[:, 10:] == 1).all()


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ({"s": 4, "s_k": 3}, {}, "q 4 k 3"),
        ({"h": 3, "h_kv": 2}, {}, "q 3 2"),
        ({}, {"logits": "euclidian"}, "logits 'euclidian' 'dot' 'euclidean'"),
    ],
    ids=["more queries than keys", "heads of q are no multiple", "logits"],
)
def test_an_invalid_argument_raises_an_error(sizes, options, words):
    x = make_inputs(**sizes)
    with pytest.raises(ValueError, match=mentions(words)):
        reference.stickbreaking_attention(x.q, x.k, x.v, **options)


@pytest.mark.parametrize("edges", [[2, 6], [0, 5, 3, 6], [0, 7], []], ids=str)
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_k"])
def test_invalid_offsets_raise_an_error(name, edges):
    x = make_inputs(s=6).packed()
    offsets = {"cu_seqlens": torch.tensor([0, 6]), "cu_seqlens_k": torch.tensor([0, 6])}
    offsets[name] = torch.tensor(edges, dtype=torch.int64)
    with pytest.raises(ValueError, match=mentions(f"{name} {edges} 0 6")):
        reference.stickbreaking_attention_varlen(x.q, x.k, x.v, **offsets)


def test_offsets_of_another_number_of_documents_raise_an_error():
    x = make_inputs(s=6).packed()
    with pytest.raises(ValueError, match=mentions("cu_seqlens_k cu_seqlens 2 3")):
        reference.stickbreaking_attention_varlen(
            x.q, x.k, x.v, torch.tensor([0, 6]), cu_seqlens_k=torch.tensor([0, 2, 6])
        )
