"""Variable tracking: which variables hold a value after a chain of assignments (RULER's vt)."""

from __future__ import annotations

import string

import numpy as np

from megatron_sb.experiments.ruler.sample import Sample, fill_sample
from megatron_sb.experiments.ruler.texts import Texts

NUM_HOPS = 4  # as in RULER: a chain of five variables


def variable_tracking(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Scatter one chain of assignments over noise. The answers are its variables in the order of the text."""
    letters = list(string.ascii_uppercase)
    names: dict[str, None] = {}
    while len(names) < 1 + NUM_HOPS:
        names["".join(generator.choice(letters, 5))] = None
    chain = list(names)
    value = str(generator.integers(10_000, 100_000))
    steps = [
        f"VAR {name} = {source}." for name, source in zip(chain, [value, *(f"VAR {n}" for n in chain)], strict=False)
    ]
    asked = f"Which variables hold the value {value}? The variables that hold the value {value} are: "
    return fill_sample(generator, length, texts.noise(), steps, asked, chain, shuffled=False)
