"""The error of bf16 kernels against float64, beside that of an exact computation rounded where a kernel has to round.

The bar: relative Frobenius error at most 1.2 times the rounded computation's (support/rounded.py defines it), and what
fp32 sums explain (support/accuracy.py: floors). At 4K and 16K keys every row is compared. At 64K dO and dmass are
nonzero in three runs of rows only: o and dq are compared there, dk and dv are then sums over these rows alone.
"""

import pytest
import torch
from support.accuracy import assert_accurate, floors, relative_errors, run
from support.bounds import stick_tolerance
from support.inputs import REGIMES, Inputs, make_inputs
from support.rounded import rounded_results

from megatron_sb import reference, stickbreaking_attention

BAR = 1.2
BARRED = ["randn", "mean -3.2", "mean -6", "mean -8", "mean -11", "saturated +5", "saturated +15", "saturated +30"]
SPIKES, FIRST_SPIKE, SPIKE_DISTANCE = "spikes", 3000, 10000  # of keys whose logits are +11 among those of -11
SAMPLED = {65536: [(1000, 1128), (32700, 32828), (65408, 65536)]}
DEFAULT_THRESHOLD = 2.0**-24
# One key of logit 30 leaves 1e-13 of the stick, and dz is as small. Nothing is skipped there, because what skipping may
# drop, 6e-8, is more than all of dq and dk.
UNSKIPPED = ("saturated +30",)


def make(regime: str, length: int, **sizes) -> tuple[Inputs, list[tuple[int, int]]]:
    """Inputs and the runs of rows to compare; gradients of the results are 0 in all other rows."""
    x = make_inputs("mean -11" if regime == SPIKES else regime, s=length, **sizes)
    if regime == SPIKES:
        x.k[:, FIRST_SPIKE::SPIKE_DISTANCE, :, 0] *= -1
    runs = SAMPLED.get(length, [(0, length)])
    compared = torch.zeros(length, dtype=torch.bool)
    for begin, end in runs:
        compared[begin:end] = True
    x.do[:, ~compared], x.dmass[..., ~compared] = 0, 0
    return x, runs


def rows_of(results: dict, runs: list[tuple[int, int]]) -> dict:
    """The compared rows of o, mass and dq; dk and dv whole."""
    o, dq = (torch.cat([results[name][:, a:b] for a, b in runs], dim=1) for name in ("o", "dq"))
    mass = torch.cat([results["mass"][..., a:b] for a, b in runs], dim=-1)
    return {**results, "o": o, "mass": mass, "dq": dq}


def oracle_rows(x: Inputs, runs: list[tuple[int, int]]) -> dict:
    """What the oracle gives in these rows, from their q and the keys that they see; dk and dv are sums over them."""
    parts = []
    for begin, end in runs:
        part = (x.q[:, begin:end], x.k[:, :end], x.v[:, :end], x.do[:, begin:end], x.dmass[..., begin:end])
        exact = Inputs(*(t.double() for t in part))
        parts.append(run(reference.stickbreaking_attention, exact, return_mass=True))
    joined = {name: torch.cat([part[name] for part in parts], dim=1) for name in ("o", "dq")}
    joined["mass"] = torch.cat([part["mass"] for part in parts], dim=-1)
    for name, like in (("dk", x.k), ("dv", x.v)):
        joined[name] = torch.zeros_like(like, dtype=torch.float64)
        for part in parts:
            joined[name][:, : part[name].shape[1]] += part[name]
    return joined


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [4096, 16384, 65536])
@pytest.mark.parametrize("regime", [*BARRED, SPIKES])
@pytest.mark.parametrize("mass_in_loss", [True, False], ids=["mass in loss", "output alone"])
def test_bf16(regime, length, head_dim, mass_in_loss):
    """o, dq, dk, dv at the bar; the mass to the tolerance of the stick. Two query heads share a key head at 4K."""
    heads = {"h": 2, "h_kv": 1} if length == 4096 else {"h": 1}
    x, runs = make(regime, length, d=head_dim, dtype=torch.bfloat16, **heads)
    if not mass_in_loss:
        x.dmass.zero_()
    threshold = 0.0 if regime in UNSKIPPED else DEFAULT_THRESHOLD
    options = {"mass_threshold": threshold, "return_mass": True, "mass_in_loss": mass_in_loss}
    actual = rows_of(run(stickbreaking_attention, x, **options), runs)
    oracle, rounded = oracle_rows(x, runs), rounded_results(x, runs=runs)
    allowed = floors(torch.bfloat16, length)
    missed = []
    for name in ("o", "dq", "dk", "dv"):
        ours, theirs = (relative_errors(results[name], oracle[name])[0] for results in (actual, rounded))
        print(f"{regime:14s} L={length:6d} d={head_dim:3d} {name:3s} {ours:.3e} rounded {theirs:.3e}")
        if not ours <= BAR * theirs + allowed[name]:
            missed.append(f"{name}: {ours:.3g}, the rounded computation {theirs:.3g}")
    off = (actual["mass"] - oracle["mass"]).abs()
    used_up = (oracle["mass"] <= threshold) & (actual["mass"] >= 0) & (actual["mass"] <= threshold)
    worst = off.masked_fill(used_up, 0.0).max().item()
    if not worst <= stick_tolerance(length):
        missed.append(f"mass: off by {worst:.3g}")
    assert not missed, "; ".join(missed)


@pytest.mark.parametrize("regime", ["randn", "mean -3.2", "mean -8", "mean -11", "alternating"])
@pytest.mark.parametrize(("length", "head_dim"), [(4096, 64), (16384, 128), (65536, 64)])
def test_weights_and_mass_make_one_stick(regime, length, head_dim):
    """With v = 1, o is sum(A): with fp32 inputs o + mass is 1 in every row."""
    x = make_inputs(regime, s=length, h=1, d=head_dim)
    x.v.fill_(1.0)
    o, mass = stickbreaking_attention(x.q, x.k, x.v, mass_threshold=0.0, return_mass=True)
    stick = o.double() + mass.double().transpose(1, 2)[..., None]
    assert (stick - 1).abs().max().item() <= stick_tolerance(length)


@pytest.mark.parametrize("regime", ["randn", "mean -8", "saturated +15"])
def test_fp32(regime):
    """fp32 means fp32, not tf32: at 4K keys, all rows, within twice a plain fp32 computation's error."""
    assert_accurate(stickbreaking_attention, make_inputs(regime, s=4096, h=1, d=128), mass_threshold=0.0)


def test_the_bar_is_a_bar():
    """An error of 2e-3 on top of the rounded computation's is above it; the rounded computation itself is not."""
    assert set(BARRED) <= set(REGIMES)
    x = make_inputs("mean -8", s=1024, h=2, h_kv=1, d=64, dtype=torch.bfloat16)
    runs = [(0, 1024)]
    oracle, rounded = oracle_rows(x, runs), rounded_results(x)
    for name in ("o", "dq", "dk", "dv"):
        theirs, _ = relative_errors(rounded[name], oracle[name])
        noise = torch.randn_like(oracle[name]) * oracle[name].norm() / oracle[name].numel() ** 0.5
        ours, _ = relative_errors(rounded[name].double() + 2e-3 * noise, oracle[name])
        assert ours > BAR * theirs + floors(torch.bfloat16, 1024)[name], name
        assert 1e-3 < theirs < 4e-3
