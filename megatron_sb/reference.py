"""Compute stick-breaking attention in float64 from its definition. The tests compare every operator with it.

For query j and key i (Tan et al., Stick-breaking attention, arXiv 2410.17980, eq. 1), with z_ij = scale * q_j . k_i:

    beta_ij = sigmoid(z_ij)      log A_ij = log beta_ij + sum_{i<k<j} log(1 - beta_kj)      o_j = sum_i A_ij v_i

The mass is prod_k (1 - beta_kj), the part of the stick that remains after all keys. Euclidean logits are
z_ij = -scale * |q_j - k_i|^2. Biases of queries and keys, and an offset of each head, are added to z_ij. With a forget
gate, beta_ij = f_i * sigmoid(z_ij).

Sums of logarithms in float64 are accurate for logits of -30 over many thousand keys, and for a stick that the first key
uses up. This module shares no code with the operators, and autograd differentiates it. It is slow and stores the
weights of a block of queries for all keys, so it is practical up to about 16K keys.
"""

from itertools import pairwise
from math import trunc

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

_REACH_UNIT = 2.0**-18
_MAX_WEIGHTS_PER_BLOCK = 2**23  # weights in memory at a time: 64 MiB for each copy; autograd keeps about ten


def _reach_of_heads(first: float, last: float, num_heads: int) -> Tensor:
    """Return a of each head in float64: evenly spaced multiples of 2^-18, none of which is beyond `last`."""
    units = round(first / _REACH_UNIT)
    step = trunc((last / _REACH_UNIT - units) / max(1, num_heads - 1))
    return _REACH_UNIT * (units + step * torch.arange(num_heads, dtype=torch.float64))


def stickbreaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = 2**-24,
    return_mass: bool = False,
    logits: str = "dot",
    forget_gate: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    reach: tuple[float, float] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute stick-breaking attention in float64 from inputs of any dtype.

    Args:
        q: (b, s, h, d). If s < s_k, the queries are the last s positions.
        k: (b, s_k, h_kv, d), h a multiple of h_kv.
        v: (b, s_k, h_kv, d_v).
        scale: factor of the logits. Default None: 1/sqrt(d), or 1 for Euclidean logits.
        attend_current: whether a query also attends to the key at its own position. Default False.
        mass_threshold: ignored, because this function never skips keys.
        return_mass: whether to return the mass as well.
        logits: "dot" or "euclidean". Default "dot".
        forget_gate: (b, s_k, h_kv), f of each key, or None for 1.
        query_bias: (b, s, h), added to the logits of each query, or None for 0.
        key_bias: (b, s_k, h_kv), added to the logits of each key, or None for 0.
        reach: a of the first and the last head: beta is 2^-a where z_ij would be 0. Default None: no offset of z_ij.

    Returns:
        o: (b, s, h, d_v) float64. With return_mass also mass: (b, h, s) float64.

    Raises:
        ValueError: if there are more queries than keys, h is not a multiple of h_kv, or logits is unknown.

    Example:
        >>> import torch
        >>> from megatron_sb import reference
        >>> q, k, v = (torch.randn(1, 32, 2, 8) for _ in range(3))
        >>> reference.stickbreaking_attention(q, k, v).dtype
        torch.float64
    """
    del mass_threshold
    if logits not in ("dot", "euclidean"):
        raise ValueError(f"logits must be 'dot' or 'euclidean', got {logits!r}.")
    num_queries, num_heads, head_dim = q.shape[1:]
    num_keys, num_kv_heads = k.shape[1:3]
    if num_queries > num_keys:
        raise ValueError(f"q must have at most as many positions as k, {num_keys}, got {num_queries}.")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"The heads of q must be a multiple of {num_kv_heads}, the heads of k, got {num_heads}.")
    if scale is None:
        scale = 1.0 if logits == "euclidean" else head_dim**-0.5
    gate = k.new_ones(k.shape[:3]) if forget_gate is None else forget_gate
    of_query = q.new_zeros(q.shape[:3]) if query_bias is None else query_bias
    of_key = k.new_zeros(k.shape[:3]) if key_bias is None else key_bias
    if reach is not None:
        beta = 2.0 ** -_reach_of_heads(*reach, num_heads).to(q.device)
        of_query = of_query.double() + beta.logit()
    q, k, v, gate, of_query, of_key = (x.double().transpose(1, 2) for x in (q, k, v, gate, of_query, of_key))
    k, v, gate, of_key = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v, gate, of_key))

    rows = max(1, _MAX_WEIGHTS_PER_BLOCK // max(1, q.shape[0] * num_heads * num_keys))
    outputs, masses = [], []
    for begin in range(0, max(num_queries, 1), rows):
        end = min(begin + rows, num_queries)
        first = num_keys - num_queries + begin
        seen = first + end - begin
        keys = (x[:, :, :seen] for x in (k, v, gate, of_key))
        queries = (x[:, :, begin:end] for x in (q, of_query))
        block = (*queries, *keys, first, scale, attend_current, logits, forget_gate is not None)
        # With several blocks, autograd keeps only their inputs and computes each block again in the backward.
        o, mass = _rows(*block) if rows >= num_queries else checkpoint(_rows, *block, use_reentrant=False)
        outputs.append(o)
        masses.append(mass)
    o = torch.cat(outputs, dim=2).transpose(1, 2)
    return (o, torch.cat(masses, dim=2)) if return_mass else o


def stickbreaking_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    *,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = 2**-24,
    return_mass: bool = False,
    logits: str = "dot",
    forget_gate: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    reach: tuple[float, float] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute stick-breaking attention over packed documents in float64, one document at a time.

    Args:
        q: (t, h, d).
        k: (t_k, h_kv, d), h a multiple of h_kv.
        v: (t_k, h_kv, d_v).
        cu_seqlens: (n+1,) integers, the offsets of the documents in q. Rows after the last document get o 0, mass 1.
        max_seqlen: ignored.
        cu_seqlens_k: the offsets in k and v. A document's queries are the last positions of its keys. Default None:
            cu_seqlens.
        max_seqlen_k: ignored.
        scale: as in stickbreaking_attention.
        attend_current: as in stickbreaking_attention.
        mass_threshold: as in stickbreaking_attention.
        return_mass: as in stickbreaking_attention.
        logits: as in stickbreaking_attention.
        forget_gate: (t_k, h_kv), f of each key, or None for 1.
        query_bias: (t, h), added to the logits of each query, or None for 0.
        key_bias: (t_k, h_kv), added to the logits of each key, or None for 0.
        reach: as in stickbreaking_attention.

    Returns:
        o: (t, h, d_v) float64. With return_mass also mass: (h, t) float64.

    Raises:
        ValueError: if offsets do not start at 0, decrease or end beyond the rows. Or if cu_seqlens and cu_seqlens_k
            differ in length, or stickbreaking_attention raises it for a document.

    Example:
        >>> import torch
        >>> from megatron_sb import reference
        >>> q, k, v = (torch.randn(32, 2, 8) for _ in range(3))
        >>> reference.stickbreaking_attention_varlen(q, k, v, torch.tensor([0, 20, 32])).shape
        torch.Size([32, 2, 8])
    """
    del max_seqlen, max_seqlen_k, mass_threshold
    q_edges = cu_seqlens.tolist()
    k_edges = q_edges if cu_seqlens_k is None else cu_seqlens_k.tolist()
    for name, edges, num_rows in (("cu_seqlens", q_edges, len(q)), ("cu_seqlens_k", k_edges, len(k))):
        if edges[:1] != [0] or edges != sorted(edges) or edges[-1] > num_rows:
            raise ValueError(f"{name} must start at 0, not decrease and end at most at {num_rows}, got {edges}.")
    if len(k_edges) != len(q_edges):
        raise ValueError(f"cu_seqlens_k must have as many entries as cu_seqlens, {len(q_edges)}, got {len(k_edges)}.")
    documents = [
        stickbreaking_attention(
            q[None, q_begin:q_end],
            k[None, k_begin:k_end],
            v[None, k_begin:k_end],
            scale=scale,
            attend_current=attend_current,
            return_mass=True,
            logits=logits,
            forget_gate=None if forget_gate is None else forget_gate[None, k_begin:k_end],
            query_bias=None if query_bias is None else query_bias[None, q_begin:q_end],
            key_bias=None if key_bias is None else key_bias[None, k_begin:k_end],
            reach=reach,
        )
        for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(q_edges), pairwise(k_edges), strict=True)
    ]
    num_beyond, num_heads = q.shape[0] - q_edges[-1], q.shape[1]
    o = torch.cat([o[0] for o, _ in documents] + [v.new_zeros(num_beyond, num_heads, v.shape[-1]).double()])
    mass = torch.cat([mass[0] for _, mass in documents] + [v.new_ones(num_heads, num_beyond).double()], dim=1)
    return (o, mass) if return_mass else o


def _rows(
    q: Tensor,
    query_bias: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    key_bias: Tensor,
    first_position: int,
    scale: float,
    attend_current: bool,
    logits: str,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    """Return output (b, h, n, d_v) and mass (b, h, n) of n rows of Q. The first row has position first_position."""
    query_position = first_position + torch.arange(q.shape[2], device=q.device)[:, None]
    key_position = torch.arange(k.shape[2], device=q.device)
    hidden = key_position > query_position if attend_current else key_position >= query_position

    if logits == "euclidean":
        q_norm, k_norm = q.square().sum(-1), k.square().sum(-1)
        z = -scale * (q_norm[..., None] + k_norm[:, :, None] - 2 * (q @ k.transpose(-1, -2)))
    else:
        z = scale * (q @ k.transpose(-1, -2))
    z = z + query_bias[..., None] + key_bias[:, :, None]
    log_beta, log_rest = logsigmoid(z), logsigmoid(-z)  # log(1 - beta)
    if gated:
        f = gate[:, :, None]
        log_rest = (torch.sigmoid(-z) + (1 - f) * torch.sigmoid(z)).log()
    log_beta = log_beta.masked_fill(hidden, -torch.inf)
    log_rest = log_rest.masked_fill(hidden, 0.0)
    log_from = log_rest.flip(-1).cumsum(-1).flip(-1)  # sum over key i and all newer keys
    # Shift by one key. Subtracting log_rest instead would compute -inf - -inf = NaN for an infinite logit.
    log_newer = torch.cat([log_from, log_from.new_zeros(*log_from.shape[:-1], 1)], dim=-1)[..., 1:]
    weights = (log_beta + log_newer).exp()
    if gated:
        weights = weights * f  # the derivative of log f would be infinite for a closed gate
    return weights @ v, log_rest.sum(-1).exp()
