"""Megatron-Bridge: a Llama comes in, is trained with stick-breaking layers, and goes out."""

import importlib.util
import json
import re

import pytest
from support.launch import run_worker
from support.messages import mentions

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


# Of Megatron-Bridge's own loop and recipes.
LOOP = ("megatron.energon", "multistorageclient", "nvidia_resiliency_ext", "diffusers")
needs_loop = pytest.mark.skipif(
    not all(map(_is_installed, LOOP)), reason="Megatron-Bridge's training loop and recipes need " + ", ".join(LOOP)
)


@needs_loop
def test_its_own_training_loop(tmp_path):
    """A job that saves and resumes, and one on two ranks, have the same losses. Other options cannot resume."""

    def train(folder: str, steps: int, ranks: int = 1, **options) -> dict:
        (tmp_path / folder).mkdir(exist_ok=True)
        arguments = (tmp_path / f"{folder}.json", str(tmp_path / folder), str(steps), json.dumps(options))
        return run_worker("megatron_bridge_loop.py", ranks, *arguments)

    options = {"reach": [0.5, 8], "remainder_bias": True}
    whole = train("whole", 4, **options)["losses"]
    assert len(whole) == 4 and whole[-1] < 0.7 * whole[0]
    assert train("parts", 2, **options)["losses"] == pytest.approx(whole[:2], rel=1e-5)
    error = train("parts", 4, **options, attend_current=True)["error"]
    assert re.search(mentions("attend_current transformer_layer_spec False True pretrained_checkpoint"), error)
    assert train("parts", 4, **options)["losses"] == pytest.approx(whole[2:], rel=1e-5)
    assert train("context parallel", 4, ranks=2, **options)["losses"] == pytest.approx(whole, rel=1e-5)


@needs_loop
def test_recipes_of_llama_and_qwen(tmp_path):
    """Every recipe for pretraining them, with a small model of its family. Qwen3-Next has layers of its own."""
    found = run_worker("megatron_bridge_recipes.py", 1, tmp_path / "findings.json")
    plain = {name: layer for name, layer in found.items() if "qwen3_next" not in name}
    assert len(plain) >= 38
    assert set(plain.values()) == {"StickBreakingCoreAttention"}, plain


@pytest.mark.gpu
@pytest.mark.skipif(not _is_installed("transformer_engine"), reason="needs Transformer Engine")
def test_a_llama_in_and_out_on_a_gpu(tmp_path):
    """The same with the layers of Transformer Engine, on a row of 64K tokens in bf16 against fp32."""
    found = run_worker("megatron_bridge.py", 1, tmp_path / "findings.json", str(LONG), device="cuda")
    assert found["layer"] == "StickBreakingCoreAttention" and found["linear"].startswith("TE")
    assert found["before"] < 0.04 and found["after"] < 0.04  # bf16
    assert found["losses"][-1] < 0.9 * found["losses"][0]
