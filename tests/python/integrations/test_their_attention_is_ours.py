"""flash-linear-attention's function, and the modules that call it, compute with this library."""

import sys

import pytest
import torch
from support.inputs import make_inputs

from megatron_sb import compat, reference
from megatron_sb.integrations import flash_linear_attention

fla = pytest.importorskip("fla.ops.stickbreaking_attn", reason="needs flash-linear-attention")
NAME = "parallel_stickbreaking_attn"


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    flash_linear_attention.uninstall()


def assert_computes_stickbreaking_attention(function) -> None:
    """Compare outputs, remainders and the gradient of q with the float64 reference."""
    x = make_inputs("randn", s=90, h=4, h_kv=2, d=16, dtype=torch.float32)
    q = x.q.clone().requires_grad_()
    o, rem = function(q, x.k, x.v, attend_current=True)
    exact_q = x.q.double().requires_grad_()
    exact, mass = reference.stickbreaking_attention(
        exact_q, x.k.double(), x.v.double(), attend_current=True, return_mass=True
    )
    torch.testing.assert_close(o.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rem.double(), mass.transpose(1, 2), rtol=1e-4, atol=1e-5)
    (dq,) = torch.autograd.grad(o, q, x.do)
    (exact_dq,) = torch.autograd.grad(exact, exact_q, x.do.double())
    torch.testing.assert_close(dq.double(), exact_dq, rtol=1e-3, atol=1e-4)


def test_every_module_gets_the_function_and_gives_it_back():
    theirs = getattr(fla, NAME)
    flash_linear_attention.install()
    flash_linear_attention.install()  # changes nothing
    layer = sys.modules["fla.layers.stickbreaking_attn"]
    for module in (fla, layer, sys.modules["fla.ops.stickbreaking_attn.parallel"]):
        assert getattr(module, NAME) is compat.parallel_stickbreaking_attn
    assert_computes_stickbreaking_attention(getattr(layer, NAME))
    flash_linear_attention.uninstall()
    for module in (fla, layer, sys.modules["fla.ops.stickbreaking_attn.parallel"]):
        assert getattr(module, NAME) is theirs


def test_a_release_that_dispatches_to_backends(monkeypatch):
    """The function itself stays in its modules. It calls this library until `uninstall`."""
    backends = pytest.importorskip("fla.backends", reason="needs a release that dispatches to backends")

    def parallel_stickbreaking_attn(*args, **kwargs):
        return "their result"

    dispatched = backends.dispatch(parallel_stickbreaking_attn)
    monkeypatch.setattr(fla, NAME, dispatched)
    assert dispatched() == "their result"
    flash_linear_attention.install()
    assert getattr(fla, NAME) is dispatched
    assert_computes_stickbreaking_attention(dispatched)
    flash_linear_attention.uninstall()
    assert dispatched() == "their result"


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.stickbreaking_attn", None)
    with pytest.raises(ModuleNotFoundError, match="pip install flash-linear-attention"):
        flash_linear_attention.install()


@pytest.mark.gpu
def test_a_model_has_the_same_logits():
    """A model of the package computes the logits of its own kernels, within the rounding of bf16."""
    from fla.models import StickBreakingAttentionConfig, StickBreakingAttentionForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_heads": 4, "num_hidden_layers": 2, "vocab_size": 512}
    model = StickBreakingAttentionForCausalLM(StickBreakingAttentionConfig(**sizes)).eval().cuda().bfloat16()
    ids = torch.randint(512, (2, 700), device="cuda")
    with torch.no_grad():
        theirs = model(ids).logits.float()
        flash_linear_attention.install()
        ours = model(ids).logits.float()
    assert (ours - theirs).std() < 0.03 * theirs.std()


@pytest.mark.parametrize(
    ("shapes", "packed", "message"),
    [
        ([(1, 1, 3, 16), (1, 1, 2, 16), (1, 1, 2, 16)], False, "must be divisible"),
        ([(1, 1, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16)], False, "Expected q, k and v of shapes"),
        ([(1, 8, 2, 257), (1, 8, 2, 257), (1, 8, 2, 64)], False, "key dimension"),
        ([(1, 8, 2, 64), (1, 8, 2, 64), (1, 8, 2, 257)], False, "value dimension"),
        ([(2, 8, 2, 16), (2, 8, 2, 16), (2, 8, 2, 16)], True, "batch size is expected to be 1"),
    ],
    ids=["heads", "shapes", "key dimension", "value dimension", "packed"],
)
def test_errors_have_the_words_that_their_tests_expect(shapes, packed, message):
    """Both functions raise them."""
    theirs = getattr(fla, NAME)
    options = {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)} if packed else {}
    for function in (theirs, compat.parallel_stickbreaking_attn):
        with pytest.raises(ValueError, match=message):
            function(*(torch.zeros(shape) for shape in shapes), **options)
