"""Infinite logits act like very large ones, and a NaN reaches only the rows and tiles that read it."""

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
BEFORE, AFTER = slice(0, BAD_ROW - WIDEST_TILE), slice(BAD_ROW + WIDEST_TILE, None)  # rows in other tiles
# On a GPU, these inputs select the portable kernels (fp32) and the Hopper kernels (bf16, head_dim 64 and 128).
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
    """Compare up to rounding errors of the inputs' dtype."""
    exact = sizes["dtype"] == torch.float32
    limits = {"rtol": 1e-5, "atol": atol} if exact else {"rtol": 2**-6, "atol": 2**-6 * expected.abs().max().item()}
    torch.testing.assert_close(actual.to(expected.dtype), expected, **limits)


def inputs_pair(name, value, sizes):
    """Return finite inputs, and a copy with `value` in batch element 1, row BAD_ROW, head 1 of the named tensor."""
    clean, bad = (make_inputs("mean -8", b=2, s=LENGTH, h=2, **sizes) for _ in range(2))
    getattr(bad, name)[1, BAD_ROW, 1] = value
    return clean, bad


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_logits_of_a_row(value, sizes):
    """A row with logits +inf and -inf gives the results of the oracle, up to the clamp of the logits."""
    x = make_inputs(s=100, h=1, **sizes)
    x.q[0, 40, 0, 3] = value
    o, mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    expected, expected_mass = reference.stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    assert_close(o, expected, sizes, atol=1e-5)
    assert_close(mass, expected_mass, sizes)


@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_logits_of_a_key(sign, sizes):
    """A key with logit +inf takes all mass that is left in every newer row. A key with logit -inf takes nothing."""
    x = make_inputs(s=100, h=1, **sizes)
    x.q[..., 0], x.k[0, 40, 0] = 1.0, 0.0
    x.k[0, 40, 0, 0] = sign * math.inf
    x.q[..., 1:] = x.q[..., 1:].abs()
    o, mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    expected, expected_mass = reference.stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    assert_close(o, expected, sizes, atol=1e-5)
    assert_close(mass, expected_mass, sizes)


def assert_same(actual, expected, index):
    assert expected[index].numel() > 0
    assert torch.equal(actual[index], expected[index])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_reaches_no_other_head_or_batch_element(name, sizes):
    """The results of other heads and batch elements are bitwise those without the NaN."""
    clean, bad = (run(stickbreaking_attention, x, return_mass=True) for x in inputs_pair(name, math.nan, sizes))
    for result in ("o", "mass", "dq", "dk", "dv"):
        assert_same(bad[result], clean[result], 0)  # batch element 0
        assert_same(bad[result][1], clean[result][1], 0 if result == "mass" else (slice(None), 0))  # head 0


def test_nan_in_a_query_row(sizes):
    """Only the output row of the query is NaN, and rows in other tiles are bitwise those without the NaN.

    Keys newer than the query keep their gradients, and keys in older tiles have finite gradients.
    """
    clean, bad = (run(stickbreaking_attention, x, return_mass=True) for x in inputs_pair("q", math.nan, sizes))
    assert bad["o"][1, BAD_ROW, 1].isnan().all()
    assert bad["mass"][1, 1, BAD_ROW].isnan()
    rest = [row for row in range(LENGTH) if row != BAD_ROW]
    assert_close(bad["o"][1, rest, 1], clean["o"][1, rest, 1], sizes)
    assert_close(bad["mass"][1, 1, rest], clean["mass"][1, 1, rest], sizes)
    for rows in (BEFORE, AFTER):
        for result in ("o", "dq"):
            assert_same(bad[result], clean[result], (1, rows, 1))
        assert_same(bad["mass"], clean["mass"], (1, 1, rows))
    for result in ("dk", "dv"):
        assert_same(bad[result], clean[result], (1, AFTER, 1))
        assert bad[result][1, BEFORE, 1].isfinite().all()


@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_in_a_key_row(name, sizes):
    """All rows that see the key are NaN. Rows before its tile are unchanged, and keys in other tiles have no NaN."""
    clean, bad = (run(stickbreaking_attention, x, return_mass=True) for x in inputs_pair(name, math.nan, sizes))
    assert bad["o"][1, BAD_ROW + 1 :, 1].isnan().all()
    assert_same(bad["o"], clean["o"], (1, BEFORE, 1))
    assert_same(bad["mass"], clean["mass"], (1, 1, BEFORE))
    assert_same(bad["dq"], clean["dq"], (1, BEFORE, 1))
    for rows in (BEFORE, AFTER):
        for result in ("dk", "dv"):
            assert bad[result][1, rows, 1].isfinite().all()


def test_nan_in_an_output_gradient(sizes):
    """The NaN reaches only dq of its row, and dk and dv of keys that the row sees."""
    clean, bad = (run(stickbreaking_attention, x, return_mass=True) for x in inputs_pair("do", math.nan, sizes))
    assert bad["dq"][1, BAD_ROW, 1].isnan().all()
    assert_same(bad["dq"], clean["dq"], (1, BEFORE, 1))
    assert_same(bad["dq"], clean["dq"], (1, AFTER, 1))
    for result in ("dk", "dv"):
        assert_same(bad[result], clean[result], (1, AFTER, 1))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_stays_in_its_document(name, device, sizes):
    """Other documents have bitwise the results without the NaN. On a GPU this holds for documents in other tiles."""
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
            assert_same(bad[result], clean[result], document)
        assert_same(bad["mass"], clean["mass"], (slice(None), document))


def test_nan_in_keys_that_used_up_rows_skip(sizes):
    """Rows that are used up do not read whole tiles of older keys, so a NaN there changes nothing."""
    x = make_inputs("saturated +5", s=64, s_k=512, h=2, **sizes)
    clean = run(stickbreaking_attention, x, return_mass=True)
    x.k[:, :128], x.v[:, :128] = math.nan, math.nan
    bad = run(stickbreaking_attention, x, return_mass=True)
    for result in ("o", "mass", "dq", "dk", "dv"):
        assert_same(bad[result], clean[result], slice(None))
    assert not bad["dk"][:, :128].any()


HALF = 64  # the grid of restart records: a row that is NaN starts in the half tile of its newest key


def test_nan_in_queries_that_start_in_the_newer_half_of_a_tile(sizes):
    """Keys of that half have NaN gradients, keys of older halves finite ones, and the bits are the same in each run.

    The older half of the tile must not read the NaN. The newer half must, at whatever time each half runs.
    """
    x = make_inputs("mean -8", b=2, s=LENGTH, h=4, **sizes)
    bad_rows = (torch.arange(LENGTH) % WIDEST_TILE > HALF).to(x.q.device)
    x.q[:, bad_rows, :, 3] = math.nan
    runs = [run(stickbreaking_attention, x, mass_in_loss=False, return_mass=True) for _ in range(50)]
    first = runs[0]
    assert first["dq"][:, bad_rows].isnan().all()
    in_newer_half = bad_rows.roll(-1)
    in_newer_half[WIDEST_TILE - 1 :: WIDEST_TILE] = False
    older_half = (torch.arange(LENGTH) % WIDEST_TILE < HALF).to(x.q.device)
    for name in ("dk", "dv"):
        assert first[name][:, in_newer_half].isnan().all()
        assert first[name][:, older_half].isfinite().all()
    for other in runs[1:]:
        for name in ("dq", "dk", "dv"):
            torch.testing.assert_close(other[name], first[name], rtol=0, atol=0, equal_nan=True)


def test_nan_in_keys_of_the_half_tile_before_the_start_of_all_rows(sizes):
    """Rows that start in the newer half give its keys the same gradients, whatever the older half contains."""
    x = make_inputs("saturated +5", s=HALF // 2, s_k=4 * WIDEST_TILE, h=2, **sizes)
    clean = run(stickbreaking_attention, x, mass_in_loss=False, return_mass=True)
    x.k[:, -2 * HALF : -HALF] = math.nan
    bad = run(stickbreaking_attention, x, mass_in_loss=False, return_mass=True)
    for result in ("dk", "dv"):
        assert_same(bad[result], clean[result], (slice(None), slice(-HALF, None)))
    assert clean["dk"][:, -HALF:].any()
