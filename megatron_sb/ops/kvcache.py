"""Attention of one or a few queries to a long cache of keys and values, for decoding.

The formulas are those of `megatron_sb.ops.attention`. With forget gates, Euclidean logits or biases, a cache stores
keys with more columns, in the form that the kernels read (`stored_keys`). So every cache that accepts keys of any width
can hold these keys.
"""

import torch
from torch import Tensor

from megatron_sb.ops import attention
from megatron_sb.options import DEFAULT_MASS_THRESHOLD, LOGITS, AttentionOptions, check_head_dim
from megatron_sb.validation import (
    check_choice,
    check_counts,
    check_flag,
    check_number,
    check_optional_tensors,
    check_tensor,
    python_number,
)

# Columns of a variant, after the channels of a key: first those that Euclidean logits and biases share, then the gate,
# which is the sum of its first three columns.
_COLUMNS = 8
_LEAST_SCALE = 2.0**-64  # with biases, as in csrc/ops/variants.cpp
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def stored_head_dim(head_dim: int, *, logits: str = "dot", forget_gate: bool = False, key_bias: bool = False) -> int:
    """Return the width of a key in a cache: head_dim, plus 8 with Euclidean logits or biases, plus 8 with forget gates.

    Args:
        head_dim: channels of a key, d.
        logits: "dot" or "euclidean".
        forget_gate: whether keys have forget gates.
        key_bias: whether keys have biases. Default: False.

    Raises:
        TypeError: If head_dim is not a number, or a flag not a bool.
        ValueError: If head_dim is not an integer of at least 1, or logits is unknown.

    Example:
        >>> from megatron_sb.ops.kvcache import stored_head_dim
        >>> stored_head_dim(64, forget_gate=True)
        72
    """
    check_number("head_dim", head_dim, "an integer of at least 1", lambda x: x >= 1 and x % 1 == 0)  # or a SymInt
    check_choice("logits", logits, LOGITS)
    check_flag("forget_gate", forget_gate)
    check_flag("key_bias", key_bias)
    return head_dim + _COLUMNS * ((logits == "euclidean" or key_bias) + forget_gate)


def stored_keys(
    k: Tensor,
    *,
    logits: str = "dot",
    forget_gate: Tensor | None = None,
    key_bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return keys as a cache stores them: followed by what Euclidean logits and biases need, and by their forget gates.

    Args:
        k: (b, s, h_kv, d).
        logits: "dot" or "euclidean". With "euclidean", d is at most 248.
        forget_gate: f, (b, s, h_kv), in k's dtype or in fp32 (fp64 for fp64). The columns keep 24 bits of f. Default:
            no gates.
        key_bias: (b, s, h_kv), in k's dtype or in fp32 (fp64 for fp64). The columns keep 24 bits of key_bias / scale. d
            is then at most 248. If only queries have biases, pass zeros. Default: no biases.
        scale: factor of the logits, the same as in the calls that read the cache. Used with key_bias. Default:
            1 / sqrt(d), and 1 for Euclidean logits.

    Returns:
        (b, s, h_kv, d'), with d' from `stored_head_dim`. Without variants, k itself.

    Raises:
        TypeError: If an argument has a wrong type or dtype.
        ValueError: If an argument has a wrong shape, device or value.

    Example:
        >>> import torch
        >>> from megatron_sb.ops.kvcache import stored_keys
        >>> stored_keys(torch.randn(2, 10, 4, 64), forget_gate=torch.rand(2, 10, 4)).shape
        torch.Size([2, 10, 4, 72])
    """
    options = AttentionOptions(scale=scale, logits=logits)
    check_tensor("k", k)
    check_optional_tensors({"forget_gate": forget_gate, "key_bias": key_bias})
    return torch.ops.megatron_sb.keys_for_blocks(
        k, forget_gate=forget_gate, euclidean=options.logits == "euclidean", key_bias=key_bias, scale=options.scale
    )


def keys_and_gates(
    stored: Tensor, head_dim: int, *, logits: str = "dot", forget_gate: bool = False, key_bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Invert `stored_keys`, without the biases.

    Args:
        stored: (b, s, h_kv, d').
        head_dim: channels of a key, d.
        logits: "dot" or "euclidean".
        forget_gate: whether the keys have forget gates.
        key_bias: whether the keys have biases. Default: False.

    Returns:
        The keys (b, s, h_kv, d), a view, and their gates (b, s, h_kv) in fp32 (fp64 for fp64), or None.

    Raises:
        ValueError: If d' is not that of `stored_head_dim`.
    """
    check_tensor("stored", stored)
    wanted = stored_head_dim(head_dim, logits=logits, forget_gate=forget_gate, key_bias=key_bias)
    if stored.shape[-1] != wanted:
        raise ValueError(f"stored must have {wanted} channels, as stored_head_dim says, got {stored.shape[-1]}.")
    keys = stored[..., :head_dim]
    if not forget_gate:
        return keys, None
    first, second, third = stored[..., -_COLUMNS:].to(torch.promote_types(stored.dtype, torch.float32)).unbind(-1)[:3]
    return keys, first + (second + third)  # both sums are exact


def stickbreaking_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    scale: float | None = None,
    attend_current: bool = False,
    mass_threshold: float = DEFAULT_MASS_THRESHOLD,
    logits: str = "dot",
    forget_gate: bool = False,
    query_bias: Tensor | None = None,
    key_bias: bool = False,
    reach: tuple[float, float] | None = None,
    return_mass: bool = False,
) -> attention.Result:
    """Compute attention of the last positions of each sequence to the keys in a cache. It has no gradients.

    The cache must hold the keys and values of the queries' own positions. Append them before the call, or pass them as
    k and v. The call then first writes them into the cache, after the cache_seqlens keys of each sequence. Once the
    mass of the queries of a sequence is below mass_threshold, older keys of this sequence are not read.

    Args:
        q: (b, s_q, h, d), the last s_q positions of each sequence, bf16, fp16 or fp32, on CPU also fp64. d is a
            multiple of 8 and at most 256.
        k_cache: (b, s_cache, h_kv, d), or with a block_table (num_blocks, block_size, h_kv, d), in q's dtype. h is a
            multiple of h_kv. With Euclidean logits, forget gates or biases it holds `stored_keys`, and so does k.
        v_cache: (b, s_cache, h_kv, d_v), or with a block_table (num_blocks, block_size, h_kv, d_v), in q's dtype. With
            k and v, neither cache may be an expanded tensor.
        cache_seqlens: int32, (b,), the number of valid keys of each sequence. It includes the s_q new keys if they are
            already in the cache, but not those in k. It counts from row 0 of the cache, also with cache_leftpad. The
            call does not change it. May be 0. Later rows of the cache are not read. On a GPU the host does not read the
            values, and the kernels clamp them to the size of the cache.
        block_table: int32, (b, max_blocks). Key i of sequence n is row i % block_size of block
            block_table[n, i // block_size]. Entries after a sequence's last key are not read. Default: no blocks.
        cache_leftpad: int32, (b,), the row of the cache where each sequence begins. Default: 0.
        k: (b, s_new, h_kv, d), new keys in the cache's dtype. Key j of sequence n is written to position
            cache_seqlens[n] + j, through the block_table if there is one. The queries are then the last s_q of
            cache_seqlens[n] + s_new positions. s_new may differ from s_q. On a CPU, a cache that is too short is an
            error. On a GPU, keys at positions beyond the cache, or in blocks that do not exist, are not written.
            Sequences must not share the blocks that are written: otherwise one key overwrites the other. Default: no
            keys.
        v: (b, s_new, h_kv, d_v), the values of these keys. Required with k, and not valid without k.
        scale: see `stickbreaking_attention`, also for attend_current, mass_threshold, logits and return_mass.
        attend_current: see scale.
        mass_threshold: see scale.
        logits: see scale.
        forget_gate: whether the keys in k_cache, and those in k, have forget gates. Default: False.
        query_bias: (b, s_q, h), added to the logits of each query. See `stickbreaking_attention`. With dot-product
            logits it requires key_bias. Default: no bias.
        key_bias: whether the keys in k_cache and in k were stored with a key_bias. They must have been stored with the
            scale of this call. Default: False.
        reach: see scale. Keys are stored without it.
        return_mass: see scale.

    Returns:
        o, (b, s_q, h, d_v), in q's dtype. With return_mass, (o, mass), where mass (b, h, s_q) is fp32 (fp64 for fp64).
        Queries before the first key of their sequence have o = 0 and mass = 1.

    Raises:
        TypeError: If an argument has a wrong type or dtype.
        ValueError: If an argument has a wrong shape, device or value, or requires a gradient while gradients are
            recorded, or has a tangent of forward-mode differentiation, or in `shared_sequence`. Nothing is computed or
            written in either case.

    Example:
        >>> import torch
        >>> import megatron_sb as sb
        >>> k_cache, v_cache = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
        >>> q = torch.randn(2, 1, 8, 64)  # one new token for each sequence
        >>> cache_seqlens = torch.tensor([100, 37], dtype=torch.int32)
        >>> sb.stickbreaking_attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens).shape
        torch.Size([2, 1, 8, 64])

        With the new keys and values, which are written to rows 100 and 37:

        >>> k, v = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
        >>> out = sb.stickbreaking_attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, k=k, v=v)
        >>> torch.equal(k_cache[1, 37], k[1, 0])
        True
    """
    options = AttentionOptions(scale, attend_current, mass_threshold, logits, reach)
    for name, flag in (("forget_gate", forget_gate), ("key_bias", key_bias), ("return_mass", return_mass)):
        check_flag(name, flag)
    for name, value in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("cache_seqlens", cache_seqlens)):
        check_tensor(name, value)
    optional = {"block_table": block_table, "cache_leftpad": cache_leftpad, "k": k, "v": v, "query_bias": query_bias}
    check_optional_tensors(optional)
    if attention.over_ranks is not None:
        raise ValueError(
            "stickbreaking_attention_with_kvcache must not be called in shared_sequence, because a cache holds whole "
            "sequences. Use the cache outside of the block."
        )
    if forget_gate or key_bias or logits != "dot":
        _check_stored(q, k_cache, k, {"logits": logits, "forget_gate": forget_gate, "key_bias": key_bias})
    o, mass = torch.ops.megatron_sb.attention_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table,
        cache_leftpad,
        k=k,
        v=v,
        scale=options.scale,
        attend_current=options.attend_current,
        mass_threshold=options.mass_threshold,
        forget_gate=forget_gate,
        euclidean=options.logits == "euclidean",
        query_bias=query_bias,
        key_bias=key_bias,
        reach=options.reach,
    )
    return (o, mass) if return_mass else o


def _check_stored(q: Tensor, k_cache: Tensor, k: Tensor | None, variant: dict[str, object]) -> None:
    """Raise ValueError if keys do not have the width of `stored_keys`."""
    if q.dim() != 4:
        return  # The operator says what is wrong.
    wanted = stored_head_dim(q.shape[-1], **variant)
    for name, keys in (("k_cache", k_cache), ("k", k)):
        if keys is not None and keys.dim() == 4 and keys.shape[-1] != wanted:
            raise ValueError(
                f"{name} must have {wanted} channels, those of stored_keys for head_dim {q.shape[-1]} with "
                f"{', '.join(f'{option}={value!r}' for option, value in variant.items())}, got {keys.shape[-1]}."
            )


_MOST_NEW_TOKENS = 16  # More new tokens are a prompt, which the dense kernels process.


def is_decoding_step(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether there are at most 16 queries, fewer than keys, and no gradients are recorded."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return q.shape[1] <= _MOST_NEW_TOKENS and q.shape[1] < k.shape[1] and not recorded


def attend_to_filled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_keys: int | Tensor | None = None,
    leftpad: Tensor | None = None,
    **options: object,
) -> attention.Result:
    """Call `stickbreaking_attention_with_kvcache` for sequences of equal length.

    Args:
        q: (b, s_q, h, d).
        k: (b, s_cache, h_kv, d).
        v: (b, s_cache, h_kv, d_v).
        num_keys: number of valid keys of every sequence, or int32 (b,) with this number. Default: s_cache.
        leftpad: int32, (b,), the row of the cache where each sequence begins. Default: 0.
        options: other keyword arguments of that function.

    Returns:
        The result of that function.
    """
    num_keys = k.shape[1] if num_keys is None else num_keys
    if not isinstance(num_keys, Tensor):
        num_keys = torch.full((q.shape[0],), num_keys, dtype=torch.int32, device=q.device)
    return stickbreaking_attention_with_kvcache(q, k, v, cache_seqlens=num_keys, cache_leftpad=leftpad, **options)


class KVCache:
    """Store the keys and values of a batch of sequences of equal length, in memory that is allocated once.

    Args:
        batch_size: number of sequences, b.
        max_len: largest number of positions of a sequence.
        num_kv_heads: KV heads, h_kv.
        head_dim: channels of a key, d, a multiple of 8 and at most 256, with Euclidean logits or biases at most 248.
        head_dim_v: channels of a value, d_v, a multiple of 8 and at most 256. Default: head_dim.
        logits: "dot" or "euclidean".
        forget_gate: whether keys have forget gates.
        key_bias: whether keys have biases. Pass key_bias to the calls that read the cache. Default: False.
        scale: factor of the logits, the same as in these calls. Used with key_bias. Default: 1 / sqrt(d), and 1 for
            Euclidean logits.
        device: device of the cache.
        dtype: dtype of the cache.

    Attributes:
        k: (b, max_len, h_kv, d'), the `stored_keys`.
        v: (b, max_len, h_kv, d_v).
        length: number of filled positions.
        head_dim: channels of a key, d, without the columns of `stored_keys`.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If a size is not an int of at least 1, or an option or a number of channels is not supported.

    Example:
        >>> import torch
        >>> import megatron_sb as sb
        >>> cache = sb.KVCache(batch_size=2, max_len=64, num_kv_heads=4, head_dim=16)
        >>> cache.append(torch.randn(2, 10, 4, 16), torch.randn(2, 10, 4, 16))
        >>> cache.length
        10
    """

    def __init__(
        self,
        batch_size: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        logits: str = "dot",
        forget_gate: bool = False,
        key_bias: bool = False,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = batch_size, max_len, num_kv_heads, head_dim, head_dim if head_dim_v is None else head_dim_v
        batch_size, max_len, num_kv_heads, head_dim, head_dim_v = map(python_number, given)
        sizes = {"batch_size": batch_size, "max_len": max_len, "num_kv_heads": num_kv_heads}
        check_counts(sizes | {"head_dim": head_dim, "head_dim_v": head_dim_v})
        AttentionOptions(scale=scale, logits=logits)  # this validates both
        check_flag("key_bias", key_bias)
        check_head_dim("head_dim", head_dim, extra_columns=logits == "euclidean" or key_bias)
        check_head_dim("head_dim_v", head_dim_v)
        if key_bias and scale is not None:
            expected = f"a number of magnitude at least {_LEAST_SCALE:.6g} with key_bias=True"
            check_number("scale", scale, expected, lambda x: abs(x) >= _LEAST_SCALE)
        if dtype not in (None, *_DTYPES):
            raise TypeError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}.")
        rows, kind = (batch_size, max_len, num_kv_heads), {"device": device, "dtype": dtype}
        width = stored_head_dim(head_dim, logits=logits, forget_gate=forget_gate, key_bias=key_bias)
        with torch.inference_mode(False):  # calls outside of inference mode must not write to tensors from inside
            self.k, self.v = torch.empty(*rows, width, **kind), torch.empty(*rows, head_dim_v, **kind)
        self.logits, self.forget_gate, self.key_bias = logits, forget_gate, key_bias
        self.head_dim, self._scale = head_dim, python_number(scale)
        self.length = 0

    @property
    def batch_size(self) -> int:
        """Number of sequences, b."""
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads, h_kv."""
        return self.k.shape[2]

    @property
    def head_dim_v(self) -> int:
        """Channels of a value, d_v."""
        return self.v.shape[3]

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self.k.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the cache."""
        return self.k.dtype

    @property
    def num_free(self) -> int:
        """Number of positions that can still be appended."""
        return self.k.shape[1] - self.length

    def append(self, k: Tensor, v: Tensor, forget_gate: Tensor | None = None, key_bias: Tensor | None = None) -> None:
        """Append positions after the filled ones.

        Args:
            k: (b, s, h_kv, d), in the cache's dtype and on its device. It may be a view of the cache.
            v: (b, s, h_kv, d_v), in the cache's dtype and on its device. It may be a view of the cache.
            forget_gate: f, (b, s, h_kv), in the cache's dtype or in fp32, if and only if keys have forget gates.
            key_bias: (b, s, h_kv), in the cache's dtype or in fp32, if and only if keys have biases.

        Raises:
            TypeError: If k or v is not a tensor of the cache's dtype.
            ValueError: If a shape or device differs from the cache's, or fewer than s positions are free.
        """
        for name, values, stored in (
            ("forget_gate", forget_gate, self.forget_gate),
            ("key_bias", key_bias, self.key_bias),
        ):
            if (values is not None) != stored:
                wanted, got = ("a tensor", "None") if stored else ("None", "a tensor")
                raise ValueError(f"{name} must be {wanted} for a cache with {name}={stored}, got {got}.")
        for name, new, held, width in (("k", k, self.k, self.head_dim), ("v", v, self.v, self.head_dim_v)):
            check_tensor(name, new)
            if new.dim() != 4 or (new.shape[0], *new.shape[2:]) != (self.batch_size, self.num_kv_heads, width):
                raise ValueError(
                    f"{name} must have shape ({self.batch_size}, s, {self.num_kv_heads}, {width}) for this cache, "
                    f"got {tuple(new.shape)}."
                )
            if new.dtype != held.dtype:
                raise TypeError(f"{name} must have the cache's dtype, {held.dtype}, got {new.dtype}.")
            if new.device != held.device:
                raise ValueError(f"{name} must be on the cache's device, {held.device}, got {new.device}.")
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"v must have as many positions as k, {k.shape[1]}, got {v.shape[1]}.")
        if k.shape[1] > self.num_free:
            raise ValueError(
                f"k must have at most {self.num_free} positions, the free ones in the cache, got {k.shape[1]}."
            )
        variant = {"logits": self.logits, "forget_gate": forget_gate, "key_bias": key_bias, "scale": self._scale}
        k, end = stored_keys(k, **variant), self.length + k.shape[1]
        k, v = self._apart(k.detach()), self._apart(v.detach())
        self.k[:, self.length : end], self.v[:, self.length : end] = k, v
        self.length = end

    def _apart(self, x: Tensor) -> Tensor:
        """Return x, copied if it lies in the memory of the cache: rows are written while others are read."""
        if torch.compiler.is_compiling():  # which does not trace storages, and drops a copy that nothing needs
            return x.clone()
        storages = (held.untyped_storage()._cdata for held in (self.k, self.v))
        return x.clone() if x.untyped_storage()._cdata in storages else x
