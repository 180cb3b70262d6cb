"""The accuracy bar for bf16 kernels.

The relative Frobenius error of a result must be at most 1.2 times the error of the rounded computation (rounded.py),
plus the rounding error of fp32 sums (`floors` in accuracy.py).

For long inputs the oracle computes only some runs of rows. dO and dmass are then zero in all other rows: o and dq are
compared in these runs, and dk and dv are sums over these runs alone.
"""

import torch

from megatron_sb import reference

from .accuracy import floors, relative_errors, run
from .bias_columns import read_gradients
from .bounds import stick_tolerance
from .inputs import Inputs, make_inputs
from .rounded import rounded_results

BAR = 1.2
# All logits are about -11, except +11 at every 10000th key.
SPIKES, FIRST_SPIKE, SPIKE_DISTANCE = "spikes", 3000, 10000
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
# One key with logit 30 leaves 1e-13 of the stick, and dz is as small. Skipping may change a result by 6e-8, which is
# more than all of dq and dk. It is therefore disabled in these regimes.
_WITHOUT_SKIPPING = ("saturated +30",)


def threshold_of(regime: str) -> float:
    """Return the mass_threshold to use in a regime."""
    return 0.0 if regime in _WITHOUT_SKIPPING else DEFAULT_THRESHOLD


def barred_inputs(regime: str, length: int, runs: list[tuple[int, int]], **sizes) -> Inputs:
    """Return inputs of a regime. The gradients of the results are 0 in all rows outside the runs."""
    x = make_inputs("mean -11" if regime == SPIKES else regime, s=length, dtype=torch.bfloat16, **sizes)
    if regime == SPIKES:
        x.k[:, FIRST_SPIKE::SPIKE_DISTANCE, :, 0] *= -1
    compared = torch.zeros(length, dtype=torch.bool)
    for begin, end in runs:
        compared[begin:end] = True
    x.do[:, ~compared], x.dmass[..., ~compared] = 0, 0
    return x


class Bar:
    """The results of the float64 oracle and of the rounded computation in the runs of rows to compare.

    With `biases`, the last columns of q and k hold biases (bias_columns.py).
    """

    def __init__(self, x: Inputs, runs: list[tuple[int, int]], biases: bool = False) -> None:
        self._length, self._runs = x.q.shape[1], runs
        self._read = read_gradients if biases else dict
        self.oracle, self._rounded = self._read(_oracle_rows(x, runs)), self._read(rounded_results(x, runs=runs))

    def missed(self, results: dict, regime: str) -> list[str]:
        """Describe the results that miss the bar. The error of the mass must be at most `stick_tolerance`."""
        actual, missed = self._rows_of(self._read(results)), []
        for name in ("o", "dq", "dk", "dv"):
            ours, theirs = (relative_errors(r[name], self.oracle[name])[0] for r in (actual, self._rounded))
            print(f"{regime:14s} L={self._length:6d} {name:3s} {ours:.3e} rounded {theirs:.3e}")
            if not ours <= BAR * theirs + floors(torch.bfloat16, self._length)[name]:
                missed.append(f"{name}: error {ours:.3g}, error of the rounded computation {theirs:.3g}")
        threshold, mass = threshold_of(regime), actual["mass"]
        errors = (mass - self.oracle["mass"]).abs()
        used_up = (self.oracle["mass"] <= threshold) & (mass >= 0) & (mass <= threshold)
        worst = errors.masked_fill(used_up, 0.0).max().item()
        return missed + ([] if worst <= stick_tolerance(self._length) else [f"mass: error {worst:.3g}"])

    def _rows_of(self, results: dict) -> dict:
        """Return the compared rows of o, mass and dq, and all rows of dk and dv."""
        o, dq = (torch.cat([results[name][:, a:b] for a, b in self._runs], dim=1) for name in ("o", "dq"))
        mass = torch.cat([results["mass"][..., a:b] for a, b in self._runs], dim=-1)
        return {**results, "o": o, "mass": mass, "dq": dq}


def _oracle_rows(x: Inputs, runs: list[tuple[int, int]]) -> dict:
    """Return the oracle's results in these runs of rows. dk and dv are sums over these rows."""
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
