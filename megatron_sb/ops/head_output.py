"""The remainder and the head norm, applied to the output of the attention in one pass."""

import torch
from torch import Tensor

from megatron_sb.validation import check_number, check_optional_tensors, check_tensor


def head_output(
    o: Tensor,
    mass: Tensor | None,
    remainder_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """Add the remainder to an attention's output, normalise each head, or do both.

    The remainder is the mass P_j times a vector for each head: x_j = o_j + P_j r with r = remainder_bias (paper
    eq. 14). The norm is a group norm with one group for each head:
    (x_j - mean(x_j)) / sqrt(var(x_j) + eps) * norm_weight + norm_bias, where mean and var are over the d channels of
    one position and head. The result is computed in fp32 (fp64 for fp64) and rounded once. The function can be
    differentiated once.

    Args:
        o: (b, s, h, d), or packed (t, h, d), as an attention function returns it. bf16, fp16 or fp32, on CPU also fp64.
            d is a multiple of 8 and at most 256.
        mass: (b, h, s), or packed (h, t), fp32 (fp64 for fp64), as an attention function returns it. Required with
            remainder_bias, and ignored without it.
        remainder_bias: r, (h * d,), in any of o's dtypes. Default: no remainder.
        norm_weight: (h * d,), in any of o's dtypes. Default: no norm.
        norm_bias: (h * d,), in any of o's dtypes. Valid only with norm_weight. Default: 0.
        eps: number that is added to the variance, at least 1e-30. Default: 1e-5.

    Returns:
        A tensor with o's shape and dtype. Each gradient has its argument's dtype.

    Raises:
        TypeError: If an argument has a wrong type or dtype.
        ValueError: If an argument has a wrong shape, device or value, or if both remainder_bias and norm_weight are
            None. Nothing is computed in either case.

    Example:
        >>> import torch
        >>> import megatron_sb as sb
        >>> q, k, v = (torch.randn(1, 16, 4, 32) for _ in range(3))
        >>> o, mass = sb.stickbreaking_attention(q, k, v, return_mass=True)
        >>> r, weight = torch.zeros(4 * 32), torch.ones(4 * 32)
        >>> sb.head_output(o, mass, remainder_bias=r, norm_weight=weight).shape
        torch.Size([1, 16, 4, 32])
    """
    check_tensor("o", o)
    check_number("eps", eps)
    check_optional_tensors(
        {"mass": mass, "remainder_bias": remainder_bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    )
    return torch.ops.megatron_sb.head_output(o, mass, remainder_bias, norm_weight, norm_bias, eps=eps)
