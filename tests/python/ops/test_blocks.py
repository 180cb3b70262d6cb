"""The block contract: blocks of keys compose, forward from the newest and backward from the oldest, at any cut."""

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
few = settings(max_examples=12, deadline=None, derandomize=True)
cuts_of = st.lists(st.floats(0, 1), min_size=1, max_size=3)


@few
@given(
    regime=st.sampled_from(sorted(set(REGIMES) - {"saturated +15", "saturated +30", "alternating"})),
    s=st.integers(1, 150),
    context=st.integers(0, 150),
    cuts=cuts_of,
    attend_current=st.booleans(),
    carry=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_blocks_compose_at_any_cut(device, regime, s, context, cuts, attend_current, carry, dtype):
    """Cuts inside tiles and inside the diagonal, empty blocks, blocks of which some rows see nothing."""
    if device == "cuda" and dtype == torch.float64:
        dtype = torch.float32
    x = make_inputs(regime, s=s, s_k=s + context, h=4, h_kv=2, d=16, dtype=dtype, seed=s)
    composed, whole = (run_in_blocks(x, some_cuts, carry, attend_current=attend_current) for some_cuts in (cuts, []))
    # A block's weights are rounded before they are scaled by a carry that it did not know.
    tolerance = 2**-7 if rounds_weights(x.q) else 1e-12 if dtype == torch.float64 else 1e-5
    for name, expected in whole.items():
        error = max(relative_errors(composed[name], expected))
        assert error <= tolerance, f"{name}: {error:.3g}"


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("regime", ["mean -3.2", "mean -8", "mean -11"])
def test_many_blocks_of_far_keys(regime, carry):
    """The error against float64 does not grow with the number of blocks: 16K keys in 16 blocks."""
    x = make_inputs(regime, s=64, s_k=16384, h=1, d=16)
    composed, whole = (run_in_blocks(x, cuts, carry) for cuts in ([i / 16 for i in range(1, 16)], []))
    exact = Inputs(*(t.double() for t in vars(x).values()))
    oracle = run(reference.stickbreaking_attention, exact, return_mass=True)
    for name, expected in oracle.items():
        in_blocks, at_once = (max(relative_errors(results[name], expected)) for results in (composed, whole))
        assert in_blocks <= 1.5 * at_once + 1e-6, f"{name}: {in_blocks:.3g} in blocks, {at_once:.3g} at once"


def test_rows_of_no_segment():
    """o = 0, mass = mass_in, no restart; the backward hands their prefix on and gives no gradient."""
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


def test_a_block_of_the_future_is_invisible():
    """Keys newer than every query: nothing taken from the stick, no gradient, the prefix unchanged."""
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
    """Partial outputs are fp32; out_dtype asks for the inputs' type, and only for that."""
    x = make_inputs(s=20, h=2, d=8, dtype=torch.bfloat16)
    wide, rounded = (ops.block_forward(x.q, x.k, x.v, scale=1.0, out_dtype=d)[0] for d in (None, torch.bfloat16))
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), rounded)
    with pytest.raises(TypeError, match=mentions("out_dtype Half Float BFloat16")):
        ops.block_forward(x.q, x.k, x.v, scale=1.0, out_dtype=torch.float16)


def test_segments_of_documents():
    """One row {q_begin, q_len, k_begin, k_len, q_pos_minus_k_pos} a document."""
    cu_seqlens = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    cu_seqlens_k = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    expected = [[0, 3, 0, 5, 2], [3, 0, 5, 1, 1], [3, 7, 6, 7, 0]]
    assert ops.segments(cu_seqlens, cu_seqlens_k, 12, 13).tolist() == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 21, 0, 20, 0], "segments row 1 0, 21, 0, 20, 0"),
        ([15, 5, -1, 3, 0], "segments row 1 15, 5, -1, 3, 0"),
        ([15, 5, 18, 3, 0], "segments row 1 15, 5, 18, 3, 0"),
        ([9, 2, 0, 20, 0], "segments query row 9 two"),
    ],
)
def test_a_wrong_segment_is_refused(device, row, message):
    """Rows outside the tensors, and a query row in two segments."""
    if device == "cuda":
        pytest.skip("tables on a GPU are not read back: kernels clamp")
    x = make_inputs(s=20, h=2, d=8)
    segments = torch.tensor([[0, 10, 0, 10, 0], row], dtype=torch.int32)
    with pytest.raises(ValueError, match=mentions(message)):
        ops.block_forward(x.q, x.k, x.v, segments, scale=1.0)


def test_wrong_carries_are_refused():
    """mass_in and prefix_in of another shape or dtype, do of another shape."""
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
def test_a_backward_starts_before_all_keys(device, dtype):
    """A restart at edge 0, the mass before the first key, serves as well as one at a newer edge, row by row."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("no float64 on a GPU")
    x = make_inputs("mean -8", s=200, s_k=300, h=4, h_kv=2, d=16, dtype=dtype)
    _, mass, edge, restart = ops.block_forward(x.q, x.k, x.v, scale=0.25)
    assert bool((mass > 2**-24).all() and (edge > 0).all())
    early = torch.arange(200, device=edge.device) % 3 > 0
    mass_in = torch.full_like(mass, 0.5)
    newer, oldest = (
        ops.block_backward(x.do, x.q, x.k, x.v, None, edges, masses, mass_in, mass, scale=0.25)
        for edges, masses in ((edge, restart), (edge * ~early, torch.where(early, mass, restart)))
    )
    for name, a, b in zip(("dq", "dk", "dv", "prefix_out"), newer, oldest, strict=True):
        error = max(relative_errors(b, a))
        assert error <= (1e-12 if dtype == torch.float64 else 2e-6), f"{name}: {error:.3g}"
