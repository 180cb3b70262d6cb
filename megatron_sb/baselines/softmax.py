"""Causal softmax attention with the positions that stick-breaking is compared with, on one device, dense and packed.

z_ij = scale * q_j . k_i + bias_ij,  A_ij = exp(z_ij) / sum_l exp(z_lj),  o_j = sum_i A_ij v_i,   i, l <= j

for query j and key i of one document, positions counted from 0. Without a bias, window or StableMask torch's
scaled_dot_product_attention has a kernel, and on GPUs its FlashAttention-2 one for documents of different lengths. With
them torch's flex_attention makes one on GPUs, whose memory is linear in
a length. Everything else runs in blocks of query rows that are computed again for the gradients: flex_attention has no
gradients on CPUs, sums in fp32, needs heads of 16 channels, and cannot differentiate a network inside a bias (FIRE).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from megatron_sb.validation import check_counts, check_finite, check_number, check_tensor

Position = Literal["none", "rope", "alibi", "fire"]
RotaryKind = Literal["none", "linear", "ntk"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Fastest first. The third is the one for fp32 whose memory does not grow with the square of a length.
_CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_FLEX_MIN_HEAD_DIM = 16
_FLEX_BLOCK = 128
_MAX_WEIGHTS_PER_BLOCK = 2**25  # attention weights alive at a time: 128 MiB a copy in fp32, and autograd holds some ten
_FIRE_EPS = 1e-6


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary positions beyond the trained context are made to look like trained ones.

    kind: "none"; "linear", positions divided by `factor` (Chen et al., arXiv 2306.15595); "ntk", the base times
        factor ** (d / (d - 2)), which stretches the longest wavelength by `factor` and leaves the shortest.
    factor: the context over the trained one, at least 1.
    Raises TypeError, ValueError for another kind, or a factor that is no number or below 1.
    """

    kind: RotaryKind = "none"
    factor: float = 1.0

    def __post_init__(self):
        """Refuse what no formula is for."""
        _check_choice("kind", self.kind, get_args(RotaryKind))
        check_number("factor", self.factor, "a finite number of at least 1", lambda x: 1 <= x < math.inf)


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's slope of each head (Press et al., arXiv 2108.12409, section 3): a geometric sequence, 2^(-8 / n) first.

    For n heads, n no power of two: those of the power of two below, then every second one of the power of two above,
    as in the authors' code.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (num_heads - power), 2)]


class FireBias(nn.Module):
    """FIRE's bias (Li et al., arXiv 2310.04418), a learned function of the distance over the query's position.

    b(i, j) = f(psi(j - i) / (psi(max(L, j)) + 1e-6)),  psi(x) = log(c x + 1),  f(x) = W_2 relu(W_1 x + b_1) + b_2

    Width, initial values, the 1e-6, positions from 0 and c = |parameter|, L = |factor * threshold| are those of the
    listing in the paper's appendix. A learned factor moves at the pace of the other parameters, which an L of some
    hundred positions would not.

    Args:
        num_heads: h, outputs of f.
        hidden_size: width of f's one hidden layer.
        c: first value of c.
        threshold: first value of L; documents up to it share one scale.
        device, dtype: of the parameters c, threshold_factor, hidden.* and out.*.
    """

    def __init__(
        self,
        num_heads: int,
        hidden_size: int = 32,
        c: float = 0.1,
        threshold: float = 512.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = {"device": device, "dtype": dtype}
        self.initial_c, self.threshold = c, threshold
        self.c = nn.Parameter(torch.empty((), **kind))
        self.threshold_factor = nn.Parameter(torch.empty((), **kind))
        self.hidden = nn.Linear(1, hidden_size, **kind)
        self.out = nn.Linear(hidden_size, num_heads, **kind)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give c and the threshold's factor their first values; the layers reset their own."""
        nn.init.constant_(self.c, self.initial_c)
        nn.init.constant_(self.threshold_factor, 1.0)

    def forward(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """query_position: (r,), key_position: (n,), both of one floating dtype -> (h, r, n) in it, for i <= j.

        Parameters are converted to that dtype: in bfloat16 neighbouring positions would be one. Autocast is not heeded.
        """
        with _without_autocast(query_position):
            return self._bias(query_position, key_position)

    def _bias(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        dtype = query_position.dtype
        c, threshold = self.c.abs().to(dtype), (self.threshold_factor * self.threshold).abs().to(dtype)
        # A key to come has no bias. It is masked later, but the logarithm's NaN would reach the gradients.
        distance = (query_position[:, None] - key_position).clamp(min=0)
        normalizer = torch.log1p(c * torch.maximum(query_position, threshold)) + _FIRE_EPS
        x = torch.log1p(c * distance) / normalizer[:, None]
        network = _fused_fire_network if x.is_cuda else _fire_network
        return network(x, *(p.to(dtype) for layer in (self.hidden, self.out) for p in (layer.weight, layer.bias)))


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with a choice of positions, a sliding window and StableMask.

    StableMask (Yin et al., arXiv 2402.04779, eq. 7-11): with positions from 1, row j of a document of n positions has
    the pseudo score -(i - 1) gamma at each key i > j that it does not see, the softmax runs over both, and A_ij = 0 for
    i > j. That is o_j * sigmoid(lse_j - log sum_{j < i <= n} exp(-(i - 1) gamma)), lse_j the real scores' log-sum-exp:
    nothing of n x n. n is the length of each document, or of the sequence without documents, and not of a trained
    context: the last position always has all its weight on real keys. Rows therefore know how far their document goes
    on, though not what follows; with a gamma of 0.5 the first ten or so, with a smaller one more of them. Keys that a
    window hides have no pseudo score.

    Args:
        num_heads: query heads, h.
        head_dim: channels of a head, d.
        position: "none"; "rope", rotated q and k (Su et al., arXiv 2104.09864), pairs (x[i], x[i + d / 2]); "alibi",
            bias -m_h (j - i) with `alibi_slopes`; "fire", the bias of `FireBias`, in the submodule fire.
        window: position j attends to the last `window` positions, itself included; all by default.
        stable_mask_gamma: gamma, at least 0, one for all heads or one for each (the paper trains with one for each);
            no StableMask by default.
        rotary_base: the longest wavelength of "rope" is about 2 * pi * rotary_base positions.
        scale: factor of q . k; 1 / sqrt(d) by default.
        fire_hidden_size, fire_c, fire_threshold: hidden_size, c and threshold of `FireBias`.
        device, dtype: of the parameters, which "fire" alone has.

    Attribute `scaling`: a RotaryScaling, which may be set between calls; only "rope" reads it.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        position: Position = "rope",
        window: int | None = None,
        stable_mask_gamma: float | Sequence[float] | None = None,
        rotary_base: float = 10000.0,
        scale: float | None = None,
        fire_hidden_size: int = 32,
        fire_c: float = 0.1,
        fire_threshold: float = 512.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "fire_hidden_size": fire_hidden_size}
        check_counts(sizes if window is None else sizes | {"window": window})
        _check_choice("position", position, get_args(Position))
        if position == "rope" and (head_dim % 2 or head_dim < 4):
            raise ValueError(f"head_dim is {head_dim}; with position 'rope' an even number of at least 4 is allowed")
        for name, value in (("rotary_base", rotary_base), ("fire_c", fire_c), ("fire_threshold", fire_threshold)):
            check_number(name, value, "a finite number above 0", lambda x: 0 < x < math.inf)
        if scale is not None:
            check_finite("scale", scale)
        self.num_heads, self.head_dim, self.position, self.window = num_heads, head_dim, position, window
        self.rotary_base, self.scale = rotary_base, head_dim**-0.5 if scale is None else scale
        self.stable_mask_gamma = _per_head("stable_mask_gamma", stable_mask_gamma, num_heads)
        self.scaling = RotaryScaling()
        if position == "fire":
            self.fire = FireBias(num_heads, fire_hidden_size, fire_c, fire_threshold, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        """Sizes and what is switched on."""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, position={self.position!r}, window={self.window}, "
            f"stable_mask_gamma={self.stable_mask_gamma}"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend within each sequence or document.

        "fire" everywhere, and on CPUs all biases, windows and StableMask, hold the attention weights of a block of rows
        at a time, O(s) for each row, documents of one length together; on GPUs padded to the next power of two.

        Args:
            q: (b, s, h, d), or packed (t, h, d), in bf16, fp16, fp32 or fp64; at least one position.
            k: (b, s, h_kv, d), or packed (t, h_kv, d), in q's dtype. h is a multiple of h_kv; query head i reads key
                head i // (h / h_kv).
            v: of k's shape, in q's dtype.
            cu_seqlens: for packed rows, int32 (documents + 1,), where each document starts and the last one ends: from
                0 to t, not decreasing, on any device. From a GPU the values are read back once, and again after a write
                that torch counts (`_version`); collectives, kernels of others and `.data` write uncounted: pass a new
                tensor after those, or one on the CPU, which is read at every call.

        Returns:
            A tensor of q's shape and dtype. Sums are in fp32 (fp64 for fp64). Under autocast q, k and v, unless fp64,
            are cast to its dtype, which is the output's then, and all else is as without it.

        Raises:
            TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs.
        """
        for name, value in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, value)
        q, k, v = (_cast_by_autocast(x) for x in (q, k, v))
        self._check_input(q, k, v, cu_seqlens)
        with _without_autocast(q):
            if cu_seqlens is None:
                return self._attend(q, k, v, (q.shape[1],))
            lengths = _last_offsets.lengths(cu_seqlens, q.shape[0])
            if len(set(lengths)) > 1:
                return self._attend(q[None], k[None], v[None], lengths)[0]
            batch = (x.unflatten(0, (len(lengths), -1)) for x in (q, k, v))
            return self._attend(*batch, lengths[:1]).flatten(0, 1)

    def _check_input(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: object) -> None:
        if cu_seqlens is not None:
            check_tensor("cu_seqlens", cu_seqlens)
        shape = "(b, s, h, d) without cu_seqlens" if cu_seqlens is None else "(t, h, d) for packed documents"
        dims = 4 if cu_seqlens is None else 3
        if q.dim() != dims or q.shape[-2:] != (self.num_heads, self.head_dim) or q.numel() == 0:
            raise ValueError(
                f"q has shape {tuple(q.shape)}; {shape}, h = {self.num_heads}, d = {self.head_dim}, of at least one "
                "position is allowed"
            )
        if k.dim() != dims or (*k.shape[:-2], k.shape[-1]) != (*q.shape[:-2], self.head_dim):
            raise ValueError(f"k has shape {tuple(k.shape)}; q's, {tuple(q.shape)}, but for the heads, is allowed")
        if k.shape[-2] == 0 or self.num_heads % k.shape[-2]:
            raise ValueError(f"k has {k.shape[-2]} heads; a divisor of num_heads, {self.num_heads}, is allowed")
        if v.shape != k.shape:
            raise ValueError(f"v has shape {tuple(v.shape)}; k's, {tuple(k.shape)}, is allowed")
        if q.dtype not in _DTYPES:
            raise TypeError(f"q is {q.dtype}; one of {', '.join(map(str, _DTYPES))} is allowed")
        for name, x in (("k", k), ("v", v)):
            if (x.dtype, x.device) != (q.dtype, q.device):
                raise TypeError(f"{name} is {x.dtype} on {x.device}; q's, {q.dtype} on {q.device}, is allowed")
        if cu_seqlens is not None and (cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2):
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; torch.int32 of shape "
                "(documents + 1,) is allowed"
            )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """q: (b, s, h, d); k, v: (b, s, h_kv, d); lengths of the documents along s, the same in each row of b."""
        if self.position == "rope":
            cos, sin = _angles(lengths, self.head_dim, self.rotary_base, self.scaling, q.dtype, q.device)
            rotate = _fused_rotate if q.is_cuda else _rotate
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        window = None if self.window is None or self.window >= max(lengths) else self.window
        plain = window is None and self.stable_mask_gamma is None and self.position in ("none", "rope")
        several = len(lengths) > 1
        fused = plain and several and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
        if self._has_flex_kernel(q) and (several or not plain) and not fused:
            return self._flex(q, k, v, lengths, window).transpose(1, 2)
        groups = self.num_heads // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))  # one copies too
        if fused:
            return self._varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), lengths)[None]
        if not plain:
            return self._in_batches(q, k, v, lengths, window).transpose(1, 2)
        documents = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        return _joined([self._sdpa(*document) for document in documents]).transpose(1, 2)

    def _has_flex_kernel(self, q: Tensor) -> bool:
        wide = self.head_dim >= _FLEX_MIN_HEAD_DIM
        return q.is_cuda and q.dtype != torch.float64 and wide and self.position != "fire"

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: (b, h, s, d), one document."""
        with sdpa_kernel(_CUDA_BACKENDS, set_priority=True) if q.is_cuda else contextlib.nullcontext():
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """q, k, v: (t, h, d)."""
        bounds, longest = _bounds(lengths, q.device), max(lengths)
        causal = (-1, 0)
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=self.scale, window_size=causal)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None) -> Tensor:
        """q: (b, h, s, d); k, v: (b, h_kv, s, d)."""
        score_mod = None
        if self.position == "alibi":
            slopes = _slopes(self.num_heads, torch.float32, q.device)

            def score_mod(score, _, head, query, key):
                return score - slopes[head] * (query - key)

        o, aux = _fused_flex(
            q,
            k,
            v,
            score_mod,
            _block_mask(lengths, window, q.device),
            self.scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=self.stable_mask_gamma is not None),
        )
        return o if aux.lse is None else (o * self._real_share(aux.lse, lengths)).to(q.dtype)

    def _in_batches(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None) -> Tensor:
        """q, k, v: (b, h, s, d), b = 1 where there are several documents."""
        if len(lengths) == 1:
            return self._in_blocks(q, k, v, window)
        # StableMask depends on where a document ends.
        batches, places = _batches(lengths, q.is_cuda and self.stable_mask_gamma is None, q.device)
        sources = [pad(x[0], (0, 0, 0, 1)) for x in (q, k, v)]
        outputs = []
        for rows in batches:
            batch = (x.index_select(1, rows.flatten()).unflatten(1, rows.shape).transpose(0, 1) for x in sources)
            outputs.append(self._in_blocks(*batch, window).transpose(0, 1).flatten(1, 2))
        return torch.cat(outputs, dim=1).index_select(1, places)[None]

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q, k, v: (b, h, s, d), documents of one length."""
        length = q.shape[2]
        widest = q.shape[0] * self.num_heads
        if self.position == "fire" and not q.is_cuda:
            widest = max(widest, self.fire.hidden.out_features)
        rows = max(1, _MAX_WEIGHTS_PER_BLOCK // (widest * length))
        outputs = []
        for begin in range(0, length, rows):
            end = min(begin + rows, length)
            oldest = 0 if window is None else max(0, begin + 1 - window)
            block = (q[:, :, begin:end], k[:, :, oldest:end], v[:, :, oldest:end], oldest, begin, length, window)
            # Of a document in several blocks, autograd keeps the inputs only and computes each block again.
            several = {"use_reentrant": False, "preserve_rng_state": False}
            outputs.append(self._block(*block) if rows >= length else checkpoint(self._block, *block, **several))
        return _joined(outputs)

    def _block(
        self, q: Tensor, k: Tensor, v: Tensor, oldest: int, begin: int, length: int, window: int | None
    ) -> Tensor:
        """q: (b, h, r, d), rows from begin on; k, v: (b, h, n, d), keys from oldest on, of a document of `length`."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        query = torch.arange(begin, begin + q.shape[2], device=q.device)
        key = torch.arange(oldest, oldest + k.shape[2], device=q.device)
        distance = query[:, None] - key
        z = self.scale * q.to(dtype) @ k.to(dtype).transpose(2, 3)
        if self.position == "alibi":
            z = z - _slopes(self.num_heads, dtype, q.device)[:, None, None] * distance
        if self.position == "fire":
            z = z + self.fire(query.to(dtype), key.to(dtype))
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        z = z.masked_fill(hidden, -torch.inf)
        o = z.softmax(-1) @ v.to(dtype)
        if self.stable_mask_gamma is not None:
            o = o * self._real_share(z.logsumexp(-1), (length,), begin)
        return o.to(q.dtype)

    def _real_share(self, lse: Tensor, lengths: tuple[int, ...], begin: int = 0) -> Tensor:
        """What StableMask leaves to the real keys, (b, h, r, 1), of rows from begin on with the log-sum-exp (b, h, r)
        of their scores.
        """
        pseudo = _pseudo_lse(self.stable_mask_gamma, lengths, lse.device)[:, begin : begin + lse.shape[2]]
        return (lse - pseudo.to(lse.dtype)).sigmoid()[..., None]


def _cast_by_autocast(x: Tensor) -> Tensor:
    """To the dtype of autocast where it is on, as the stick-breaking operators cast, and torch's own: fp64 stays."""
    casts = x.is_floating_point() and x.dtype != torch.float64 and not x.is_meta
    on = casts and torch.is_autocast_enabled(x.device.type)
    return x.to(torch.get_autocast_dtype(x.device.type)) if on else x


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Off on x's device; there is none for what has no values."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


class _LastOffsets:
    """Lengths of the documents of the cu_seqlens that were asked for last: on a GPU a batch's first layer reads them
    back, the others do not wait for the device. On CPUs, where nobody waits, they are read at every call: torch does
    not count what collectives, numpy and `.data` write.
    """

    def __init__(self) -> None:
        self._key: tuple | None = None

    def lengths(self, cu_seqlens: Tensor, tokens: int) -> tuple[int, ...]:
        """Lengths of the documents that are not empty; refuses offsets that do not cover `tokens` positions."""
        # Of an inference tensor torch counts no writes at all.
        counted = cu_seqlens.device.type != "cpu" and not cu_seqlens.is_inference()
        key = (id(cu_seqlens), cu_seqlens._version) if counted else None
        if key is None or key != self._key:
            self._bounds = cu_seqlens.tolist()
            self._key, self._tensor = key, cu_seqlens  # kept alive: an id is only unique among the living
        bounds = self._bounds
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] != tokens or min(lengths) < 0:
            raise ValueError(f"cu_seqlens is {bounds}; offsets from 0 to {tokens}, not decreasing, are allowed")
        return tuple(length for length in lengths if length)


_last_offsets = _LastOffsets()


def _joined(outputs: list[Tensor]) -> Tensor:
    """Along the rows of (b, h, s, d), without a copy where there is one."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _check_choice(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; one of {', '.join(map(repr, allowed))} is allowed")


def _per_head(name: str, value: float | Sequence[float] | None, num_heads: int) -> tuple[float, ...] | None:
    """One number for each head, or none."""
    if value is None:
        return None
    allowed = f"a finite number of at least 0, or {num_heads} of them,"
    several = isinstance(value, Sequence) and not isinstance(value, str)
    values = tuple(value) if several else (value,) * num_heads
    if len(values) != num_heads:
        raise ValueError(f"{name} is {value}; {allowed} is allowed")
    for x in values:
        check_number(name, x, allowed, lambda x: 0 <= x < math.inf)
    return values


# What follows depends on sizes alone and is made by a batch's first layer, for all of them. Made under inference_mode
# it could not be saved for the gradients of a later call.
def _shared_by_layers(function):
    return functools.lru_cache(maxsize=4)(torch.inference_mode(False)(function))


def _positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Position of each row in its document, int64 (s,)."""
    # Made where it is used: the threads that a CPU needs for some 10,000 rows cost a GPU milliseconds.
    length = torch.tensor(lengths, device=device)
    start = length.cumsum(0) - length
    return torch.arange(sum(lengths), device=device) - start.repeat_interleave(length, output_size=sum(lengths))


@_shared_by_layers
def _batches(lengths: tuple[int, ...], padded: bool, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Documents of one length, or padded to one, the next power of two at most the longest, as a batch.

    Returns the rows of each batch, int64 (documents, length), padding being row s, and where among the rows of all
    batches, one batch after the other, each of the s rows is: int64 (s,).
    """
    starts, longest = [0, *itertools.accumulate(lengths)], max(lengths)
    members: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        size = min(1 << (length - 1).bit_length(), longest) if padded else length
        members.setdefault(size, []).append(index)
    batches, num_before, places = [], 0, torch.empty(starts[-1] + 1, dtype=torch.int64, device=device)
    for size, indices in members.items():
        start, end = (torch.tensor([starts[i + side] for i in indices], device=device) for side in (0, 1))
        rows = start[:, None] + torch.arange(size, device=device)
        rows = rows.where(rows < end[:, None], starts[-1])
        places[rows.flatten()] = torch.arange(num_before, num_before + rows.numel(), device=device)
        num_before += rows.numel()
        batches.append(rows)
    return batches, places[:-1]


@_shared_by_layers
def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where documents begin, and the end of the last: int32 (documents + 1,)."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


@_shared_by_layers
def _slopes(num_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(alibi_slopes(num_heads), dtype=dtype, device=device)


@_shared_by_layers
def _angles(
    lengths: tuple[int, ...],
    head_dim: int,
    base: float,
    scaling: RotaryScaling,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every row's angles, (s, 1, d / 2) each, the angles in float64."""
    position = _positions(lengths, device).double()
    if scaling.kind == "linear":
        position = position / scaling.factor
    if scaling.kind == "ntk":
        base = base * scaling.factor ** (head_dim / (head_dim - 2))
    inverse_wavelengths = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = position[:, None, None] * inverse_wavelengths
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + d / 2])."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


_fused_rotate = torch.compile(_rotate)


def _fire_network(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor) -> Tensor:
    """FIRE's f of x (r, n), by the weights of its two layers -> (h, r, n)."""
    return linear(linear(x[..., None], weight, bias).relu(), out_weight, out_bias).permute(2, 0, 1)


@functools.partial(torch.compile, dynamic=True)
def _fused_fire_network(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor) -> Tensor:
    """`_fire_network` as sums, which the compiler makes one kernel of: the hidden layer never gets to memory."""
    hidden = (x[..., None] * weight[:, 0] + bias).relu()
    return (hidden * out_weight[:, None, None]).sum(-1) + out_bias[:, None, None]


# fullgraph: past the limit of recompilations an error, where otherwise an s x s matrix would be made in silence.
_fused_flex = torch.compile(flex_attention, fullgraph=True)


@_shared_by_layers
def _pseudo_lse(gammas: tuple[float, ...], lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Logarithm of the sum of StableMask's pseudo exponentials in every row, (h, s) float64.

    For row p of n, from 0: log sum_{p < i < n} exp(-i gamma), a geometric sum; -inf in the last row.
    """
    position = _positions(lengths, device).double()
    length = torch.tensor(lengths, device=device)
    unseen = length.repeat_interleave(length, output_size=len(position)) - 1 - position
    gamma = torch.tensor(gammas, dtype=torch.float64, device=device)[:, None]
    geometric = torch.log(torch.expm1(-unseen * gamma) / torch.expm1(-gamma)) - (position + 1) * gamma
    return torch.where(gamma > 0, geometric, unseen.log())


@_shared_by_layers
def _block_mask(lengths: tuple[int, ...], window: int | None, device: torch.device) -> BlockMask:
    """Which keys a row sees: from the first of its document, or of its window, to itself.

    flex_attention's own function would evaluate the mask at every pair, in O(s^2) memory. Where the first key never
    decreases from row to row, blocks of 128 rows x 128 keys can be told from their corners. Like there, a last block of
    fewer rows is never full.
    """
    position = _positions(lengths, device)
    reach = position if window is None else position.clamp(max=window - 1)
    first = (torch.arange(len(position), device=device) - reach).int()
    block = torch.arange(-(-len(position) // _FLEX_BLOCK), device=device)
    top = block * _FLEX_BLOCK
    end = top + _FLEX_BLOCK
    bottom = (end - 1).clamp(max=len(position) - 1)
    seen = (block <= block[:, None]) & (end > first[top][:, None])
    full = (block < block[:, None]) & (top >= first[bottom][:, None]) & (end <= len(position))[:, None]

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]

    return BlockMask.from_kv_blocks(
        *ordered(seen & ~full),
        *ordered(full),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=lambda _, head, query, key: (key <= query) & (key >= first[query]),
        seq_lengths=(len(position), len(position)),
    )
