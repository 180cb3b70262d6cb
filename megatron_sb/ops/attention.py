"""Stick-breaking attention on one device.

z_ij = scale * q_j . k_i,  beta = sigmoid(z),  A_ij = beta_ij * prod_{i<k<j} (1 - beta_kj)     (paper eq. 1)
o_j = sum_i A_ij v_i,      mass_j = prod_k (1 - beta_kj) = 1 - sum_i A_ij, the part of the stick that remains

Variants of the logit: z_ij = -scale * |q_j - k_i|^2 (logits="euclidean"), z_ij + query_bias_j + key_bias_i, an offset
of each head (reach), and beta_ij = f_i * sigmoid(z_ij) (forget_gate).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron_sb.options import DEFAULT_MASS_THRESHOLD, AttentionOptions
from megatron_sb.validation import check_flag, check_optional_tensors, check_tensor

# o, or (o, mass) with return_mass. With a union of both, type checkers would reject every use of a result.
Result: TypeAlias = Tensor | Any

# What `stickbreaking_attention` calls in `shared_sequence`. None outside.
over_ranks: Callable | None = None


def stickbreaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = DEFAULT_MASS_THRESHOLD,
    return_mass: bool = False,
    logits: str = "dot",
    forget_gate: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    reach: tuple[float, float] | None = None,
) -> Result:
    """Compute causal stick-breaking attention (Tan et al., arXiv 2410.17980, eq. 1).

    Each query has a stick of length 1, and each key, from the newest to the oldest, takes a part of it. The weights
    depend on the order of the keys, so no position embedding is needed. Tensors may have any strides. A tensor whose
    last stride is not 1 is copied. The function can be differentiated once.

    Args:
        q: (b, s, h, d), bf16, fp16 or fp32, on CPU also fp64. d is a multiple of 8 and at most 256.
        k: (b, s_k, h_kv, d) with s_k >= s, in q's dtype. The queries are the last s of the s_k positions. h is a
            multiple of h_kv; query head i reads KV head i // (h / h_kv).
        v: (b, s_k, h_kv, d_v), in q's dtype.
        scale: factor of the logits, a finite number. To learn a scale, multiply q by a parameter. Default: 1 / sqrt(d),
            and 1 for Euclidean logits. Models with Euclidean logits trained best with 0.5 / sqrt(d).
        attend_current: whether a query also attends to the key at its own position. Default: False.
        mass_threshold: number in [0, 1). The kernels skip older keys once the mass of every query in a tile is below
            this number. This changes o by at most mass_threshold * max |v|. 0 disables skipping. Default: 2^-24.
        return_mass: whether to return the mass as well. Default: False.
        logits: "dot" for z_ij = scale * q_j . k_i, or "euclidean" for z_ij = -scale * |q_j - k_i|^2 (NU-CS-2024-15).
            Euclidean logits need 8 more columns of q and k, so d is at most 248. Default: "dot".
        forget_gate: f, (b, s_k, h_kv), for beta_ij = f_i * sigmoid(z_ij), in q's dtype or in fp32 (fp64 for fp64). Use
            fp32 so that 1 - f of a nearly open gate is not lost. Values are clamped to [0, 1]. A value outside of this
            range has the gradient at the bound; with torch.clamp it would be 0. The gradient is rounded to q's dtype.
            Default: no gate.
        query_bias: (b, s, h), added to the logits of each query, in q's dtype or in fp32 (fp64 for fp64). The gradient
            is rounded to q's dtype. Biases use the 8 columns of Euclidean logits, so d is at most 248. The magnitude of
            scale must be at least 2^-64. Default: no bias.
        key_bias: (b, s_k, h_kv), added to the logits of each key, as query_bias. -inf hides the key. Default: no bias.
        reach: the reach a of the first and of the last head, from 1/64 to 64. The values of the other heads are evenly
            spaced between them, rounded to multiples of 2^-18. The logits of a head get the offset -log(2^a - 1), so
            that beta = 2^-a if z_ij without the offset is 0. Default: no offset.

    Returns:
        o, (b, s, h, d_v), in q's dtype. With return_mass, (o, mass), where mass (b, h, s) is fp32 (fp64 for fp64). A
        mass below mass_threshold is only known to lie in [0, mass_threshold].

    Raises:
        TypeError: If an argument has a wrong type or dtype.
        ValueError: If an argument has a wrong shape, device or value. Nothing is computed in either case.

    Example:
        >>> import torch
        >>> import megatron_sb as sb
        >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)
        >>> k, v = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)  # 2 KV heads for 8 query heads
        >>> o, mass = sb.stickbreaking_attention(q, k, v, return_mass=True)
        >>> o.shape, mass.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
        >>> o.sum().backward()
    """
    options = AttentionOptions(scale, attend_current, mass_threshold, logits, reach)
    check_flag("return_mass", return_mass)
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
    variants = {"forget_gate": forget_gate, "query_bias": query_bias, "key_bias": key_bias}
    check_optional_tensors(variants)
    if over_ranks is not None:
        return over_ranks(
            q,
            k,
            v,
            return_mass=return_mass,
            scale=scale,
            attend_current=attend_current,
            mass_threshold=mass_threshold,
            logits=logits,
            reach=reach,
            **variants,
        )
    o, mass = torch.ops.megatron_sb.attention(
        q,
        k,
        v,
        scale=options.scale,
        attend_current=options.attend_current,
        mass_threshold=options.mass_threshold,
        **variants,
        euclidean=options.logits == "euclidean",
        reach=options.reach,
    )
    return (o, mass) if return_mass else o
