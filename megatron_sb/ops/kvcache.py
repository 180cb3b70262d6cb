"""Decoding: attention of one query, or a block of them, to a long cache of keys and values.

The formulas are those of `megatron_sb.ops.attention` (Tan et al., arXiv 2410.17980, eq. 1). Since weights come from the
newest keys first, a sequence's oldest keys are not even read once its stick is used up.
"""

import torch
from torch import Tensor

from megatron_sb.options import DEFAULT_MASS_THRESHOLD, AttentionOptions
from megatron_sb.validation import check_counts, check_tensor


def stickbreaking_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = DEFAULT_MASS_THRESHOLD,
    return_mass: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the last positions of each sequence to the keys in a cache, newest first. No gradients.

    The queries' own keys are in the cache already: append, then call this.

    Args:
        q: (b, s_q, h, d), the last s_q positions of each sequence, in bf16, fp16, fp32, or fp64 on CPU. d: a multiple
            of 8 up to 256.
        k_cache: (b, s_cache, h_kv, d), h a multiple of h_kv; or with a block_table (num_blocks, block_size, h_kv, d).
        v_cache: (b, s_cache, h_kv, d_v), or (num_blocks, block_size, h_kv, d_v).
        cache_seqlens: int32 (b,), the end of each sequence in the cache: its valid keys, the s_q new ones included. May
            be 0. What the cache holds beyond is not read. On a GPU the values are not read back: they are clamped to
            what the cache holds.
        block_table: int32 (b, max_blocks): key i of sequence n is row i % block_size of block
            block_table[n, i // block_size]. Entries beyond a sequence's keys may hold anything.
        cache_leftpad: int32 (b,), where each sequence begins in the cache; 0 by default.
        scale, attend_current, mass_threshold, return_mass: as in `stickbreaking_attention`.

    Returns:
        o (b, s_q, h, d_v) in q's dtype; with return_mass also mass (b, h, s_q), fp32 (fp64 for fp64). For queries
        before the first key of their sequence o = 0, mass = 1.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs; also for inputs
            that require a gradient while gradients are recorded.
    """
    options = AttentionOptions(scale, attend_current, mass_threshold)
    for name, value in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("cache_seqlens", cache_seqlens)):
        check_tensor(name, value)
    for name, value in (("block_table", block_table), ("cache_leftpad", cache_leftpad)):
        if value is not None:
            check_tensor(name, value)
    o, mass = torch.ops.megatron_sb.attention_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table,
        cache_leftpad,
        scale=options.scale,
        attend_current=options.attend_current,
        mass_threshold=options.mass_threshold,
    )
    return (o, mass) if return_mass else o


_MOST_NEW_TOKENS = 16  # a step that attends to its cache as it lies; more are a prompt


def is_decoding_step(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these are a few queries (b, s, h, d) against longer keys, without gradients."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return q.shape[1] <= _MOST_NEW_TOKENS and q.shape[1] < k.shape[1] and not recorded


def attend_to_filled(
    q: Tensor, k: Tensor, v: Tensor, num_keys: int | None = None, leftpad: Tensor | None = None, **options: object
) -> Tensor | tuple[Tensor, Tensor]:
    """`stickbreaking_attention_with_kvcache` where all sequences end at num_keys, by default where the cache does."""
    num_keys = k.shape[1] if num_keys is None else num_keys
    seqlens = torch.full((q.shape[0],), num_keys, dtype=torch.int32, device=q.device)
    return stickbreaking_attention_with_kvcache(q, k, v, cache_seqlens=seqlens, cache_leftpad=leftpad, **options)


class KVCache:
    """Keys and values of a batch of sequences that grow together, in memory that is allocated once.

    Attributes:
        k: (b, max_len, h_kv, d).
        v: (b, max_len, h_kv, d_v).
        length: positions that are filled.
    """

    def __init__(
        self,
        batch_size: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {"batch_size": batch_size, "max_len": max_len, "num_kv_heads": num_kv_heads}
        check_counts(sizes | {"head_dim": head_dim, "head_dim_v": head_dim_v})
        rows, kind = (batch_size, max_len, num_kv_heads), {"device": device, "dtype": dtype}
        self.k, self.v = torch.empty(*rows, head_dim, **kind), torch.empty(*rows, head_dim_v, **kind)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add positions behind those that are filled: k (b, s, h_kv, d), v (b, s, h_kv, d_v), in the cache's dtype.

        Raises:
            TypeError, ValueError: another shape, dtype or device than the cache's, or more positions than are free.
        """
        for name, new, held in (("k", k, self.k), ("v", v, self.v)):
            check_tensor(name, new)
            if new.dim() != 4 or (new.shape[0], *new.shape[2:]) != (held.shape[0], *held.shape[2:]):
                allowed = (held.shape[0], "s", *held.shape[2:])
                raise ValueError(f"{name} has shape {tuple(new.shape)}; {allowed} is allowed for this cache")
            if new.dtype != held.dtype:
                raise TypeError(f"{name}: dtype is {new.dtype}; the cache's, {held.dtype}, is allowed")
            if new.device != held.device:
                raise ValueError(f"{name}: device is {new.device}; the cache's, {held.device}, is allowed")
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"v has {v.shape[1]} positions; those of k, {k.shape[1]}, are allowed")
        end = self.length + k.shape[1]
        if end > self.k.shape[1]:
            free = self.k.shape[1] - self.length
            raise ValueError(f"k has {k.shape[1]} positions; up to {free}, as many as are free, are allowed")
        self.k[:, self.length : end], self.v[:, self.length : end] = k.detach(), v.detach()
        self.length = end
