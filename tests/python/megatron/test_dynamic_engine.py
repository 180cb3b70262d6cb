"""Megatron-Core's engine of dynamic inference, with stick-breaking layers, on a CPU and on a GPU."""

import importlib.util
from pathlib import Path

import pytest
from support.launch import run_worker

HAS_CONFIG = importlib.util.find_spec("megatron.core.inference.config") is not None
CASES = ("plain", "options", "prompts in chunks", "shared prefixes", "speculative tokens")
GRAPHS = ("CUDA graphs of layers", "CUDA graphs of all layers")
NEW = (40, 70, 30, 12, 1, 20, 24)  # tokens to generate, of REQUESTS in the worker
EXACT, ROUNDING = 1e-6, 3e-2  # of log probabilities, which Megatron stores in fp32, and of logits in bf16

pytestmark = pytest.mark.skipif(not HAS_CONFIG, reason="this Megatron-Core has another engine (0.17 and later have)")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("engine"), "cpu", *CASES)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("engine"), "cuda", *CASES, *GRAPHS)


def run(folder: Path, device: str, *cases: str) -> dict:
    """Serve the requests in all cases, in one process."""
    return run_worker("megatron_dynamic_engine.py", 1, folder / "findings.json", device, *cases, device=device)


def check(case: str, found: dict, rounding: float) -> None:
    """Assert that a case generated all tokens, and the right ones, with the kinds of steps that it is about."""
    assert "error" not in found, found["error"]
    kinds = {"both", "decoding", "prompts"}
    if case in GRAPHS:
        kinds = kinds - {"decoding"} | {"graph of decoding"}
    if case == "shared prefixes":
        kinds.add("2 blocks shared")
    assert {*found["steps"]} == kinds
    for number, count in enumerate(NEW):
        request = found["requests"][str(number)]
        assert request["new"] == count
        for oracle in ("whole text", "static inference"):
            errors = request[oracle]
            assert errors["regret"] <= rounding, (number, request)
            assert errors["log_prob"] is None or errors["log_prob"] <= rounding, (number, request)
            assert errors["greedy"] == count or rounding == ROUNDING, (number, request)


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_other_inference(case, on_cpu):
    """In float64: the tokens of a forward of the whole text, and of static inference."""
    check(case, on_cpu[case], EXACT)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *GRAPHS])
def test_the_tokens_are_those_of_other_inference_on_a_gpu(case, on_gpu, record_property):
    """In bf16, with Transformer Engine if it is installed: their logits are the largest ones, up to rounding."""
    record_property("found", on_gpu[case])
    check(case, on_gpu[case], ROUNDING)
