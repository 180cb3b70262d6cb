"""Megatron-Bridge: a Llama comes in, is trained with stick-breaking layers, and goes out."""

import importlib.util

import pytest
from support.launch import run_worker


def _is_installed() -> bool:
    return importlib.util.find_spec("megatron.bridge") is not None


@pytest.mark.skipif(not _is_installed(), reason="needs Megatron-Bridge")
def test_a_llama_in_and_out(tmp_path):
    """The weights that come in and go out have the logits of the Megatron model, in float32 against float64."""
    found = run_worker("megatron_bridge.py", 1, tmp_path / "findings.json")
    assert found["layer"] == "StickBreakingCoreAttention"
    assert found["before"] < 1e-5 and found["after"] < 1e-5
    assert found["losses"][-1] < 0.7 * found["losses"][0]
