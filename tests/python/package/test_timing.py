"""benchmarks/timing.py."""

import importlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module("timing")


def test_each_round_has_an_order_of_its_own(timing):
    """Otherwise a call would always follow the same other one, whose power lowers its clock."""
    names, made = ("first", "second", "third", "fourth"), []
    calls = {name: lambda name=name: made.append(name) for name in names}
    runs = []
    for _ in range(2):
        made.clear()
        found = timing.take_turns(calls, seconds=0, least=24)
        assert tuple(found) == names and min(found.values()) >= 0
        warm, rounds = made[:8], [tuple(made[i : i + 4]) for i in range(8, len(made), 4)]
        assert warm == [name for name in names for _ in range(2)]
        assert len(rounds) == 24 and all(sorted(order) == sorted(names) for order in rounds)
        runs.append(rounds)
    before = {(a, b) for order in runs[0] for a, b in pairwise(order)}
    assert before == {(a, b) for a in names for b in names if a != b}
    assert runs[0] == runs[1]
