"""What may follow the attention head by head: remainder bias and group norm."""

import torch
from torch import Tensor

from megatron_sb.validation import check_number, check_tensor


def head_output(
    o: Tensor,
    mass: Tensor | None,
    remainder_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """Add what the stick that is left carries to an attention's output, and normalise each head; both, or one of them.

    x_j = o_j + P_j r, P the mass and r = remainder_bias (paper eq. 14); then, where there is a norm_weight, group norm
    with one group per head: (x_j - mean(x_j)) / sqrt(var(x_j) + eps) * norm_weight + norm_bias, mean and variance over
    the d channels of a position and head. Computed in fp32 (fp64 for fp64) and rounded once. Differentiable once.

    Args:
        o: (b, s, h, d), or packed (t, h, d), as an attention returns it; bf16, fp16, fp32, or fp64 on CPU. d: a
            multiple of 8 up to 256.
        mass: (b, h, s), or packed (h, t), fp32 (fp64 for fp64), as an attention returns it; needed with remainder_bias
            and not read without.
        remainder_bias: r, (h * d,), of any of these dtypes, as the next two.
        norm_weight: (h * d,).
        norm_bias: (h * d,), only with norm_weight; 0 by default.
        eps: added to the variance.

    Returns:
        A tensor of o's shape and dtype. Gradients come in each argument's dtype.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs.
    """
    check_tensor("o", o)
    check_number("eps", eps)
    for name, value in (
        ("mass", mass),
        ("remainder_bias", remainder_bias),
        ("norm_weight", norm_weight),
        ("norm_bias", norm_bias),
    ):
        if value is not None:
            check_tensor(name, value)
    return torch.ops.megatron_sb.head_output(o, mass, remainder_bias, norm_weight, norm_bias, eps=eps)
