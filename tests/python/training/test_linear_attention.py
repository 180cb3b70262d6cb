"""Layers with gated delta nets: built from their entry, trained on one GPU, refused where they cannot run."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from support.jobs import SMALL_JOB, metrics
from support.likelihoods import nll_of_windows

from megatron_sb.training import load_run
from megatron_sb.training.config import ConfigError, GatedDeltaNetConfig, check_packages, load_config
from megatron_sb.training.config.checks import needs_gpu
from megatron_sb.training.config.parameters import count_parameters
from megatron_sb.training.engine.linear_attention import GatedDeltaNet
from megatron_sb.training.throughput import model_flops

HYBRID = [
    "attention={delta: {kind: gated_delta_net, num_heads: 2}, hybrid: {kind: mixed, layers: [delta, stick_breaking]}}",
    "compare=[hybrid]",
    "parallel={ranks: 1, device: auto}",
    "stages.0.context_parallel_size=1",
    "stages.1.context_parallel_size=1",
]


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL_JOB)
    return path


class SumOfDocument(torch.nn.Module):
    """Stands in for flash-linear-attention's layer: each token gets the sum of those before it in its document."""

    def __init__(self, hidden_size, **sizes):
        super().__init__()
        self.sizes = sizes
        self.q_proj, self.o_proj = (torch.nn.Linear(hidden_size, hidden_size, bias=False) for _ in "qo")

    def forward(self, hidden_states, cu_seqlens):
        (rows,) = hidden_states
        parts = rows.split(cu_seqlens.diff().tolist())
        return torch.cat([part.cumsum(0) for part in parts])[None], None, None


def test_the_layer_gets_packed_documents(monkeypatch):
    """And the initial weights of the model's other layers."""
    layers = types.ModuleType("fla.layers")
    layers.GatedDeltaNet = SumOfDocument
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.layers", layers)
    config = TransformerConfig(num_layers=8, hidden_size=64, num_attention_heads=4, init_method_std=0.5)
    layer = GatedDeltaNet(config, 1, num_heads=2, expand_v=1.5, cp_comm_type="p2p")
    assert layer.net.sizes == {"head_dim": 16, "num_heads": 2, "expand_v": 1.5, "norm_eps": config.layernorm_epsilon}
    assert layer.net.q_proj.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert layer.net.o_proj.weight.std().item() == pytest.approx(0.5 / 16**0.5, rel=0.1)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    x = torch.randn(8, 1, 64)
    output, bias = layer(x, None, packed_seq_params=packed)
    assert bias is None and torch.equal(output, torch.cat([x[:3].cumsum(0), x[3:].cumsum(0)]))
    with pytest.raises(ValueError, match="packed_seq_params must be packed sequences"):
        layer(x, None)


def test_floating_point_operations_grow_with_the_length(job):
    """A gated delta net adds as many for every token, attention more for later ones."""
    attentions = {"delta": [*HYBRID, "compare=[delta]"], "attention": [*HYBRID, "compare=[stick_breaking]"]}
    for name, overrides in attentions.items():
        config = load_config(job, overrides)
        padded = config.model.padded_vocab_size(257)
        one, two = (model_flops(config, config.compare[0], 257, [np.array([0, length])]) for length in (512, 1024))
        assert (two / one == pytest.approx(2, rel=1e-12)) == (name == "delta")
        if name == "delta":  # three products of the state with a vector, forward and backward
            heads, key_dim, value_dim = config.attention["delta"].sizes(config.model)
            weights = count_parameters(config.model, config.attention_of_layers("delta"), 257).active
            lookup = 0 if config.model.tie_word_embeddings else config.model.hidden_size * padded
            states = 3 * config.model.num_layers * heads * key_dim * value_dim
            assert one == 6 * 512 * (weights - lookup + states)


REFUSED = {
    "parallel.device=cpu": r"attention\.delta\.kind = 'gated_delta_net' contradicts parallel\.device = 'cpu'",
    "stages.1.context_parallel_size=2": r"'gated_delta_net' contradicts stages\.1\.context_parallel_size = 2",
    "parallel.tensor_parallel_size=2": r"'gated_delta_net' contradicts parallel\.tensor_parallel_size = 2",
    "stages.0.loss=layers": r"'gated_delta_net' contradicts stages\.0\.loss = 'layers'",
    "attention.delta.expand_v=1.03": r"expand_v must give values a whole number .*head_dim = 16, got 1\.03",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refused_by_name(job, override):
    with pytest.raises(ConfigError, match=REFUSED[override]):
        load_config(job, [*HYBRID, override])


def test_the_scale_is_that_of_the_layers_with_logits(job):
    config = load_config(job, [*HYBRID, "attention.stick_breaking.scale=0.1"])
    assert config.layers_of("hybrid") == ("delta", "stick_breaking") and config.scale_of_logits("hybrid") == 0.1


def test_a_missing_package_is_an_error_before_anything_runs(job, monkeypatch):
    config = load_config(job, HYBRID)
    assert [field for field, _ in needs_gpu(config)] == ["attention.delta.kind = 'gated_delta_net'"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_packages(config, ["stick_breaking"])
    with pytest.raises(ConfigError, match=r"attention\.delta\.kind = .*`pip install flash-linear-attention`"):
        check_packages(config, config.compare)


@pytest.mark.parametrize(
    ("triton", "capability", "installed", "refused"),
    [
        ("3.6.0", (9, 0), ("fla",), True),
        ("3.4.0", (9, 0), ("fla",), True),
        ("3.6.0", (9, 0), ("fla", "tilelang"), False),
        ("3.6.0", (8, 0), ("fla",), False),
        ("3.7.1", (9, 0), ("fla",), False),
        ("3.3.1", (9, 0), ("fla",), False),
    ],
)
def test_tilelang_where_triton_is_wrong(job, monkeypatch, triton, capability, installed, refused):
    config = load_config(job, HYBRID)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"triton": triton}[name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if not refused:
        return check_packages(config, config.compare)
    with pytest.raises(ConfigError, match=rf"attention\.delta\.kind = .*Triton {triton}.*`pip install tilelang`"):
        check_packages(config, config.compare)


@pytest.mark.gpu
def test_the_weights_are_those_that_are_counted(job):
    layers = pytest.importorskip("fla.layers")
    model = load_config(job, HYBRID).model
    for attention in (GatedDeltaNetConfig(), GatedDeltaNetConfig(num_heads=3, expand_v=1.5)):
        heads, key_dim, _ = attention.sizes(model)
        sizes = {"hidden_size": model.hidden_size, "head_dim": key_dim, "num_heads": heads}
        net = layers.GatedDeltaNet(**sizes, expand_v=attention.expand_v)
        with_net, without = (count_parameters(model, [attention] * n, 257).total for n in (1, 0))
        assert sum(weight.numel() for weight in net.parameters()) == with_net - without


@pytest.mark.gpu
def test_training(job):
    """The loss falls, and documents in one row do not see each other: each alone has the recorded likelihood."""
    pytest.importorskip("fla")
    config = load_config(job, HYBRID)
    try:
        check_packages(config, config.compare)
    except ConfigError as error:
        pytest.skip(str(error))
    out = job.parent / "run"
    overrides = [*HYBRID, "model.head_dim=64", "model.precision=bf16", "report.tensorboard=false"]
    command = [sys.executable, "-m", "megatron_sb.training", str(job), *overrides, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in metrics(out)]
    assert losses[-1] < 0.8 * losses[0]
    entry = json.loads((out / "evaluation" / "hybrid.extended.json").read_text())["results"][-1]
    with load_run(out) as model:
        found = nll_of_windows(model, load_config(out / "config.yaml"), entry["context"])
    assert found == pytest.approx(entry["nll"], rel=1e-2)
