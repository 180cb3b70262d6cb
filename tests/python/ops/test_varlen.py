"""Attention of packed documents: accuracy against the float64 oracle, and independence of the documents."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.accuracy import assert_errors, floors, plain_attention, run
from support.bounds import error_bounds_packed, excesses
from support.inputs import Inputs, make_inputs
from support.rounded import rounds_weights

from megatron_sb import reference, stickbreaking_attention, stickbreaking_attention_varlen

pytestmark = pytest.mark.usefixtures("device")

LENGTHS = [0, 1, 2, 3, 63, 64, 65, 127, 129, 1000]


def edges(lengths):
    """Return cu_seqlens of documents with these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def plain_attention_varlen(q, k, v, cu_seqlens, *, cu_seqlens_k=None, attend_current=False):
    """Compute `plain_attention` of each document. Rows after the last document get output 0 and mass 1."""
    q_edges, k_edges = cu_seqlens.tolist(), (cu_seqlens if cu_seqlens_k is None else cu_seqlens_k).tolist()
    o, mass = torch.zeros(*q.shape[:2], v.shape[-1], dtype=v.dtype), torch.ones(q.shape[1], q.shape[0])
    for (a, b), (c, d) in zip(pairwise(q_edges), pairwise(k_edges), strict=True):
        o_document, mass_document = plain_attention(
            q[None, a:b], k[None, c:d], v[None, c:d], attend_current=attend_current
        )
        o = torch.cat([o[:a], o_document[0], o[b:]])
        mass = torch.cat([mass[:, :a], mass_document[0], mass[:, b:]], dim=1)
    return o, mass


def assert_accurate(x, cu_seqlens, *, attend_current=False, **keys):
    """Assert that all results are accurate, relative to `plain_attention_varlen`.

    Kernels that round their weights are compared with the bounds of support/bounds.py instead. The operator runs first,
    so that recycled memory of the oracle cannot hold its results.
    """
    options = {"attend_current": attend_current, **keys}
    actual = run(stickbreaking_attention_varlen, x, cu_seqlens, return_mass=True, mass_threshold=0.0, **options)
    exact = Inputs(*(t.double() for t in vars(x).values()))
    oracle = run(reference.stickbreaking_attention_varlen, exact, cu_seqlens, return_mass=True, **options)
    if rounds_weights(x.q):
        tables = (cu_seqlens.tolist(), keys.get("cu_seqlens_k", cu_seqlens).tolist())
        bounds = error_bounds_packed(
            x, *tables, attend_current=attend_current, scale=x.q.shape[-1] ** -0.5, mass_threshold=0.0
        )
        found = excesses(actual, oracle, bounds, dtype=x.q.dtype, num_keys=x.k.shape[0], threshold=0.0)
        assert all(excess <= 1 for excess in found.values()), found
        return
    plain = run(plain_attention_varlen, x, cu_seqlens, **options)
    assert_errors(actual, plain, oracle, floors(x.q.dtype, x.k.shape[0]))


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_documents_of_all_lengths(dtype, attend_current):
    """Documents may be empty, of length 1, or end next to the edge of a tile."""
    x = make_inputs("mean -3.2", s=sum(LENGTHS), h=4, h_kv=2, d=16, dtype=dtype).packed()
    assert_accurate(x, edges(LENGTHS), attend_current=attend_current)


def test_documents_with_longer_keys():
    """The queries of a document are the last positions of its keys. A document may have keys and no query."""
    lengths, lengths_k = [0, 1, 0, 5, 64, 30], [0, 70, 3, 5, 129, 200]
    x = make_inputs("mean -3.2", s=sum(lengths), s_k=sum(lengths_k), h=4, h_kv=1, d=16, d_v=24).packed()
    assert_accurate(x, edges(lengths), cu_seqlens_k=edges(lengths_k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("logits", ["dot", "euclidean"])
def test_rows_after_the_last_document(logits, dtype):
    """These rows have output 0, mass 1 and gradient 0, even if the inputs are NaN there."""
    x = make_inputs(s=90, h=2, d=16, dtype=dtype).packed()
    for tensor in (x.q, x.k, x.v, x.do):
        tensor[70:] = torch.nan
    x.dmass[:, 70:] = torch.nan
    results = run(stickbreaking_attention_varlen, x, edges([30, 40]), return_mass=True, logits=logits)
    assert (results["mass"][:, 70:] == 1).all()
    for name in ("o", "dq", "dk", "dv"):
        assert not results[name][70:].any()
        assert results[name][:70].isfinite().all()


def test_no_document():
    """If cu_seqlens holds a single 0, all rows lie after the last document."""
    x = make_inputs(s=5, h=2, d=8).packed()
    results = run(stickbreaking_attention_varlen, x, edges([]), return_mass=True)
    assert (results["mass"] == 1).all()
    assert not any(results[name].any() for name in ("o", "dq", "dk", "dv"))


def test_one_document_gives_bitwise_the_results_of_the_dense_operator():
    x = make_inputs("mean -3.2", s=200, h=4, h_kv=2, d=16)
    dense = run(stickbreaking_attention, x, return_mass=True)
    packed = run(stickbreaking_attention_varlen, x.packed(), edges([200]), 200, return_mass=True)
    for name, expected in dense.items():
        assert torch.equal(packed[name], expected[0])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=8),
    rows_after=st.integers(0, 3),
    attend_current=st.booleans(),
)
def test_random_documents(lengths, rows_after, attend_current):
    x = make_inputs("mean -3.2", s=sum(lengths) + rows_after, h=2, h_kv=1, d=8, seed=len(lengths)).packed()
    assert_accurate(x, edges(lengths), attend_current=attend_current)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data(), lengths=st.lists(st.integers(0, 150), min_size=2, max_size=6))
def test_permuting_documents_permutes_results(device, data, lengths):
    """The results of a document do not depend on the other documents, up to the order of sums.

    The CPU may only change the order of sums over queries. A GPU may also cut a document into other tiles.
    """
    order = data.draw(st.permutations(range(len(lengths))))
    x = make_inputs("mean -3.2", s=sum(lengths), h=2, h_kv=1, d=8, seed=len(lengths)).packed()
    rows = torch.cat([torch.arange(sum(lengths[:i]), sum(lengths[: i + 1])) for i in order])
    permuted = Inputs(x.q[rows], x.k[rows], x.v[rows], x.do[rows], x.dmass[:, rows])

    first = run(stickbreaking_attention_varlen, x, edges(lengths), return_mass=True)
    second = run(stickbreaking_attention_varlen, permuted, edges([lengths[i] for i in order]), return_mass=True)
    first["mass"] = first["mass"][:, rows]
    for name in ("o", "dq", "dk", "dv"):
        first[name] = first[name][rows]
    for name, expected in first.items():
        if device == "cpu" and name in ("mass", "o", "dq"):
            assert torch.equal(second[name], expected), name
        else:
            torch.testing.assert_close(second[name], expected, rtol=1e-5, atol=1e-5)
