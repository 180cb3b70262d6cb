"""Stick-breaking attention on one device, dense.

z_ij = scale * q_j . k_i,  beta = sigmoid(z),  A_ij = beta_ij * prod_{i<k<j} (1 - beta_kj)     (paper eq. 1)
o_j = sum_i A_ij v_i,      mass_j = prod_k (1 - beta_kj) = 1 - sum_i A_ij, the stick that is left

Variants of the logit: z_ij = -scale * |q_j - k_i|^2 (logits="euclidean"), beta_ij = f_i * sigmoid(z_ij) (forget_gate).
"""

import torch
from torch import Tensor

from megatron_sb.options import DEFAULT_MASS_THRESHOLD, check_options, variant_arguments
from megatron_sb.validation import check_tensor


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend by breaking a stick over the keys, newest first (Tan et al., arXiv 2410.17980, eq. 1).

    Differentiable once; no position embedding is needed. Strides are taken as they are where the last one is 1.

    Args:
        q: (b, s, h, d), in bf16, fp16, fp32, or fp64 on CPU. d: a multiple of 8 up to 256.
        k: (b, s_k, h_kv, d), s_k >= s: the queries are the last s positions. h is a multiple of h_kv; query head i
            reads key head i // (h / h_kv).
        v: (b, s_k, h_kv, d_v).
        scale: factor of the logits, a number: what should learn multiplies q. 1 / sqrt(d) by default, and 1 for
            Euclidean ones.
        attend_current: let position j attend to itself too (keys i <= j instead of i < j).
        mass_threshold: a row whose mass is below this is used up; older keys that only such rows see are skipped.
            Changes o by at most mass_threshold * max |v|. 0 turns skipping off.
        return_mass: return the mass too.
        logits: "dot", z_ij = scale * q_j . k_i, or "euclidean", z_ij = -scale * |q_j - k_i|^2 (NU-CS-2024-15); the
            latter takes 8 more columns of q and k, so that d is 248 at most.
        forget_gate: f (b, s_k, h_kv) in (0, 1], for beta_ij = f_i * sigmoid(z_ij), in q's dtype or in fp32 (fp64 for
            fp64), which keeps 1 - f of a gate that is nearly open; clamped to [0, 1]. Its gradient is rounded to q's
            dtype.

    Returns:
        o (b, s, h, d_v) in q's dtype; with return_mass also mass (b, h, s), fp32 (fp64 for fp64). Once a row is used up
        its mass is somewhere in [0, mass_threshold].

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
    check_options(scale, attend_current, mass_threshold)
    o, mass = torch.ops.megatron_sb.attention(
        q,
        k,
        v,
        scale=scale,
        attend_current=attend_current,
        mass_threshold=mass_threshold,
        **variant_arguments(logits, forget_gate),
    )
    return (o, mass) if return_mass else o
