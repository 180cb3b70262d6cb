"""The bar for bf16 kernels: their error against float64 beside that of an exact computation rounded where they must.

Relative Frobenius error at most 1.2 times the rounded computation's (rounded.py defines it), and what fp32 sums
explain (accuracy.py: floors). Where an oracle of all rows is too much, dO and dmass are nonzero in some runs of rows
only: o and dq are compared there, dk and dv are then sums over these rows alone.
"""

import torch

from megatron_sb import reference

from .accuracy import floors, relative_errors, run
from .bounds import stick_tolerance
from .inputs import Inputs, make_inputs
from .rounded import rounded_results

BAR = 1.2
SPIKES, FIRST_SPIKE, SPIKE_DISTANCE = "spikes", 3000, 10000  # of keys whose logits are +11 among those of -11
BARRED = [
    "randn",
    "mean -3.2",
    "mean -6",
    "mean -8",
    "mean -11",
    "saturated +5",
    "saturated +15",
    "saturated +30",
    SPIKES,
]
DEFAULT_THRESHOLD = 2.0**-24
# One key of logit 30 leaves 1e-13 of the stick, and dz is as small. Nothing is skipped there, because what skipping may
# drop, 6e-8, is more than all of dq and dk.
_UNSKIPPED = ("saturated +30",)


def threshold_of(regime: str) -> float:
    """The mass_threshold at which a regime is judged."""
    return 0.0 if regime in _UNSKIPPED else DEFAULT_THRESHOLD


def barred_inputs(regime: str, length: int, runs: list[tuple[int, int]], **sizes) -> Inputs:
    """Inputs of a regime; the gradients of the results are 0 in all rows but those of the runs."""
    x = make_inputs("mean -11" if regime == SPIKES else regime, s=length, dtype=torch.bfloat16, **sizes)
    if regime == SPIKES:
        x.k[:, FIRST_SPIKE::SPIKE_DISTANCE, :, 0] *= -1
    compared = torch.zeros(length, dtype=torch.bool)
    for begin, end in runs:
        compared[begin:end] = True
    x.do[:, ~compared], x.dmass[..., ~compared] = 0, 0
    return x


class Bar:
    """What the float64 oracle and the rounded computation give for inputs, in the runs of rows to compare."""

    def __init__(self, x: Inputs, runs: list[tuple[int, int]]) -> None:
        self._length, self._runs = x.q.shape[1], runs
        self._oracle, self._rounded = _oracle_rows(x, runs), rounded_results(x, runs=runs)

    def missed(self, results: dict, regime: str) -> list[str]:
        """Which of o, dq, dk, dv are above the bar, and the mass if it is off by more than the stick's tolerance."""
        actual, missed = self._rows_of(results), []
        for name in ("o", "dq", "dk", "dv"):
            ours, theirs = (relative_errors(r[name], self._oracle[name])[0] for r in (actual, self._rounded))
            print(f"{regime:14s} L={self._length:6d} {name:3s} {ours:.3e} rounded {theirs:.3e}")
            if not ours <= BAR * theirs + floors(torch.bfloat16, self._length)[name]:
                missed.append(f"{name}: {ours:.3g}, the rounded computation {theirs:.3g}")
        threshold, mass = threshold_of(regime), actual["mass"]
        off = (mass - self._oracle["mass"]).abs()
        used_up = (self._oracle["mass"] <= threshold) & (mass >= 0) & (mass <= threshold)
        worst = off.masked_fill(used_up, 0.0).max().item()
        return missed + ([] if worst <= stick_tolerance(self._length) else [f"mass: off by {worst:.3g}"])

    def _rows_of(self, results: dict) -> dict:
        """The compared rows of o, mass and dq; dk and dv whole."""
        o, dq = (torch.cat([results[name][:, a:b] for a, b in self._runs], dim=1) for name in ("o", "dq"))
        mass = torch.cat([results["mass"][..., a:b] for a, b in self._runs], dim=-1)
        return {**results, "o": o, "mass": mass, "dq": dq}


def _oracle_rows(x: Inputs, runs: list[tuple[int, int]]) -> dict:
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
