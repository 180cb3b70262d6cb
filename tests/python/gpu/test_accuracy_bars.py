"""Errors of the bf16 kernels against float64 in every regime of logits. support/bars.py defines the bounds."""

import itertools

import pytest
import torch
from support import bias_columns
from support.accuracy import assert_accurate, relative_errors, run
from support.bars import BARRED, SPIKES, Bar, barred_inputs, threshold_of
from support.bounds import stick_tolerance
from support.inputs import REGIMES, Inputs, make_inputs
from support.rounded import rounded_results

from megatron_sb import reference, stickbreaking_attention

VALUE_DIMS = {72: 64, 136: 128, 192: 128}  # head_dim_v where it is not head_dim
BIASED = (72, 136)  # heads of 64 and 128, and columns of biases
SAMPLED = {65536: [(1000, 1128), (32700, 32828), (65408, 65536)]}  # at 4096 and 16384 keys, all rows are compared


def missed_bars(x: Inputs, runs: list[tuple[int, int]], regime: str, **options) -> list[str]:
    """Run the attention, and describe the results that miss their bars. The last columns of BIASED heads are biases."""
    biases = x.q.shape[-1] in BIASED
    attention = bias_columns.attention if biases else stickbreaking_attention
    x = bias_columns.with_biases(x) if biases else x
    # The attention runs first, so that recycled memory cannot hold the results.
    actual = run(attention, x, mass_threshold=threshold_of(regime), return_mass=True, **options)
    return Bar(x, runs, biases).missed(actual, regime)


@pytest.mark.parametrize(
    ("length", "head_dim"),
    [*itertools.product((4096, 16384, 65536), (64, 128)), *((4096, d) for d in (72, 136, 192, 256)), (16384, 256)],
)
@pytest.mark.parametrize("regime", BARRED)
@pytest.mark.parametrize("mass_in_loss", [True, False], ids=["mass in loss", "output alone"])
def test_bf16(regime, length, head_dim, mass_in_loss):
    """o, dq, dk, dv and the mass are within their bounds. At 4096 keys two query heads share a KV head."""
    heads, runs = {"h": 2, "h_kv": 1} if length == 4096 else {"h": 1}, SAMPLED.get(length, [(0, length)])
    x = barred_inputs(regime, length, runs, d=head_dim, d_v=VALUE_DIMS.get(head_dim, head_dim), **heads)
    if not mass_in_loss:
        x.dmass.zero_()
    missed = missed_bars(x, runs, regime, mass_in_loss=mass_in_loss)
    assert not missed, "; ".join(missed)


@pytest.mark.parametrize(
    ("length", "head_dim"), [*itertools.product((2048, 8192), (64, 128)), (2048, 72), (2048, 136), (2048, 256)]
)
@pytest.mark.parametrize("regime", ["randn", "mean -11"])
@pytest.mark.parametrize(("h", "h_kv"), [(8, 1), (16, 1), (16, 2), (7, 1), (4, 4), (2, 2)])
def test_bf16_with_few_kv_heads(h, h_kv, regime, length, head_dim):
    """Several CTAs share a key tile: each sums dk and dv over a part of the query heads and rows."""
    runs = [(0, length)] if length == 2048 else [(1000, 1128), (4000, 4200), (8000, 8192)]
    x = barred_inputs(regime, length, runs, d=head_dim, d_v=VALUE_DIMS.get(head_dim, head_dim), h=h, h_kv=h_kv)
    missed = missed_bars(x, runs, regime)
    assert not missed, "; ".join(missed)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bf16_at_a_million_keys(head_dim):
    """The last rows are within their bounds where the mass is carried over all keys, forth and back."""
    length = 2**20
    runs = [(length - 96, length)]
    x = barred_inputs("mean -11", length, runs, d=head_dim, h=1)
    missed = Bar(x, runs).missed(run(stickbreaking_attention, x, return_mass=True), "mean -11")
    assert not missed, "; ".join(missed)


@pytest.mark.parametrize("regime", ["randn", "mean -3.2", "mean -8", "mean -11", "alternating"])
@pytest.mark.parametrize(("length", "head_dim"), [(4096, 64), (16384, 128), (65536, 64)])
def test_weights_and_mass_sum_to_one(regime, length, head_dim):
    """With v = 1 and fp32 inputs, o + mass is 1 in every row."""
    x = make_inputs(regime, s=length, h=1, d=head_dim)
    x.v.fill_(1.0)
    o, mass = stickbreaking_attention(x.q, x.k, x.v, mass_threshold=0.0, return_mass=True)
    stick = o.double() + mass.double().transpose(1, 2)[..., None]
    assert (stick - 1).abs().max().item() <= stick_tolerance(length)


@pytest.mark.parametrize("regime", ["randn", "mean -8", "saturated +15"])
def test_fp32(regime):
    """fp32 inputs are not rounded to tf32: errors are at most twice those of a plain fp32 computation."""
    assert_accurate(stickbreaking_attention, make_inputs(regime, s=4096, h=1, d=128), mass_threshold=0.0)


def test_the_bar_detects_an_error_of_2e_3():
    """The bar accepts the rounded computation, and rejects it with an additional error of 2e-3."""
    assert set(BARRED) <= {*REGIMES, SPIKES}
    x, runs = make_inputs("mean -8", s=1024, h=2, h_kv=1, d=64, dtype=torch.bfloat16), [(0, 1024)]
    exact = Inputs(*(t.double() for t in vars(x).values()))
    oracle = run(reference.stickbreaking_attention, exact, return_mass=True)
    rounded, bar = rounded_results(x), Bar(x, runs)
    results = {name: rounded[name].double() for name in ("o", "dq", "dk", "dv")} | {"mass": oracle["mass"]}
    assert not bar.missed(results, "mean -8")
    for name in ("o", "dq", "dk", "dv"):
        assert 1e-3 < relative_errors(rounded[name], oracle[name])[0] < 4e-3
        noise = torch.randn_like(oracle[name]) * oracle[name].norm() / oracle[name].numel() ** 0.5
        (missed,) = bar.missed({**results, name: results[name] + 2e-3 * noise}, "mean -8")
        assert missed.startswith(name)
    (missed,) = bar.missed({**results, "mass": oracle["mass"] + 1e-3}, "mean -8")
    assert missed.startswith("mass")
