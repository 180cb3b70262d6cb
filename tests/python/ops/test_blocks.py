"""The block contract: blocks of keys give the results of one call, and invalid segments and carries raise errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.accuracy import relative_errors, run
from support.blocks import run_in_blocks
from support.inputs import REGIMES, Inputs, make_inputs
from support.messages import mentions
from support.rounded import rounds_weights

from megatron_sb import reference

pytestmark = pytest.mark.usefixtures("device")
ops = torch.ops.megatron_sb


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    regime=st.sampled_from(sorted(set(REGIMES) - {"saturated +15", "saturated +30", "alternating"})),
    s=st.integers(1, 150),
    context=st.integers(0, 150),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    attend_current=st.booleans(),
    carry=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_blocks_give_the_result_of_one_call(device, regime, s, context, cuts, attend_current, carry, dtype):
    """Cuts may lie inside tiles and on the diagonal. Blocks may be empty or hidden from some rows."""
    if device == "cuda" and dtype == torch.float64:
        dtype = torch.float32
    x = make_inputs(regime, s=s, s_k=s + context, h=4, h_kv=2, d=16, dtype=dtype, seed=s)
    in_blocks, at_once = (run_in_blocks(x, some_cuts, carry, attend_current=attend_current) for some_cuts in (cuts, []))
    # Kernels that round the weights of a block round them before the carry scales them.
    tolerance = 2**-7 if rounds_weights(x.q) else 1e-12 if dtype == torch.float64 else 1e-5
    for name, expected in at_once.items():
        error = max(relative_errors(in_blocks[name], expected))
        assert error <= tolerance, f"{name}: {error:.3g}"


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("regime", ["mean -3.2", "mean -8", "mean -11"])
def test_many_blocks_are_as_accurate_as_one(regime, carry):
    """16384 keys in 16 blocks have about the same error against float64 as in one block."""
    x = make_inputs(regime, s=64, s_k=16384, h=1, d=16)
    in_blocks, at_once = (run_in_blocks(x, cuts, carry) for cuts in ([i / 16 for i in range(1, 16)], []))
    exact = Inputs(*(t.double() for t in vars(x).values()))
    oracle = run(reference.stickbreaking_attention, exact, return_mass=True)
    for name, expected in oracle.items():
        error, bound = (max(relative_errors(results[name], expected)) for results in (in_blocks, at_once))
        assert error <= 1.5 * bound + 1e-6, f"{name}: {error:.3g} in blocks, {bound:.3g} at once"


def test_rows_in_no_segment():
    """The forward gives o = 0, mass = mass_in and edge 0. The backward keeps the prefix and gives no gradient."""
    x = make_inputs(s=20, h=2, d=8)
    segments = torch.tensor([[5, 10, 5, 10, 0]], dtype=torch.int32)
    mass_in, prefix_in = torch.rand(1, 2, 20), torch.rand(1, 2, 20)
    rows = [*range(5), *range(15, 20)]
    o, mass, edge, restart = ops.block_forward(x.q, x.k, x.v, segments, mass_in, scale=1.0)
    assert not o[:, rows].any()
    assert torch.equal(mass[..., rows], mass_in[..., rows])
    assert not edge[..., rows].any()
    dq, dk, dv, prefix = ops.block_backward(x.do, x.q, x.k, x.v, segments, edge, restart, None, prefix_in, scale=1.0)
    assert torch.equal(prefix[..., rows], prefix_in[..., rows])
    for gradient in (dq, dk, dv):
        assert not gradient[:, rows].any()
        assert gradient.isfinite().all()


@pytest.mark.parametrize(("d", "dtype"), [(8, torch.float32), (64, torch.bfloat16)], ids=str)
def test_many_segments_that_share_keys(d, dtype):
    """Three segments each read the same keys, far apart in the table. Each gives what it gives alone."""
    ranges, members, rows, keys = 40, 3, 2, 5
    x = make_inputs("mean -3.2", s=ranges * members * rows, h=2, h_kv=1, d=d, dtype=dtype)
    k, v = x.k[:, : ranges * keys], x.v[:, : ranges * keys]
    table = [
        [(member * ranges + i) * rows, rows, i * keys, keys - member, keys - rows - member]
        for member in range(members)
        for i in range(ranges)
    ]
    table[10][1] = table[11][3] = 0  # empty segments between the others

    def results(rows_of_table):
        segments = torch.tensor(rows_of_table, dtype=torch.int32)
        o, mass, edge, restart = ops.block_forward(x.q, k, v, segments, scale=d**-0.5)
        zero = torch.zeros_like(mass)
        return [o, *ops.block_backward(x.do, x.q, k, v, segments, edge, restart, None, zero, scale=d**-0.5)]

    together = results(table)
    alone = [torch.zeros_like(value, dtype=torch.float64) for value in together]
    for segment in table:
        for total, value in zip(alone, results([segment]), strict=True):
            total += value
    for name, found, expected in zip(("o", "dq", "dk", "dv", "prefix"), together, alone, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_block_of_keys_newer_than_all_queries_changes_nothing():
    x = make_inputs(s=70, h=2, d=8)
    segments = torch.tensor([[0, 70, 0, 70, -70]], dtype=torch.int32)
    o, mass, edge, restart = ops.block_forward(x.q, x.k, x.v, segments, scale=1.0, attend_current=True)
    assert not o.any()
    assert (mass == 1).all()
    prefix_in = torch.rand(1, 2, 70)
    *gradients, prefix = ops.block_backward(
        x.do, x.q, x.k, x.v, segments, edge, restart, None, prefix_in, scale=1.0, attend_current=True
    )
    assert torch.equal(prefix, prefix_in)
    assert not any(gradient.any() for gradient in gradients)


def test_out_dtype():
    """Partial outputs are fp32 by default. out_dtype may be fp32 or the dtype of the inputs."""
    x = make_inputs(s=20, h=2, d=8, dtype=torch.bfloat16)
    wide, rounded = (ops.block_forward(x.q, x.k, x.v, scale=1.0, out_dtype=d)[0] for d in (None, torch.bfloat16))
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), rounded)
    with pytest.raises(TypeError, match=mentions("out_dtype Half Float BFloat16")):
        ops.block_forward(x.q, x.k, x.v, scale=1.0, out_dtype=torch.float16)


def test_segments_of_documents():
    """A document is a row {q_begin, q_len, k_begin, k_len, q_pos_minus_k_pos}."""
    cu_seqlens = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    cu_seqlens_k = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    expected = [[0, 3, 0, 5, 2], [3, 0, 5, 1, 1], [3, 7, 6, 7, 0]]
    assert ops.segments(cu_seqlens, cu_seqlens_k, 12, 13).tolist() == expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0, 21, 0, 20, 0], "segments row 1 0, 21, 0, 20, 0"),
        ([15, 5, -1, 3, 0], "segments row 1 15, 5, -1, 3, 0"),
        ([15, 5, 18, 3, 0], "segments row 1 15, 5, 18, 3, 0"),
        ([9, 2, 0, 20, 0], "segments query row 9"),
    ],
)
def test_an_invalid_segment_raises_an_error(device, row, words):
    """Rows must lie inside the tensors, and a query row may be in one segment only."""
    if device == "cuda":
        pytest.skip("the host does not read tables on a GPU; kernels clamp them")
    x = make_inputs(s=20, h=2, d=8)
    segments = torch.tensor([[0, 10, 0, 10, 0], row], dtype=torch.int32)
    with pytest.raises(ValueError, match=mentions(words)):
        ops.block_forward(x.q, x.k, x.v, segments, scale=1.0)


def test_carries_and_do_of_another_shape_or_dtype_raise_an_error():
    x = make_inputs(s=20, h=2, d=8)
    with pytest.raises(ValueError, match=mentions("mass_in [1, 20, 2] (batch, heads, rows)")):
        ops.block_forward(x.q, x.k, x.v, None, torch.ones(1, 20, 2), scale=1.0)
    with pytest.raises(TypeError, match=mentions("mass_in Double Float")):
        ops.block_forward(x.q, x.k, x.v, None, torch.ones(1, 2, 20).double(), scale=1.0)
    _, _, edge, restart = ops.block_forward(x.q, x.k, x.v, scale=1.0)
    with pytest.raises(ValueError, match=mentions("do [1, 10, 2, 8]")):
        ops.block_backward(x.do[:, :10], x.q, x.k, x.v, None, edge, restart, scale=1.0)
    with pytest.raises(ValueError, match=mentions("prefix_in [2, 20]")):
        ops.block_backward(x.do, x.q, x.k, x.v, None, edge, restart, None, torch.ones(2, 20), scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_backward_may_restart_before_the_first_key(dtype):
    """A restart record at edge 0 holds the mass before the first key. It gives the same gradients as a newer edge."""
    x = make_inputs("mean -8", s=200, s_k=300, h=4, h_kv=2, d=16, dtype=dtype)
    _, mass, edge, restart = ops.block_forward(x.q, x.k, x.v, scale=0.25)
    assert bool((mass > 2**-24).all() and (edge > 0).all())
    moved = torch.arange(200) % 3 > 0  # the rows with another restart record
    mass_in = torch.full_like(mass, 0.5)
    expected, actual = (
        ops.block_backward(x.do, x.q, x.k, x.v, None, edges, masses, mass_in, mass, scale=0.25)
        for edges, masses in ((edge, restart), (edge * ~moved, torch.where(moved, mass, restart)))
    )
    for name, a, b in zip(("dq", "dk", "dv", "prefix_out"), actual, expected, strict=True):
        error = max(relative_errors(a, b))
        assert error <= (1e-12 if dtype == torch.float64 else 2e-6), f"{name}: {error:.3g}"
