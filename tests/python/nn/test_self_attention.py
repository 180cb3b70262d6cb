"""StickBreakingSelfAttention: accuracy against float64, parameters, invalid arguments, and context parallelism."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
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
    "reach": {"reach": (0.5, 8.0)},
    "all": {
        "forget_gate": True,
        "bias": True,
        "remainder_bias": True,
        "head_norm": True,
        "attend_current": True,
        "scale": 0.4,
        "reach": (6.0, 0.3),
    },
}
switches = pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)


def make_module(*sizes, **options):
    """Return a module with random parameters. The initial values of some are 0 or 1, which would hide an error."""
    module = sb.StickBreakingSelfAttention(*(sizes or (48, 6, 2)), **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def expected(
    module, x, cu_seqlens=None, *, remainder_bias=False, head_norm=False, bias=False, forget_gate=False, **options
):
    """Compute the output of the module from its definition, in float64."""
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


class TestForward:
    """Outputs agree with float64 for all options and forms of inputs, and all parameters get gradients."""

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
        """head_dim need not be hidden_size / num_heads, and there may be one KV head."""
        module = make_module(40, 3, 1, 64, remainder_bias=True, dtype=torch.bfloat16)
        x = torch.randn(1, 20, 40, dtype=torch.bfloat16)
        out = module(x)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        oracle = expected(module, x, remainder_bias=True)
        assert (out.double() - oracle).norm() < 0.02 * oracle.norm()

    @switches
    @pytest.mark.parametrize("rows", [(2, 0), (0, 5), (0,)], ids=str)
    def test_no_rows(self, rows, switches):
        """An input without sequences, positions or tokens gives an empty output and gradients of 0."""
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
        """With fp32 parameters, the output under autocast has bfloat16 and its precision."""
        module, x = make_module(remainder_bias=True, head_norm=True), torch.randn(2, 20, 48)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16
        assert (out - module(x)).norm() < 0.03 * module(x).norm()

    def test_compile(self):
        module, x = make_module(remainder_bias=True, head_norm=True), torch.randn(2, 20, 48)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(
        "options",
        [
            {"scale": np.float64(0.3), "mass_threshold": np.float32(1e-6)},
            {"reach": (np.float32(0.5), np.int64(3))},
            {"head_norm": True, "norm_eps": np.float64(1e-4)},
            {"forget_gate": True, "forget_gate_loss": np.float32(0.1)},
        ],
        ids=lambda options: list(options)[-1],
    )
    def test_compile_with_numbers_of_numpy(self, options):
        module, x = make_module(**options), torch.randn(2, 20, 48)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-6, atol=1e-6)

    def test_options_reach_the_operator(self, monkeypatch):
        """The module requests the mass only if it has a remainder bias."""
        passed = {}
        monkeypatch.setattr(
            self_attention, "stickbreaking_attention", lambda q, *rest, **kwargs: passed.update(kwargs) or q
        )
        make_module(head_norm=True, mass_threshold=0.5)(torch.randn(1, 9, 48))
        options = {"scale": None, "attend_current": False, "mass_threshold": 0.5, "return_mass": False}
        assert passed == {**options, "logits": "dot", "reach": None, "forget_gate": None}


def test_initial_parameters():
    """The remainder bias is 0, and the norm has weight 1 and bias 0. Without these options there are no parameters."""
    module = sb.StickBreakingSelfAttention(48, 6, remainder_bias=True, head_norm=True, dtype=torch.float64)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    values = {name: getattr(module, name).unique().tolist() for name in ("remainder_bias", "norm_weight", "norm_bias")}
    assert values == {"remainder_bias": [0.0], "norm_weight": [1.0], "norm_bias": [0.0]}
    assert module.remainder_bias.shape == (48,)
    plain = sb.StickBreakingSelfAttention(48, 6, device="meta")
    assert [name for name, _ in plain.named_parameters()] == ["qkv_proj.weight", "out_proj.weight"]
    assert plain.qkv_proj.weight.is_meta
    assert "num_kv_heads=6, head_dim=8, remainder_bias=False, head_norm=False" in repr(plain)


INVALID_SIZES = {
    "hidden_size of 0": ((0, 4), {}, "hidden_size 0"),
    "num_heads is a float": ((64, 4.0), {}, "num_heads 4.0"),
    "negative num_kv_heads": ((64, 4, -2), {}, "num_kv_heads -2"),
    "head_dim is a bool": ((64, 4), {"head_dim": True}, "head_dim True"),
    "num_kv_heads does not divide num_heads": ((64, 4, 3), {}, "num_kv_heads 3"),
    "num_heads does not divide hidden_size": ((66, 4), {}, "hidden_size 66"),
    "head_dim is no multiple of 8": ((48, 4), {}, "hidden_size num_heads 12"),
    "head_dim above 256": ((64, 4), {"head_dim": 264}, "head_dim 264"),
    "head_dim above 248": ((64, 4), {"head_dim": 256, "logits": "euclidean"}, "head_dim 248 Euclidean 256"),
}


@pytest.mark.parametrize(("sizes", "options", "words"), INVALID_SIZES.values(), ids=INVALID_SIZES)
def test_an_invalid_size_raises_an_error(sizes, options, words):
    with pytest.raises(ValueError, match=mentions(words)):
        sb.StickBreakingSelfAttention(*sizes, **options)


INVALID_OPTIONS = {
    "scale is a parameter": ({"scale": torch.nn.Parameter(torch.ones(()))}, TypeError, "scale Parameter"),
    "scale is infinite": ({"scale": float("inf")}, ValueError, "scale inf"),
    "norm_eps is None": ({"norm_eps": None}, TypeError, "norm_eps NoneType"),
    "norm_eps of 0": ({"norm_eps": 0.0}, ValueError, "norm_eps 1e-30 0.0"),
    "norm_eps is infinite": ({"norm_eps": float("inf")}, ValueError, "norm_eps inf"),
    "forget_gate_loss is NaN": ({"forget_gate_loss": float("nan")}, ValueError, "forget_gate_loss nan"),
    "attend_current is None": ({"attend_current": None}, TypeError, "attend_current NoneType"),
    "mass_threshold of 2": ({"mass_threshold": 2.0}, ValueError, "mass_threshold 2.0"),
    "mass_threshold is NaN": ({"mass_threshold": float("nan")}, ValueError, "mass_threshold nan"),
    "mass_threshold is None": ({"mass_threshold": None}, TypeError, "mass_threshold NoneType"),
    "bias is a string": ({"bias": "no"}, TypeError, "bias True False str"),
    "unknown layout": ({"layout": "bar"}, ValueError, "layout 'zigzag' 'contiguous' 'bar'"),
    "unknown comm": ({"comm": "foo"}, ValueError, "comm 'all_gather' 'a2a' 'foo'"),
    "cp_group is a string": ({"cp_group": "cp"}, TypeError, "cp_group ProcessGroup DeviceMesh str"),
    "comm of two groups": ({"comm": "a2a+p2p"}, ValueError, "comm 'all_gather' 'a2a' 'a2a+p2p'"),
}


@pytest.mark.parametrize(("options", "error", "words"), INVALID_OPTIONS.values(), ids=INVALID_OPTIONS)
def test_an_invalid_option_raises_an_error_in_the_constructor(options, error, words):
    with pytest.raises(error, match=mentions(words)):
        sb.StickBreakingSelfAttention(48, 6, **options)


CU = torch.tensor([0, 6], dtype=torch.int32)
INVALID_CALLS = {
    "x is a list": ([1.0], {}, TypeError, "x list"),
    "packed x without cu_seqlens": (torch.zeros(6, 48), {}, ValueError, "x (6, 48)"),
    "dense x with cu_seqlens": (torch.zeros(1, 6, 48), {"cu_seqlens": CU}, ValueError, "x (1, 6, 48)"),
    "width of x": (torch.zeros(1, 6, 40), {}, ValueError, "x (1, 6, 40)"),
    "dtype of x": (torch.zeros(1, 6, 48).double(), {}, TypeError, "x torch.float32 torch.float64"),
    "x of integers": (torch.zeros(1, 6, 48).long(), {}, TypeError, "x torch.float32 torch.int64"),
    "plan is an int": (torch.zeros(1, 6, 48), {"plan": 2}, TypeError, "plan int"),
}


@pytest.mark.parametrize(("x", "options", "error", "words"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_an_invalid_call_raises_an_error(x, options, error, words):
    with pytest.raises(error, match=mentions(words)):
        make_module()(x, **options)


def test_x_on_another_device_raises_an_error():
    with pytest.raises(ValueError, match=mentions("x on cpu meta")):
        make_module(bias=True)(torch.zeros(1, 6, 48, device="meta"))  # without a bias, torch accepts the device meta


def test_an_error_of_another_projection_is_not_changed():
    """A module that takes the place of qkv_proj chooses its own dtypes."""
    module = make_module()
    module.qkv_proj = torch.nn.Sequential(module.qkv_proj)
    with pytest.raises(RuntimeError, match="same dtype"):
        module(torch.zeros(1, 6, 48).double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert make_module(dtype=torch.bfloat16)(torch.zeros(1, 6, 48)).dtype == torch.bfloat16
        with pytest.raises(TypeError, match=mentions("x torch.float32 torch.float64")):
            make_module()(torch.zeros(1, 6, 48).double())  # which autocast does not convert


def test_two_ranks_give_the_results_of_one(tmp_path):
    """Outputs, and gradients summed over the ranks, are equal to those of whole sequences."""
    found = run_worker("self_attention.py", 2, tmp_path / "found.json")
    assert {name: case["parameters"] for name, case in found.items()} == {
        **dict.fromkeys(("dense", "ring", "contiguous", "balanced", "packed", "plan"), 5),
        "norm alone": 4,
        **dict.fromkeys(("gates", "gates, plan", "gates, shared sequence"), 7),
        **dict.fromkeys(("gates, unequal ranks", "gates, a rank without rows", "gates, unequal ranks, plan"), 7),
    }
    errors = {(name, what): case[what] for name, case in found.items() for what in ("out", "gradients")}
    assert {name: error for name, error in errors.items() if not error < 2e-4} == {}


@pytest.fixture
def group():
    """Return a process group with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_copy_has_its_own_parameters_and_shares_the_group(group):
    module, x = make_module(cp_group=group, forget_gate=True), torch.randn(1, 8, 48)
    expected_out = module(x)
    copied = copy.deepcopy(torch.nn.Sequential(module, module))
    assert copied[0] is copied[1] and copied[0].cp_group is group
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(copied[0](x), expected_out)


def test_a_layer_with_other_documents_than_a_shared_sequence_is_refused(group):
    """Its own plan would let the documents of the shared sequence attend to each other."""
    x, plan = torch.randn(1, 6, 48), sb.ContextParallelPlan(group, cu_seqlens=torch.tensor([0, 2, 6]).int())
    module, alone = make_module(cp_group=group), make_module()
    module.load_state_dict(alone.state_dict())
    with sb.shared_sequence(plan, x) as (local,):
        with pytest.raises(ValueError, match=mentions("cp_group None shared_sequence")):
            module(local)
        with pytest.raises(ValueError, match=mentions("plan None shared_sequence seq_len=6")):
            alone(local, plan=sb.ContextParallelPlan(group, seq_len=6))
        assert torch.equal(module(local[0], plan=plan), alone(local)[0])


@pytest.mark.gpu
def test_on_a_gpu():
    """The output in bfloat16 agrees with the definition in float64."""
    module = make_module(256, 4, 2, remainder_bias=True, head_norm=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16)
    oracle = expected(module, x, remainder_bias=True, head_norm=True)
    assert (module(x).double() - oracle).norm() < 0.02 * oracle.norm()
