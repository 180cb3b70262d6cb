"""MLPs and losses in parts, inputs of layers in the memory of the host: the training is the same, and needs less."""

import pytest
import torch
from support.launch import run_worker

from megatron_sb.training.engine.long_sequences import OffloadedTensors


def assert_same(result, expected, tolerance):
    for name in ("loss", "norm", "windows", "weights"):
        assert result[name] == pytest.approx(expected[name], rel=tolerance), name


def test_parts_give_the_same_training(tmp_path):
    """250 tokens in parts of 100 and of 64, with and without recomputed layers, alone and in pairs."""
    results = run_worker("long_sequences.py", 1, tmp_path / "out.json")
    expected = results.pop("as usual")
    assert expected["largest"] == {"mlp": 250, "logits": 250}
    for name, result in results.items():
        assert_same(result, expected, 2e-6)
        rows = {"recomputed": 250, "pairs of layers": 64}.get(name, 100)
        assert result["largest"] == {"mlp": rows, "logits": rows}, name


@pytest.mark.gpu
def test_memory_on_a_gpu(tmp_path):
    """64K tokens in bf16: the loss and gradients of the usual form, to rounding, in a fraction of its memory."""
    results = run_worker("long_sequences.py", 1, tmp_path / "out.json", "cuda", "65536", device="cuda")
    expected = results.pop("as usual")
    for result in results.values():
        assert_same(result, expected, 2e-3)
    peaks = {name: result["peak"] for name, result in results.items()}
    inputs = 65536 * 512 * 2  # bytes of the input of a layer
    assert peaks["recomputed, in parts"] < 0.2 * expected["peak"]
    assert peaks["offloaded"] < peaks["recomputed, in parts"] - 2 * inputs


@pytest.mark.gpu
def test_offloaded_tensors_come_back(monkeypatch):
    """The first two saved tensors are in the host's memory until the backward, in pieces; gradients are the same."""
    monkeypatch.setattr(OffloadedTensors, "PIECE_BYTES", 1024)
    x = torch.randn(3, 1000, device="cuda", dtype=torch.float64, requires_grad=True)

    def loss():
        return x.sin().exp().tanh().sum()

    expected = torch.autograd.grad(loss(), x)[0]
    offloaded = OffloadedTensors(2)
    with offloaded:
        result = loss()
    assert offloaded.left == 0
    assert torch.equal(torch.autograd.grad(result, x)[0], expected)
