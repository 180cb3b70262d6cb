"""StickBreakingSelfAttention: its answers against float64, its parameters, what it refuses, sequences over ranks."""

import pytest
import torch
from support.launch import run_worker
from support.messages import mentions

import megatron_sb as sb
from megatron_sb import reference
from megatron_sb.nn import self_attention

SWITCHES = {
    "plain": {},
    "biases": {"bias": True},
    "remainder bias": {"remainder_bias": True},
    "head norm": {"head_norm": True},
    "euclidean": {"logits": "euclidean", "scale": 0.3},
    "forget gate": {"forget_gate": True},
    "all": {
        "forget_gate": True,
        "bias": True,
        "remainder_bias": True,
        "head_norm": True,
        "attend_current": True,
        "scale": 0.4,
    },
}
switches = pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)


def make_module(*sizes, **options):
    """With parameters that are not what they start as."""
    module = sb.StickBreakingSelfAttention(*(sizes or (48, 6, 2)), **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def expected(
    module, x, cu_seqlens=None, *, remainder_bias=False, head_norm=False, bias=False, forget_gate=False, **options
):
    """The module's answer in float64, written out."""
    weights = {name: value.double() for name, value in module.state_dict().items()}
    d, heads, kv_heads = module.head_dim, module.num_heads, module.num_kv_heads
    qkv = x.double() @ weights["qkv_proj.weight"].T + (weights["qkv_proj.bias"] if bias else 0)
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, d)).split([heads, kv_heads, kv_heads], dim=-2)
    if forget_gate:
        f = (x.double() @ weights["gate_proj.weight"].T + weights["gate_proj.bias"]).sigmoid()
        options["forget_gate"] = f
    if cu_seqlens is None:
        o, mass = reference.stickbreaking_attention(q, k, v, return_mass=True, **options)
    else:
        o, mass = reference.stickbreaking_attention_varlen(q, k, v, cu_seqlens, return_mass=True, **options)
    if remainder_bias:
        o = o + mass.transpose(-1, -2)[..., None] * weights["remainder_bias"].view(heads, d)
    if head_norm:
        o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, correction=0, keepdim=True) + module.norm_eps).sqrt()
        o = o * weights["norm_weight"].view(heads, d) + weights["norm_bias"].view(heads, d)
    return o.flatten(-2) @ weights["out_proj.weight"].T + (weights["out_proj.bias"] if bias else 0)


class TestAnswers:
    """Against float64."""

    @switches
    def test_dense(self, switches):
        module, x = make_module(**switches), torch.randn(2, 33, 48)
        torch.testing.assert_close(module(x).double(), expected(module, x, **switches), rtol=1e-4, atol=1e-4)

    @switches
    def test_packed(self, switches):
        module, x = make_module(**switches), torch.randn(30, 48)
        cu_seqlens = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
        out = module(x, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(out.double(), expected(module, x, cu_seqlens, **switches), rtol=1e-4, atol=1e-4)

    def test_sizes(self):
        """head_dim apart from hidden_size, one KV head, in bfloat16."""
        module = make_module(40, 3, 1, 64, remainder_bias=True, dtype=torch.bfloat16)
        x = torch.randn(1, 20, 40, dtype=torch.bfloat16)
        out = module(x)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        oracle = expected(module, x, remainder_bias=True)
        assert (out.double() - oracle).norm() < 0.02 * oracle.norm()

    @switches
    @pytest.mark.parametrize("rows", [(2, 0), (0, 5), (0,)], ids=str)
    def test_no_rows(self, rows, switches):
        """No positions, no sequences, no tokens: gradients of 0."""
        module, x = make_module(**switches), torch.randn(*rows, 48, requires_grad=True)
        out = module(x, cu_seqlens=torch.zeros(2, dtype=torch.int32) if len(rows) == 1 else None)
        assert out.shape == x.shape
        out.sum().backward()
        assert x.grad.shape == x.shape
        assert not any(parameter.grad.any() for parameter in module.parameters())

    def test_every_parameter_has_a_gradient(self):
        module = make_module(**SWITCHES["all"])
        module(torch.randn(2, 9, 48)).square().sum().backward()
        assert len(list(module.parameters())) == 9
        for name, parameter in module.named_parameters():
            assert parameter.grad.abs().sum() > 0, name

    def test_autocast(self):
        """fp32 parameters, computed in bfloat16."""
        module, x = make_module(remainder_bias=True, head_norm=True), torch.randn(2, 20, 48)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16
        assert (out - module(x)).norm() < 0.03 * module(x).norm()

    def test_compile(self):
        module, x = make_module(remainder_bias=True, head_norm=True), torch.randn(2, 20, 48)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-6, atol=1e-6)

    def test_options_reach_the_operator(self, monkeypatch):
        """The mass is asked for where something reads it."""
        seen = {}
        monkeypatch.setattr(
            self_attention, "stickbreaking_attention", lambda q, *rest, **kwargs: seen.update(kwargs) or q
        )
        make_module(head_norm=True, mass_threshold=0.5)(torch.randn(1, 9, 48))
        options = {"scale": None, "attend_current": False, "mass_threshold": 0.5, "return_mass": False}
        assert seen == {**options, "logits": "dot", "forget_gate": None}


def test_start():
    """A remainder bias of 0 and a norm of weight 1 and bias 0; absent ones are no parameters."""
    module = sb.StickBreakingSelfAttention(48, 6, remainder_bias=True, head_norm=True, dtype=torch.float64)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    values = {name: getattr(module, name).unique().tolist() for name in ("remainder_bias", "norm_weight", "norm_bias")}
    assert values == {"remainder_bias": [0.0], "norm_weight": [1.0], "norm_bias": [0.0]}
    assert module.remainder_bias.shape == (48,)
    plain = sb.StickBreakingSelfAttention(48, 6, device="meta")
    assert [name for name, _ in plain.named_parameters()] == ["qkv_proj.weight", "out_proj.weight"]
    assert plain.qkv_proj.weight.is_meta
    assert "num_kv_heads=6, head_dim=8, remainder_bias=False, head_norm=False" in repr(plain)


BAD_SIZES = {
    "no width": ((0, 4), {}, "hidden_size 0"),
    "heads no int": ((64, 4.0), {}, "num_heads 4.0"),
    "negative KV heads": ((64, 4, -2), {}, "num_kv_heads -2"),
    "head_dim a bool": ((64, 4), {"head_dim": True}, "head_dim True"),
    "KV heads that do not divide": ((64, 4, 3), {}, "num_kv_heads 3"),
    "heads that do not divide": ((66, 4), {}, "hidden_size 66"),
    "odd head_dim": ((48, 4), {}, "hidden_size num_heads 12"),
    "large head_dim": ((64, 4), {"head_dim": 264}, "head_dim 264"),
}


@pytest.mark.parametrize(("sizes", "options", "sentence"), BAD_SIZES.values(), ids=BAD_SIZES)
def test_refused_sizes(sizes, options, sentence):
    with pytest.raises(ValueError, match=mentions(sentence)):
        sb.StickBreakingSelfAttention(*sizes, **options)


BAD_OPTIONS = {
    "scale that should learn": (
        {"scale": torch.nn.Parameter(torch.ones(()))},
        TypeError,
        "scale Parameter",
    ),
    "scale": ({"scale": float("inf")}, ValueError, "scale inf"),
    "eps": ({"norm_eps": None}, TypeError, "norm_eps NoneType"),
    "loss": ({"forget_gate_loss": float("nan")}, ValueError, "forget_gate_loss nan"),
    "flag": ({"attend_current": None}, TypeError, "attend_current NoneType"),
    "threshold": (
        {"mass_threshold": 2.0},
        ValueError,
        "mass_threshold 2.0",
    ),
    "threshold nan": ({"mass_threshold": float("nan")}, ValueError, "mass_threshold nan"),
    "no threshold": ({"mass_threshold": None}, TypeError, "mass_threshold NoneType"),
}


@pytest.mark.parametrize(("options", "kind", "sentence"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_refused_options(options, kind, sentence):
    """When the module is made, not by its first call."""
    with pytest.raises(kind, match=mentions(sentence)):
        sb.StickBreakingSelfAttention(48, 6, **options)


CU = torch.tensor([0, 6], dtype=torch.int32)
BAD_CALLS = {
    "x no tensor": (([1.0],), {}, TypeError, "x list"),
    "packed without offsets": (
        (torch.zeros(6, 48),),
        {},
        ValueError,
        "x (6, 48)",
    ),
    "dense with offsets": (
        (torch.zeros(1, 6, 48),),
        {"cu_seqlens": CU},
        ValueError,
        "x (1, 6, 48)",
    ),
    "width": ((torch.zeros(1, 6, 40),), {}, ValueError, "x (1, 6, 40)"),
    "plan": ((torch.zeros(1, 6, 48),), {"plan": 2}, TypeError, "plan int"),
}


@pytest.mark.parametrize(("args", "options", "kind", "sentence"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_refused_calls(args, options, kind, sentence):
    with pytest.raises(kind, match=mentions(sentence)):
        make_module()(*args, **options)


def test_sequences_over_two_ranks(tmp_path):
    """Answers, and gradients summed over the ranks, are those of whole sequences."""
    found = run_worker("self_attention.py", 2, tmp_path / "found.json")
    assert {name: case["parameters"] for name, case in found.items()} == {
        **dict.fromkeys(("dense", "ring", "contiguous", "packed", "plan"), 5),
        "norm alone": 4,
        "gates": 7,
        "gates, plan": 7,
    }
    errors = {name: max(case["out"], case["gradients"]) for name, case in found.items()}
    assert {name: error for name, error in errors.items() if not error < 2e-4} == {}


@pytest.mark.gpu
def test_on_a_gpu():
    """bfloat16 beside the same module in float64's formula."""
    module = make_module(256, 4, 2, remainder_bias=True, head_norm=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16)
    oracle = expected(module, x, remainder_bias=True, head_norm=True)
    assert (module(x).double() - oracle).norm() < 0.02 * oracle.norm()
