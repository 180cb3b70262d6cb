"""Properties that hold for all inputs: weights and mass sum to 1, and skipping stays within its error bound."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.accuracy import run
from support.bounds import stick_tolerance
from support.inputs import REGIMES, make_inputs

from megatron_sb import stickbreaking_attention

pytestmark = pytest.mark.usefixtures("device")
few = settings(max_examples=12, deadline=None, derandomize=True)
regimes, seeds = st.sampled_from(sorted(REGIMES)), st.integers(0, 2**16)
ULP = torch.finfo(torch.float32).eps


@few
@given(
    regime=regimes,
    s=st.integers(1, 256),
    head_dim=st.sampled_from([8, 16, 64]),
    attend_current=st.booleans(),
    mass_threshold=st.sampled_from([0.0, 2**-24]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=seeds,
)
def test_weights_and_mass_sum_to_one(regime, s, head_dim, attend_current, mass_threshold, dtype, seed):
    """If v is the identity, the output is A. All weights are in [0, 1], and weights and mass sum to 1."""
    x = make_inputs(regime, s=s, h=2, d=head_dim, dtype=dtype, seed=seed)
    q, k = x.q.float(), x.k.float()  # so that the weights are not rounded to bf16
    v = torch.eye(s, 256)[None, :, None].expand(1, s, 2, 256)
    options = {"attend_current": attend_current, "mass_threshold": mass_threshold}
    weights, mass = stickbreaking_attention(q, k, v, return_mass=True, **options)
    assert (weights >= 0).all()
    assert (weights <= 1 + ULP).all()
    assert (mass >= 0).all()
    assert not weights[0, :, 0, :s].triu(1 if attend_current else 0).any()
    stick = weights.double().sum(-1).transpose(1, 2) + mass
    # A mass below the threshold may still contain the weights of skipped keys.
    assert (stick - 1).abs().max() <= stick_tolerance(s) + mass_threshold


@pytest.mark.parametrize("regime", ["mean -3.2", "mean -8", "mean -11", "alternating"])
def test_weights_and_mass_of_16384_keys_sum_to_one(regime):
    """Each channel of the output is the sum of the weights of 64 neighbouring keys."""
    num_keys = 16384
    x = make_inputs(regime, s=64, s_k=num_keys, h=1, d=16)
    v = torch.eye(256).repeat_interleave(num_keys // 256, dim=0)[None, :, None]
    weights, mass = stickbreaking_attention(x.q, x.k, v, mass_threshold=0.0, return_mass=True)
    stick = weights.double().sum(-1).transpose(1, 2) + mass
    assert (stick - 1).abs().max() <= stick_tolerance(num_keys)


@few
@given(
    regime=regimes,
    s=st.integers(1, 200),
    context=st.integers(0, 200),
    exponent=st.integers(-24, -1),
    seed=seeds,
)
def test_skipping_stays_within_its_error_bound(regime, s, context, exponent, seed):
    """Outputs change by at most mass_threshold * max|v|. A mass that changes stays below the threshold."""
    threshold = 2.0**exponent
    x = make_inputs(regime, s=s, s_k=s + context, h=2, d=16, seed=seed)
    o, mass = stickbreaking_attention(x.q, x.k, x.v, mass_threshold=threshold, return_mass=True)
    exact, exact_mass = stickbreaking_attention(x.q, x.k, x.v, mass_threshold=0.0, return_mass=True)
    largest = x.v.abs().max()
    assert (o - exact).abs().max() <= threshold * largest + 8 * ULP * largest
    changed = mass != exact_mass
    assert ((exact_mass <= mass) & (mass < threshold))[changed].all()


@few
@given(s=st.integers(1, 150), context=st.integers(1, 200), attend_current=st.booleans(), seed=seeds)
def test_older_keys_do_not_change_used_up_rows(s, context, attend_current, seed):
    """A row with a mass below the threshold has the same output with older keys, and these get no gradient from it."""
    x = make_inputs("saturated +5", s=s, s_k=s + context, h=2, d=16, seed=seed)
    k, v = x.k[:, context:], x.v[:, context:]
    options = {"attend_current": attend_current, "return_mass": True}
    o, mass = stickbreaking_attention(x.q, k, v, **options)
    o_context, _ = stickbreaking_attention(x.q, x.k, x.v, **options)
    change = (o_context - o).abs().amax(-1).transpose(1, 2)
    largest = x.v.abs().max()
    used_up = mass < 2**-24
    assert (change[used_up] <= (2**-24 + 8 * ULP) * largest).all()

    x.do[~used_up.transpose(1, 2)] = 0.0
    gradients = run(stickbreaking_attention, x, mass_in_loss=False, **options)
    assert gradients["dv"][:, :context].abs().max() <= 2**-24 * x.do.abs().sum()


def test_tiles_older_than_the_used_up_rows_are_not_read():
    """NaN in all but the newest 1024 of 131072 keys does not change the results."""
    x = make_inputs("saturated +5", s=64, s_k=131072, h=1, d=8)
    o, mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    x.k[:, :-1024], x.v[:, :-1024] = math.nan, math.nan
    again, mass_again = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    assert torch.equal(o, again)
    assert torch.equal(mass, mass_again)


@few
@given(s=st.integers(1, 130), context=st.integers(0, 70), split=st.integers(0, 130), seed=seeds)
def test_the_last_queries_alone_give_the_same_results(s, context, split, seed):
    split = min(split, s)
    x = make_inputs("mean -3.2", s=s, s_k=s + context, h=2, d=8, seed=seed)
    o, mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    last_o, last_mass = stickbreaking_attention(x.q[:, split:], x.k, x.v, return_mass=True)
    torch.testing.assert_close(last_o, o[:, split:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last_mass, mass[..., split:], rtol=1e-5, atol=2**-24)
