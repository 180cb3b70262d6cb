"""Position encodings of softmax attention, each alone: YaRN's angles, ALiBi's slopes, and how FIRE starts."""

import pytest
import torch

from megatron_sb.baselines.softmax import FireBias, RotaryScaling, SoftmaxAttention, alibi_slopes
from megatron_sb.baselines.softmax.positions import rotary_cos_sin

# ALiBi's slopes as the paper prints them, by number of heads.
SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8],
    12: [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@pytest.mark.parametrize(("base", "trained_context", "factor"), [(10000.0, 1024, 32.0), (500.0, 4096, 1.5)])
def test_yarn_is_that_of_transformers(base, trained_context, factor):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    yarn = {"rope_type": "yarn", "rope_theta": base, "factor": factor}
    config = llama.LlamaConfig(
        head_dim=64,
        max_position_embeddings=int(factor * trained_context),
        rope_parameters=yarn | {"original_max_position_embeddings": trained_context},
    )
    rows = torch.arange(200)
    expected = llama.LlamaRotaryEmbedding(config)(torch.zeros((), dtype=torch.float64), rows[None])
    scaling = RotaryScaling("yarn", factor, trained_context)
    found = rotary_cos_sin((len(rows),), 64, base, scaling, torch.float64, torch.device("cpu"))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x[:, 0], y[0, :, :32], rtol=1e-4, atol=1e-4)  # its angles are computed in float32


@pytest.mark.parametrize("num_heads", SLOPES)
def test_alibi_slopes(num_heads):
    assert alibi_slopes(num_heads) == pytest.approx(SLOPES[num_heads], rel=1e-15)


def test_fire_starts_as_in_the_paper():
    module = FireBias(4, dtype=torch.float64)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    layers = {"hidden.weight": (32, 1), "hidden.bias": (32,), "out.weight": (4, 32), "out.bias": (4,)}
    assert shapes == {"c": (), "threshold_factor": (), **layers}
    assert (module.c.item(), module.threshold_factor.item(), module.threshold) == (0.1, 1.0, 512.0)
    assert {p.dtype for p in module.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: alibi_slopes(0), "num_heads must be an int of at least 1, got 0"),
        (lambda: alibi_slopes(2.5), r"num_heads must be an int of at least 1, got 2\.5"),
        (lambda: FireBias(0), "num_heads must be an int of at least 1, got 0"),
        (lambda: FireBias(4, hidden_size=0), "hidden_size must be an int of at least 1, got 0"),
        (lambda: FireBias(4, c=-0.1), r"c must be a finite number above 0, got -0\.1"),
        (lambda: FireBias(4, threshold="512"), "threshold must be a finite number above 0, got str"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize(
    ("query", "key", "error", "message"),
    [
        ([0.0], torch.arange(3.0), TypeError, "query_position must be a torch.Tensor, got list"),
        (
            torch.arange(3),
            torch.arange(3),
            TypeError,
            "query_position must have a floating-point dtype, got torch.int64",
        ),
        (
            torch.arange(3.0),
            torch.arange(3),
            TypeError,
            "key_position must have the dtype of query_position, torch.float32",
        ),
        (
            torch.ones(1, 3),
            torch.arange(3.0),
            ValueError,
            r"query_position must have one dimension, got shape \(1, 3\)",
        ),
    ],
)
def test_invalid_positions_of_fire(query, key, error, message):
    with pytest.raises(error, match=message):
        FireBias(4)(query, key)


@pytest.mark.parametrize("base", [1.0, 0.5])
def test_yarn_needs_wavelengths_that_grow(base):
    """It finds the pairs to stretch with 1 / log(base)."""
    module = SoftmaxAttention(2, 8, rotary_base=base)
    with pytest.raises(ValueError, match=f"rotary_base must be above 1 with the scaling 'yarn', got {base}"):
        module.scaling = RotaryScaling("yarn", factor=2.0, trained_context=64)
    assert module.scaling == RotaryScaling()
