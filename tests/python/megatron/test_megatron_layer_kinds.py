"""Models whose layers are not all attention: which layers become stick-breaking, on every way in."""

import math

import pytest
from support.launch import run_worker

STICK_BREAKING, SOFTMAX = "StickBreakingCoreAttention", "DotProductAttention"


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict:
    return run_worker("megatron_layer_kinds.py", 2, tmp_path_factory.mktemp("kinds") / "findings.json")


def assert_trains(step: dict) -> None:
    """The loss of a first step is near that of equal probabilities, and every parameter gets a gradient."""
    assert abs(step["loss"] - math.log(32)) < 1.0
    assert step["without gradient"] == []


def test_heterogeneous_models(findings):
    """Layers whose attention is a no-op or a linear layer do not change."""
    found = findings["heterogeneous"]
    others = ["IdentityOp", "ColumnParallelLinearGathered"]
    assert found["stock"] == [SOFTMAX, others[0], SOFTMAX, others[1]]
    assert found["converted"] == found["launched"] == [STICK_BREAKING, others[0], STICK_BREAKING, others[1]]
    converted, launched, stock = found["steps"]
    for step in (converted, launched, stock):
        assert_trains(step)
    assert converted["loss"] == launched["loss"] != stock["loss"]
