"""Forget gates: how they are made from hidden states, and the loss that keeps them open unless closing them pays.

beta_ij = f_i * sigmoid(z_ij),  f = sigmoid(a), a a projection of the key's own hidden state, per key and KV head.
"""

import torch
from torch import Tensor

# The bias of a at first: f = 0.993, so that training begins with the attention it would have without gates, and f's
# derivative, f (1 - f) = 0.007, is still large enough to learn by.
OPEN_GATE = 5.0
_LEAST = 2.0**-64  # of f in the loss, whose logarithm is to stay finite


class _AddToBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


def add_to_backward(x: Tensor, loss: Tensor) -> Tensor:
    """x as it is; in the backward a scalar loss takes part as if it had been added to the loss that x ends in.

    So it needs no way through the model to that loss, which must not be scaled then, or `loss` alike.
    """
    return _AddToBackward.apply(x, loss)


def gates_of(logits: Tensor) -> Tensor:
    """f = sigmoid(logits) in fp32 (fp64 for fp64), which holds 1 - f of a gate that is nearly open."""
    return (logits if logits.dtype == torch.float64 else logits.float()).sigmoid()


def forget_gate_loss(f: Tensor) -> Tensor:
    """mean(-log f): 0 where every gate is open. By its logit a gate is pushed with 1 - f, at most 1, towards open."""
    return -f.clamp_min(_LEAST).log().mean()


def keep_gates_open(f: Tensor, coefficient: float) -> Tensor:
    """f as it is, with coefficient * forget_gate_loss(f) added to the backward."""
    return add_to_backward(f, coefficient * forget_gate_loss(f))
