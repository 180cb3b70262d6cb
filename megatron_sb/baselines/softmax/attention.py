"""Causal softmax attention on one device, for dense batches and packed documents.

z_ij = scale * q_j . k_i + bias_ij + sum_{i < l <= j} log f_l
A_ij = exp(z_ij) / sum_l exp(z_lj),  o_j = sum_i A_ij v_i,   i, l <= j

for query j and key i of one document, with positions from 0. f are optional forget gates (forget_gates.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from megatron_sb.baselines.autocast import without_autocast
from megatron_sb.baselines.softmax import kernels
from megatron_sb.baselines.softmax.forget_gates import CHANNELS, with_gate_channels
from megatron_sb.baselines.softmax.offsets import last_offsets
from megatron_sb.baselines.softmax.positions import (
    FireBias,
    RotaryScaling,
    alibi_slopes,
    rotary_cos_sin,
    rotate,
)
from megatron_sb.validation import check_choice, check_counts, check_number, check_tensor

Position = Literal["none", "rope", "alibi", "fire"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class SoftmaxAttention(nn.Module):
    """Compute causal softmax attention with a choice of position encoding, a sliding window and StableMask.

    The attribute `scaling`, a `RotaryScaling`, may be assigned between calls; only "rope" reads it. Another type is a
    TypeError, and the kind "yarn" with a rotary_base of at most 1 a ValueError.

    Args:
        num_heads: query heads, h.
        head_dim: channels of a head, d.
        position: "none"; "rope", rotated q and k (Su et al., arXiv 2104.09864), pairs (x[i], x[i + d / 2]); "alibi",
            the bias -m_h (j - i) with the slopes of `alibi_slopes`; or "fire", the bias of `FireBias`, in the
            submodule `fire`. Default "rope".
        window: number of newest keys that a query attends to, including its own. Default None: all.
        stable_mask_gamma: gamma of StableMask (stable_mask.py), at least 0: one for all heads, or one for each head as
            in the paper. Default None: no StableMask.
        rotary_base: base of "rope". The longest wavelength is about 2 * pi * rotary_base tokens. Default 10000.
        scale: factor of q . k, above 0: torch's kernels multiply the mask by it. Default None: 1 / sqrt(d).
        fire_hidden_size: `hidden_size` of `FireBias`. Default 32.
        fire_c: `c` of `FireBias`. Default 0.1.
        fire_threshold: `threshold` of `FireBias`. Default 512.
        device: device of the parameters. Only "fire" has parameters.
        dtype: dtype of the parameters.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has a value outside its range.

    Example:
        >>> attention = SoftmaxAttention(num_heads=4, head_dim=32, position="alibi", window=128)
        >>> q, k, v = (torch.randn(2, 256, heads, 32) for heads in (4, 2, 2))
        >>> attention(q, k, v).shape
        torch.Size([2, 256, 4, 32])
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
        check_choice("position", position, get_args(Position))
        if position == "rope" and (head_dim % 2 or head_dim < 4):
            raise ValueError(f"head_dim must be even and at least 4 with position 'rope', got {head_dim}.")
        scale = head_dim**-0.5 if scale is None else scale
        above_0 = {"scale": scale, "rotary_base": rotary_base, "fire_c": fire_c, "fire_threshold": fire_threshold}
        for name, value in above_0.items():
            check_number(name, value, "a finite number above 0", lambda x: 0 < x < math.inf)
        self.num_heads, self.head_dim, self.position, self.window = num_heads, head_dim, position, window
        self.rotary_base, self.scale = rotary_base, scale
        self.stable_mask_gamma = _per_head("stable_mask_gamma", stable_mask_gamma, num_heads)
        self.scaling = RotaryScaling()
        if position == "fire":
            self.fire = FireBias(num_heads, fire_hidden_size, fire_c, fire_threshold, device=device, dtype=dtype)

    @property
    def scaling(self) -> RotaryScaling:
        """How "rope" scales its positions."""
        return self._scaling

    @scaling.setter
    def scaling(self, scaling: RotaryScaling) -> None:
        if not isinstance(scaling, RotaryScaling):
            raise TypeError(f"scaling must be a RotaryScaling, got {type(scaling).__name__}.")
        if scaling.kind == "yarn" and self.position == "rope" and self.rotary_base <= 1:
            raise ValueError(f"rotary_base must be above 1 with the scaling 'yarn', got {self.rotary_base}.")
        self._scaling = scaling

    def extra_repr(self) -> str:
        """Describe sizes and options."""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, position={self.position!r}, window={self.window}, "
            f"stable_mask_gamma={self.stable_mask_gamma}"
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, log_gates: Tensor | None = None
    ) -> Tensor:
        """Attend within each sequence or document.

        Memory is O(s) if a fused kernel serves the call. Otherwise (kernels.py lists when) the attention weights of one
        block of rows are in memory at a time. Then documents of one length are computed together, and on GPUs they are
        padded to the next power of two.

        Args:
            q: (b, s, h, d), or packed (t, h, d), in bf16, fp16, fp32 or fp64; at least one token.
            k: (b, s, h_kv, d), or packed (t, h_kv, d), in q's dtype. h must be a multiple of h_kv. Query head i reads
                KV head i // (h / h_kv).
            v: of k's shape, in q's dtype.
            cu_seqlens: offsets of packed documents, int32 (documents + 1,), non-decreasing from 0 to t, on any device.
                Offsets on a GPU are copied to the host once, and again after a write that torch counts. torch does not
                count writes by collectives, by CUDA graphs, by kernels of other libraries and through `.data`: after
                such a write the device stops with an error. Pass a new tensor, or keep the offsets on the CPU.
            log_gates: log f of the forget gate of each key (forget_gates.py), (b, s, h_kv), or packed (t, h_kv), fp32
                or fp64. Values below -1000, such as -inf of a closed gate, are taken as -1000. Must be None with
                StableMask. Default None: no gates.

        Returns:
            A tensor of q's shape and dtype. Sums are in fp32 (fp64 for fp64). Under autocast q, k and v are cast to
            the autocast dtype, except fp64, and the output has that dtype.

        Raises:
            TypeError: if an argument has the wrong type or dtype, or is on another device than q.
            ValueError: if an argument has the wrong shape or wrong values.
        """
        for name, value in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, value)
        if cu_seqlens is not None:
            check_tensor("cu_seqlens", cu_seqlens)
        q, k, v = (cast_by_autocast(x) for x in (q, k, v))
        self.check_inputs(q, k, v, packed=cu_seqlens is not None)
        if cu_seqlens is not None:
            _check_offsets(cu_seqlens)
        if log_gates is not None:
            self.check_gates(log_gates, k)
        with without_autocast(q):
            if cu_seqlens is None:
                return self._attend(q, k, v, (q.shape[1],), log_gates)
            lengths = last_offsets.lengths(cu_seqlens, q.shape[0])
            if len(set(lengths)) > 1:
                gates = None if log_gates is None else log_gates[None]
                return self._attend(q[None], k[None], v[None], lengths, gates)[0]
            q, k, v, gates = (None if x is None else x.unflatten(0, (len(lengths), -1)) for x in (q, k, v, log_gates))
            return self._attend(q, k, v, lengths[:1], gates).flatten(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], log_gates: Tensor | None) -> Tensor:
        """Attend within documents.

        Args:
            q: (b, s, h, d).
            k: (b, s, h_kv, d).
            v: (b, s, h_kv, d).
            lengths: lengths of the documents along s, the same in each row of b.
            log_gates: (b, s, h_kv), or None.
        """
        if self.position == "rope":
            cos, sin = rotary_cos_sin(lengths, self.head_dim, self.rotary_base, self.scaling, q.dtype, q.device)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        scores = self.scores(max(lengths))
        if log_gates is not None:
            q, k, v = with_gate_channels(q, k, v, log_gates, lengths, self.scale)
        o = kernels.attend(*(x.transpose(1, 2) for x in (q, k, v)), lengths, scores).transpose(1, 2)
        return o if log_gates is None else o[..., :-CHANNELS]

    def scores(self, longest: int) -> kernels.Scores:
        """Return how the scores are computed from rotated q and k. longest: length of the longest document."""
        return kernels.Scores(
            scale=self.scale,
            alibi_slopes=tuple(alibi_slopes(self.num_heads)) if self.position == "alibi" else None,
            fire=self.fire if self.position == "fire" else None,
            window=None if self.window is None or self.window >= longest else self.window,
            stable_mask_gammas=self.stable_mask_gamma,
        )

    def check_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, *, packed: bool, offsets: str = "cu_seqlens", min_tokens: int = 1
    ) -> None:
        """Raise ValueError or TypeError for a wrong shape, dtype or device of q, k and v; see `forward`.

        packed: the shapes are those of packed documents. offsets: what describes packed documents, for the message.
        min_tokens: the least number of tokens, 0 or 1.
        """
        expected = f"(t, h, d) with {offsets}" if packed else f"(b, s, h, d) without {offsets}"
        dims = 3 if packed else 4
        heads = (self.num_heads, self.head_dim)
        if q.dim() != dims or q.shape[-2:] != heads or q.shape[:-2].numel() < min_tokens:
            raise ValueError(
                f"q must have shape {expected}, with h = {self.num_heads}, d = {self.head_dim} and at least "
                f"{min_tokens} token{'s' if min_tokens != 1 else ''}, got {tuple(q.shape)}."
            )
        if k.dim() != dims or (*k.shape[:-2], k.shape[-1]) != (*q.shape[:-2], self.head_dim):
            raise ValueError(
                f"k must have q's shape {tuple(q.shape)}, except for the number of heads, got {tuple(k.shape)}."
            )
        if k.shape[-2] == 0 or self.num_heads % k.shape[-2]:
            raise ValueError(f"k must have a number of heads that divides {self.num_heads}, got {k.shape[-2]}.")
        if v.shape != k.shape:
            raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}.")
        if q.dtype not in _DTYPES:
            raise TypeError(f"q must have one of the dtypes {', '.join(map(str, _DTYPES))}, got {q.dtype}.")
        for name, x in (("k", k), ("v", v)):
            if (x.dtype, x.device) != (q.dtype, q.device):
                raise TypeError(f"{name} must be {q.dtype} on {q.device} as q, got {x.dtype} on {x.device}.")

    def check_gates(self, log_gates: object, k: Tensor) -> None:
        """Raise ValueError or TypeError unless log_gates are fp32 or fp64, one for each token and KV head of k.

        StableMask compares the scores with pseudo scores of fixed size. Gates shift the scores of a row, and the
        kernels leave out the shift that all keys of a row share (forget_gates.py), so both together are an error.
        """
        check_tensor("log_gates", log_gates)
        if self.stable_mask_gamma is not None:
            raise ValueError(
                f"log_gates must be None with stable_mask_gamma, {self.stable_mask_gamma}, got a tensor: StableMask "
                "has no forget gates."
            )
        if log_gates.shape != k.shape[:-1]:
            raise ValueError(f"log_gates must have the shape {tuple(k.shape[:-1])} of k, got {tuple(log_gates.shape)}.")
        if log_gates.dtype not in (torch.float32, torch.float64) or log_gates.device != k.device:
            raise TypeError(
                f"log_gates must be torch.float32 or torch.float64 on {k.device} as k, got {log_gates.dtype} on "
                f"{log_gates.device}."
            )


def _check_offsets(cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            "cu_seqlens must be torch.int32 of shape (documents + 1,), "
            f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}."
        )


def cast_by_autocast(x: Tensor) -> Tensor:
    """Cast x as autocast does for the stick-breaking operators and torch's own. fp64 stays."""
    casts = x.is_floating_point() and x.dtype != torch.float64 and not x.is_meta
    enabled = casts and torch.is_autocast_enabled(x.device.type)
    return x.to(torch.get_autocast_dtype(x.device.type)) if enabled else x


def _per_head(name: str, value: float | Sequence[float] | None, num_heads: int) -> tuple[float, ...] | None:
    """Return one number for each head, or None."""
    if value is None:
        return None
    expected = f"a finite number of at least 0, or a sequence of {num_heads} such numbers"
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    values = tuple(value) if is_sequence else (value,) * num_heads
    if len(values) != num_heads:
        raise ValueError(f"{name} must be {expected}, got {value}.")
    for x in values:
        check_number(name, x, expected, lambda x: 0 <= x < math.inf)
    return values
