"""Megatron-Bridge: a Llama comes in, is trained with stick-breaking layers, and goes out."""

import importlib.util

import pytest
from support.launch import run_worker

LONG = 65536  # tokens


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


pytestmark = pytest.mark.skipif(not _is_installed("megatron.bridge"), reason="needs Megatron-Bridge")


def test_a_llama_in_and_out(tmp_path):
    """The weights that come in and go out have the logits of the Megatron model, in float32 against float64."""
    found = run_worker("megatron_bridge.py", 1, tmp_path / "findings.json")
    assert found["layer"] == "StickBreakingCoreAttention"
    assert found["before"] < 1e-5 and found["after"] < 1e-5
    assert found["losses"][-1] < 0.7 * found["losses"][0]


@pytest.mark.gpu
@pytest.mark.skipif(not _is_installed("transformer_engine"), reason="needs Transformer Engine")
def test_a_llama_in_and_out_on_a_gpu(tmp_path):
    """The same with the layers of Transformer Engine, on a row of 64K tokens in bf16 against fp32."""
    found = run_worker("megatron_bridge.py", 1, tmp_path / "findings.json", str(LONG), device="cuda")
    assert found["layer"] == "StickBreakingCoreAttention" and found["linear"].startswith("TE")
    assert found["before"] < 0.04 and found["after"] < 0.04  # bf16
    assert found["losses"][-1] < 0.9 * found["losses"][0]
