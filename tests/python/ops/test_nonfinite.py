"""Infinities act as the largest logits do; a NaN stays in the rows and the tiles that it touches."""

import math

import pytest
import torch
from support.accuracy import run
from support.inputs import make_inputs
from support.memory import quiet

from megatron_sb import reference, stickbreaking_attention, stickbreaking_attention_varlen

pytestmark = pytest.mark.usefixtures("device")

WIDEST_TILE = 128  # of any kernel; the CPU's is 64
LENGTH = 5 * WIDEST_TILE
BAD_ROW = 2 * WIDEST_TILE + 37
BEFORE, AFTER = slice(0, BAD_ROW - WIDEST_TILE), slice(BAD_ROW + WIDEST_TILE, None)


# What the kernels are written for: on a GPU one set for fp32 and odd sizes, one for what Hopper is fast at.
KERNELS = [
    ("cpu", torch.float32, 16),
    ("cuda", torch.float32, 16),
    ("cuda", torch.bfloat16, 64),
    ("cuda", torch.bfloat16, 128),
]


def parameter(device, dtype, head_dim):
    marks = [pytest.mark.gpu, quiet] if device == "cuda" else []
    return pytest.param((device, dtype, head_dim), marks=marks, id=f"{device}-{str(dtype)[6:]}-{head_dim}")


@pytest.fixture(scope="module", params=[parameter(*kernel) for kernel in KERNELS])
def kernel(request):
    return request.param


@pytest.fixture(scope="module")
def device(kernel):
    return kernel[0]


@pytest.fixture(scope="module")
def sizes(kernel):
    """The dtype and head_dim of the inputs."""
    return {"dtype": kernel[1], "d": kernel[2]}


def assert_close(actual, expected, sizes, atol=1e-6):
    """To rounding in the inputs' dtype."""
    exact = sizes["dtype"] == torch.float32
    limits = {"rtol": 1e-5, "atol": atol} if exact else {"rtol": 2**-6, "atol": 2**-6 * expected.abs().max().item()}
    torch.testing.assert_close(actual.to(expected.dtype), expected, **limits)


def inputs_pair(name, value, sizes):
    """Clean inputs, and a copy with the value in batch element 1, row BAD_ROW, head 1 of the named tensor."""
    clean, bad = (make_inputs("mean -8", b=2, s=LENGTH, h=2, **sizes) for _ in range(2))
    getattr(bad, name)[1, BAD_ROW, 1] = value
    return clean, bad


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_logits_of_a_row(value, sizes):
    """A whole row of +inf and -inf logits: as the oracle, to the rounding of the clamp."""
    x = make_inputs(s=100, h=1, **sizes)
    x.q[0, 40, 0, 3] = value
    o, mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    expected, expected_mass = reference.stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    assert_close(o, expected, sizes, atol=1e-5)
    assert_close(mass, expected_mass, sizes)


@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_logits_of_a_key(sign, sizes):
    """A key that takes the whole stick of every newer row, or nothing of any."""
    x = make_inputs(s=100, h=1, **sizes)
    x.q[..., 0], x.k[0, 40, 0] = 1.0, 0.0
    x.k[0, 40, 0, 0] = sign * math.inf
    x.q[..., 1:] = x.q[..., 1:].abs()
    o, mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    expected, expected_mass = reference.stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    assert_close(o, expected, sizes, atol=1e-5)
    assert_close(mass, expected_mass, sizes)


def same(actual, expected, index):
    assert expected[index].numel()
    assert torch.equal(actual[index], expected[index])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_reaches_no_other_head_or_batch_element(name, sizes):
    """Everything else is bitwise what it is without the NaN, forward and backward."""
    clean, bad = (run(stickbreaking_attention, x, return_mass=True) for x in inputs_pair(name, math.nan, sizes))
    for result, row_dim in (("o", 0), ("mass", None), ("dq", 0), ("dk", 0), ("dv", 0)):
        same(bad[result], clean[result], 0)
        same(bad[result][1], clean[result][1], 0 if row_dim is None else (slice(None), 0))


def test_nan_in_a_query_row(sizes):
    """Only its own output row; its tile is right, the rest bitwise; keys that it does not see keep their gradients."""
    clean, bad = (run(stickbreaking_attention, x, return_mass=True) for x in inputs_pair("q", math.nan, sizes))
    assert bad["o"][1, BAD_ROW, 1].isnan().all()
    assert bad["mass"][1, 1, BAD_ROW].isnan()
    rest = [row for row in range(LENGTH) if row != BAD_ROW]
    assert_close(bad["o"][1, rest, 1], clean["o"][1, rest, 1], sizes)
    assert_close(bad["mass"][1, 1, rest], clean["mass"][1, 1, rest], sizes)
    for rows in (BEFORE, AFTER):
        for result in ("o", "dq"):
            same(bad[result], clean[result], (1, rows, 1))
        same(bad["mass"], clean["mass"], (1, 1, rows))
    for result in ("dk", "dv"):
        same(bad[result], clean[result], (1, AFTER, 1))
        assert bad[result][1, BEFORE, 1].isfinite().all()


@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_in_a_key_row(name, sizes):
    """Rows that see the key are NaN, rows older than its tile not touched; no key outside its tile gets a NaN."""
    clean, bad = (run(stickbreaking_attention, x, return_mass=True) for x in inputs_pair(name, math.nan, sizes))
    assert bad["o"][1, BAD_ROW + 1 :, 1].isnan().all()
    same(bad["o"], clean["o"], (1, BEFORE, 1))
    same(bad["mass"], clean["mass"], (1, 1, BEFORE))
    same(bad["dq"], clean["dq"], (1, BEFORE, 1))
    for rows in (BEFORE, AFTER):
        for result in ("dk", "dv"):
            assert bad[result][1, rows, 1].isfinite().all()


def test_nan_in_an_output_gradient(sizes):
    """Only the gradients of its own row and of keys that it sees."""
    clean, bad = (run(stickbreaking_attention, x, return_mass=True) for x in inputs_pair("do", math.nan, sizes))
    assert bad["dq"][1, BAD_ROW, 1].isnan().all()
    same(bad["dq"], clean["dq"], (1, BEFORE, 1))
    same(bad["dq"], clean["dq"], (1, AFTER, 1))
    for result in ("dk", "dv"):
        same(bad[result], clean[result], (1, AFTER, 1))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_stays_in_its_document(name, device, sizes):
    """Other packed documents are bitwise what they are without it; on a GPU those that lie on other tiles."""
    cu_seqlens = torch.tensor([0, 70, 200, 300], dtype=torch.int32)
    results = []
    for value in (0.5, math.nan):
        x = make_inputs("mean -8", s=300, h=2, **sizes).packed()
        getattr(x, name)[100, 0] = value
        results.append(run(stickbreaking_attention_varlen, x, cu_seqlens, return_mass=True))
    clean, bad = results
    assert bad["o"][70:200].isnan().any()
    for document in (slice(0, 70), slice(200, 300))[device == "cuda" :]:
        for result in ("o", "dq", "dk", "dv"):
            same(bad[result], clean[result], document)
        same(bad["mass"], clean["mass"], (slice(None), document))


def test_used_up_stick_is_not_touched_by_older_nans(sizes):
    """Rows whose stick is used up skip whole tiles of older keys, whatever they hold."""
    x = make_inputs("saturated +5", s=64, s_k=512, h=2, **sizes)
    clean = run(stickbreaking_attention, x, return_mass=True)
    x.k[:, :128], x.v[:, :128] = math.nan, math.nan
    bad = run(stickbreaking_attention, x, return_mass=True)
    for result in ("o", "mass", "dq", "dk", "dv"):
        same(bad[result], clean[result], slice(None))
    assert not bad["dk"][:, :128].any()
