"""Forget gates, and the auxiliary loss that keeps them open.

beta_ij = f_i * sigmoid(z_ij) with f = sigmoid(a). The logit a is a projection of the hidden state of the key, with one
value for each key and KV head.
"""

import torch
from torch import Tensor, nn

from megatron_sb.validation import check_finite, check_tensor

# Initial bias of a. With f = 0.993 the attention is close to attention without gates. The derivative f (1 - f) = 0.007
# is still large enough to learn from.
OPEN_GATE = 5.0
_MIN_GATE = 2.0**-64  # Keeps the logarithm of f in the loss finite.


class GateProjection(nn.Linear):
    """Compute the logits a of forget gates from hidden states. The bias starts at OPEN_GATE.

    The arguments are those of `nn.Linear`.

    Example:
        >>> from megatron_sb.nn.gates import GateProjection
        >>> GateProjection(64, 2).bias.tolist()
        [5.0, 5.0]
    """

    def reset_parameters(self) -> None:
        """Initialise the weight as `nn.Linear` does, and open the gates. FSDP calls this for parameters on meta."""
        super().reset_parameters()
        if self.bias is not None:
            nn.init.constant_(self.bias, OPEN_GATE)


class _AddToBackward(torch.autograd.Function):
    generate_vmap_rule = True  # torch.vmap needs it, and setup_context

    @staticmethod
    def forward(x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


def add_to_backward(x: Tensor, loss: Tensor) -> Tensor:
    """Return x; in the backward, act as if loss had been added to the main loss.

    The model need not return the auxiliary loss. If you scale the main loss, scale this one equally.

    Args:
        x: any tensor that the main loss depends on.
        loss: scalar auxiliary loss, a tensor with one element.

    Returns:
        x, as a view.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If loss does not have exactly one element.

    Example:
        >>> import torch
        >>> from megatron_sb.nn.gates import add_to_backward
        >>> x = torch.ones(2, requires_grad=True)
        >>> add_to_backward(x, (2 * x).sum()).sum().backward()
        >>> x.grad
        tensor([3., 3.])
    """
    check_tensor("x", x)
    check_tensor("loss", loss)
    if loss.numel() != 1:  # Megatron's loss scales, and so its losses, have the shape (1,)
        raise ValueError(f"loss must be a scalar, got shape {tuple(loss.shape)}. Reduce it, for example to its mean.")
    return _AddToBackward.apply(x, loss)


def gates_of(logits: Tensor) -> Tensor:
    """Return the gates f = sigmoid(logits) in fp32 (fp64 for fp64), so that 1 - f of a nearly open gate is not lost.

    Args:
        logits: a, of any shape.

    Returns:
        f, with the shape of logits.

    Example:
        >>> import torch
        >>> from megatron_sb.nn.gates import gates_of
        >>> gates_of(torch.zeros(2, dtype=torch.bfloat16))
        tensor([0.5000, 0.5000])
    """
    check_tensor("logits", logits)
    return wide(logits).sigmoid()


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or as it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()


def forget_gate_loss(f: Tensor) -> Tensor:
    """Return the auxiliary loss mean(-log f), which is 0 if every gate is open.

    The derivative by the logit of a gate is (f - 1) / n for n gates, so training pushes gates towards open.

    Args:
        f: gates in [0, 1], of any shape.

    Returns:
        A scalar in fp32 (fp64 for fp64). It is finite also for f = 0. Without gates it is 0.

    Example:
        >>> import torch
        >>> from megatron_sb.nn.gates import forget_gate_loss
        >>> forget_gate_loss(torch.tensor([1.0, 0.5]))
        tensor(0.3466)
    """
    check_tensor("f", f)
    closed = -wide(f).clamp_min(_MIN_GATE).log()  # the smallest gate would be 0 in fp16
    return closed.mean() if f.numel() else closed.sum()  # of a rank without rows


def keep_gates_open(f: Tensor, coefficient: float) -> Tensor:
    """Return f; in the backward, act as if coefficient * forget_gate_loss(f) had been added to the main loss.

    Args:
        f: gates in [0, 1], of any shape.
        coefficient: factor of the auxiliary loss, a finite number.

    Returns:
        f, as a view.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If coefficient is not finite.

    Example:
        >>> import torch
        >>> from megatron_sb.nn.gates import keep_gates_open
        >>> f = torch.tensor([0.5, 0.25], requires_grad=True)
        >>> keep_gates_open(f, 0.1).sum().backward()
        >>> f.grad  # 1 - 0.1 / (2 f)
        tensor([0.9000, 0.8000])
    """
    check_finite("coefficient", coefficient)
    return add_to_backward(f, coefficient * forget_gate_loss(f))
