"""Forget gates, and the auxiliary loss that keeps them open.

beta_ij = f_i * sigmoid(z_ij) with f = sigmoid(a), where a is a projection of the key's own hidden state, one value for
each key and KV head.
"""

import torch
from torch import Tensor

# First value of the bias of a. Gates of f = 0.993 leave the attention nearly as it is without gates, and the
# derivative f (1 - f) = 0.007 is still large enough to learn from.
OPEN_GATE = 5.0
_MIN_GATE = 2.0**-64  # Keeps the logarithm of f in the loss finite.


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
    """Return x; in the backward, act as if loss had been added to the main loss.

    The model need not return the auxiliary loss. If you scale the main loss, scale this one equally.

    Args:
        x: Any tensor that the main loss depends on.
        loss: Scalar auxiliary loss.

    Returns:
        x, as a view.

    Example:
        >>> import torch
        >>> from megatron_sb.nn.gates import add_to_backward
        >>> x = torch.ones(2, requires_grad=True)
        >>> add_to_backward(x, (2 * x).sum()).sum().backward()
        >>> x.grad
        tensor([3., 3.])
    """
    return _AddToBackward.apply(x, loss)


def gates_of(logits: Tensor) -> Tensor:
    """Return f = sigmoid(logits) in fp32 (fp64 for fp64), which keeps 1 - f of a gate that is nearly open."""
    return (logits if logits.dtype == torch.float64 else logits.float()).sigmoid()


def forget_gate_loss(f: Tensor) -> Tensor:
    """Return mean(-log f). It is 0 if every gate is open; its gradient pushes a gate's logit up by 1 - f."""
    return -f.clamp_min(_MIN_GATE).log().mean()


def keep_gates_open(f: Tensor, coefficient: float) -> Tensor:
    """Return f; in the backward, add coefficient * forget_gate_loss(f) to the main loss."""
    return add_to_backward(f, coefficient * forget_gate_loss(f))
