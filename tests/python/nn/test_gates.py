"""Forget gates of modules, and the auxiliary loss that keeps them open."""

import math

import numpy as np
import pytest
import torch
from support.messages import mentions

import megatron_sb as sb
from megatron_sb.nn.gates import OPEN_GATE, add_to_backward, forget_gate_loss, gates_of, keep_gates_open


def test_keep_gates_open_adds_the_gradient_of_its_loss():
    """It returns its input unchanged."""
    logits = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 5, 2, dtype=torch.float64)
    f = gates_of(logits)
    returned = keep_gates_open(f, 0.3)
    assert torch.equal(returned, f)
    (actual,) = torch.autograd.grad((returned * weights).sum(), logits)
    loss = (gates_of(logits) * weights).sum() - 0.3 * torch.nn.functional.logsigmoid(logits).mean()
    (expected,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(actual, expected)


def test_the_loss_is_zero_for_open_gates_and_finite_for_closed_ones():
    assert forget_gate_loss(torch.ones(4)) == 0
    assert forget_gate_loss(torch.zeros(4)).isfinite()
    assert forget_gate_loss(torch.ones(2, 0)) == 0  # of a rank without rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_of_half_precision_gates_is_computed_in_fp32(dtype):
    """The smallest gate of the logarithm is 0 in fp16, and a mean in bf16 has three digits."""
    f = torch.full((1000,), 0.75, dtype=dtype)
    f[0] = 0.0
    loss = forget_gate_loss(f)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((64 * math.log(2) - 999 * math.log(0.75)) / 1000, rel=1e-5)
    f.requires_grad_()
    keep_gates_open(f, 0.1).sum().backward()
    assert f.grad.dtype == dtype and f.grad.isfinite().all()


def test_a_loss_may_have_one_dimension():
    """Megatron's loss scale has the shape (1,), and so has a loss that it multiplies."""
    x = torch.ones(2, requires_grad=True)
    add_to_backward(x, torch.ones(1) * (2 * x).sum()).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_add_to_backward_adds_the_gradient_of_a_loss():
    x = torch.ones(2, requires_grad=True)
    add_to_backward(x, (x * 2).sum()).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_a_module_starts_with_open_gates():
    """The initial bias is OPEN_GATE. The module keeps the value of the loss for logging."""
    module = sb.StickBreakingSelfAttention(32, 4, 2, forget_gate=True, forget_gate_loss=0.1)
    assert module.gate_proj.weight.shape == (2, 32) and module.gate_proj.bias.tolist() == [OPEN_GATE] * 2
    module(torch.randn(1, 9, 32)).sum().backward()
    assert 0 < module.gate_loss.item() < 0.05 and not module.gate_loss.requires_grad
    assert module.gate_proj.bias.grad.abs().min() > 0


def test_vmap_of_a_module_with_an_auxiliary_loss():
    """Gradients are those of one call after the other."""
    options = {"forget_gate": True, "forget_gate_loss": 0.1, "dtype": torch.float64}
    module, x = sb.StickBreakingSelfAttention(32, 4, 2, **options), torch.randn(3, 2, 9, 32, dtype=torch.float64)
    each = torch.stack([module(part) for part in x])
    expected = torch.autograd.grad(each.square().sum(), list(module.parameters()))
    out = torch.vmap(module)(x)
    torch.testing.assert_close(out, each)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), list(module.parameters())), expected)


def test_gates_are_open_after_every_module_was_reset():
    """FSDP and other programs that build models on the meta device reset all modules, the layer before its parts."""
    module = sb.StickBreakingSelfAttention(32, 4, 2, forget_gate=True, device="meta").to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert module.gate_proj.bias.tolist() == [OPEN_GATE] * 2


def test_training_closes_gates_of_useless_keys_only():
    """One kind of keys has the target and another kind has noise. The loss opens the gates of the first kind."""
    torch.manual_seed(0)
    module = sb.StickBreakingSelfAttention(16, 1, forget_gate=True, forget_gate_loss=0.05, dtype=torch.float64)
    x = torch.zeros(1, 12, 16, dtype=torch.float64)
    x[:, ::3, 0], x[:, 1::3, 1], x[:, 2::3, 2] = 1.0, 1.0, 1.0  # a key with the target, a key with noise, a query
    with torch.no_grad():
        module.gate_proj.bias.zero_()
        module.gate_proj.weight.zero_()
        target = module.qkv_proj.weight[32:, 0] @ module.out_proj.weight.T
    optimizer = torch.optim.Adam(module.gate_proj.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        (module(x)[:, 2::3] - target).square().sum().backward()
        optimizer.step()
    f = gates_of(module.gate_proj(x))[0, :, 0]
    assert f[0::3].min() > 0.8 and f[1::3].max() < 0.2, f


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: gates_of([0.0]), TypeError, "logits torch.Tensor list"),
        (lambda: forget_gate_loss(0.5), TypeError, "f torch.Tensor float"),
        (lambda: keep_gates_open([0.5], 0.1), TypeError, "f torch.Tensor list"),
        (lambda: keep_gates_open(torch.ones(2), math.nan), ValueError, "coefficient finite nan"),
        (lambda: keep_gates_open(torch.ones(2), torch.ones(())), TypeError, "coefficient finite Tensor"),
        (lambda: add_to_backward([1.0], torch.ones(())), TypeError, "x torch.Tensor list"),
        (lambda: add_to_backward(torch.ones(2), 1.0), TypeError, "loss torch.Tensor float"),
        (lambda: add_to_backward(torch.ones(2), torch.ones(2)), ValueError, "loss scalar (2,)"),
    ],
)
def test_an_invalid_argument_raises_an_error(call, error, words):
    with pytest.raises(error, match=mentions(words)):
        call()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logits": "cosine"}, "logits 'cosine' 'dot' 'euclidean'"),
        ({"forget_gate_loss": 0.1}, "forget_gate_loss 0.1 forget_gate"),
        ({"forget_gate": True, "forget_gate_loss": -1.0}, "forget_gate_loss -1.0"),
        ({"forget_gate": True, "forget_gate_loss": np.float32("inf")}, "forget_gate_loss finite inf"),
    ],
)
def test_an_invalid_option_raises_an_error(options, words):
    with pytest.raises(ValueError, match=mentions(words)):
        sb.StickBreakingSelfAttention(32, 4, **options)
