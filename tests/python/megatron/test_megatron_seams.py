"""Built models: mixed layers, stock specs under the launcher, and the stand-ins for Transformer Engine."""

import re

import pytest
import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from support.launch import run_worker
from support.megatron_cpu import small_config
from support.messages import mentions

from megatron_sb.megatron import install_stand_ins
from megatron_sb.megatron.gates import gate_projection, normalized
from megatron_sb.megatron.stand_ins import GroupedExperts


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict:
    return run_worker("megatron_seams.py", 2, tmp_path_factory.mktemp("seams") / "findings.json", "cpu")


def wrong_messages(expected: dict[str, str], messages: dict[str, str]) -> dict[str, str]:
    """Return the messages that do not mention their expected words."""
    assert messages.keys() == expected.keys()
    return {name: text for name, text in messages.items() if not re.search(mentions(expected[name]), text)}


def test_mixed_layers(findings):
    """With layers (1, 0) the second layer keeps its softmax, and only it gets rotary embeddings."""
    mixed = findings["mixed"]
    assert mixed["cores"] == ["StickBreakingCoreAttention", "DotProductAttention"]
    for change in ("rope in layer", "softmax in layer"):
        first, second = mixed[change]
        assert first == 0.0 and second > 1e-5, change
    assert findings["mixed checkpoint"] == 0.0
    stick_breaking, softmax = "StickBreakingCoreAttention", "DotProductAttention"
    assert findings["virtual pipeline"] == [
        [[1, stick_breaking], [3, softmax]],
        [[2, softmax], [4, stick_breaking]],
    ]
    expected = {
        "rope": "rotary_pos_emb stick-breaking layer 1 --no-rope-freq",
        "rope in the other layer": "rotary_pos_emb stick-breaking layer 1 --no-rope-freq",
        "three layers": "layers (1, 0) --sb-layers 3 2 --num-layers (1, 2, 3)",
        "multi-token prediction": "config.mtp_num_layers --mtp-num-layers 1",
    }
    assert wrong_messages(expected, mixed["refused"]) == {}


def test_stock_specs_under_the_launcher(findings):
    """After the launcher's patch, stock specs build the same models as `with_stickbreaking`."""
    launched = findings["launched"]
    assert launched["difference from with_stickbreaking"] == {"dense": 0.0, "experts": 0.0}
    assert min(launched["difference from softmax"].values()) > 1e-3
    assert launched["layer without attention"] == "IdentityOp"
    expected = dict.fromkeys(("defaults", "the same"), "no error")
    expected["another"] = "remainder_bias of with_stickbreaking False True --sb-remainder-bias"
    assert wrong_messages(expected, launched["own options"]) == {}


class LayerNormLinear(torch.nn.Linear):
    """What forget gates read of Transformer Engine's projection of the same name. It has no CPU kernels."""

    def __init__(self, size: int, normalization: str, zero_centered_gamma: bool):
        super().__init__(size, size)
        self.normalization, self.zero_centered_gamma, self.eps = normalization, zero_centered_gamma, 0.1
        self.layer_norm_weight = torch.nn.Parameter(torch.randn(size))
        self.layer_norm_bias = torch.nn.Parameter(torch.randn(size)) if normalization == "LayerNorm" else None


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_gates_get_hidden_states_after_the_norm_of_their_projection(normalization, zero_centered):
    torch.manual_seed(0)
    linear = LayerNormLinear(16, normalization, zero_centered)
    x = torch.randn(5, 2, 16, dtype=torch.double)
    y = normalized(x, linear)
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
    expected = expected * (linear.layer_norm_weight + zero_centered)
    if normalization == "LayerNorm":
        expected = expected + linear.layer_norm_bias
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected.float())
    y.sum().backward()
    assert linear.layer_norm_weight.grad.abs().max() > 1
    plain = torch.nn.Linear(16, 16)
    assert normalized(x, plain) is x


def test_gates_of_a_projection_that_an_adapter_wraps(findings):
    """They get the hidden states after its norm, as before. LoRA of Megatron-Bridge wraps projections."""
    assert findings["adapters"] == 0.0


def test_an_unknown_norm_in_the_projection_is_an_error():
    with pytest.raises(
        ValueError, match=mentions("linear_qkv layer_norm_weight --sb-forget-gate FusedLayerNorm local")
    ):
        gate_projection(small_config(), type("FusedLayerNorm", (torch.nn.Linear,), {})(64, 64), None)


def assert_experts(findings: dict, tolerance: float, dispatchers: set[str]) -> None:
    """Grouped experts equal float64, equal sequential experts in a model, and survive a checkpoint."""
    experts = findings["experts"]
    assert experts["class"] == "GroupedExperts" and experts["errors"].keys() == {"rows", "no rows"}
    assert all(error < tolerance for error in experts["errors"].values())
    assert re.search(mentions("hidden_size 32 moe_ffn_hidden_size 44 multiples 8"), experts["refused"])
    assert findings["models"].keys() == dispatchers
    assert all(error < tolerance for error in findings["models"].values())
    assert findings["checkpoint"].keys() == {"as it was", "one rank", "sequential"}
    assert all(error < tolerance for error in findings["checkpoint"].values())


def test_grouped_experts(findings):
    assert_experts(findings, 1e-6, {"allgather"})


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multigpu)])
def test_grouped_experts_on_gpus(ranks, tmp_path):
    """In bf16, whose rounding is 2^-9. The bound holds for the largest relative error of several matrices."""
    found = run_worker("megatron_seams.py", ranks, tmp_path / "findings.json", "cuda", device="cuda")
    assert_experts(found, 2e-2, {"allgather", "alltoall"})


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm(normalization, sequence_parallel):
    install_stand_ins()
    config = small_config(normalization=normalization)
    config.sequence_parallel = sequence_parallel  # a config with one tensor-parallel rank would reset it
    norm = WrappedTorchNorm(config, 32, eps=1e-3)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [sequence_parallel] * len(
        list(norm.parameters())
    )
    x = torch.randn(5, 32)
    centred = x.double() - (x.double().mean(-1, keepdim=True) if normalization == "LayerNorm" else 0)
    wanted = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x).double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalization": "L2Norm"}, "normalization 'L2Norm' --normalization 'LayerNorm' 'RMSNorm'"),
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma True --apply-layernorm-1p"),
        ({"memory_efficient_layer_norm": True}, "memory_efficient_layer_norm True --memory-efficient-layer-norm"),
    ],
)
def test_unsupported_norms(changes, words):
    install_stand_ins()
    config = small_config()
    vars(config).update(changes)
    with pytest.raises(ValueError, match=mentions(words)):
        WrappedTorchNorm(config, 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"add_bias_linear": True}, "config.add_bias_linear True --disable-bias-linear False"),
        ({"fp8": "hybrid"}, "config.fp8 'hybrid' --fp8-format None"),
        ({"fp4": "e2m1"}, "config.fp4 'e2m1' --fp4-format None"),
        ({"moe_apply_probs_on_input": True}, "config.moe_apply_probs_on_input True --moe-apply-probs-on-input"),
        ({"activation_func_clamp_value": 7.0}, "config.activation_func_clamp_value 7.0 None"),
        ({"glu_linear_offset": 1.0}, "config.glu_linear_offset 1.0 --glu-linear-offset 0.0"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            "config.recompute_modules ['moe_act'] --recompute-modules",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_settings_of_grouped_experts(changes, words):
    config = small_config(add_bias_linear=False)
    vars(config).update(changes)
    with pytest.raises(ValueError, match=mentions("--moe-grouped-gemm " + words)):
        GroupedExperts(2, config, None)
