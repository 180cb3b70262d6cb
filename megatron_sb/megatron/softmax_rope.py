"""The baseline of the comparison: softmax attention with rotary embeddings (Su et al., arXiv 2104.09864), packed
sequences, no context parallelism.

Megatron-Core's own needs Transformer Engine or a GPU for packed sequences and for its rotary embedding; this one runs
on torch's scaled_dot_product_attention wherever torch does: cuDNN's kernels on GPUs, where torch.compile also fuses the
rotation. Documents of different lengths take torch's FlashAttention-2 there, which has one kernel for all of them.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import get_args

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from megatron_sb.config import RotaryKind

# Fastest first. The third is the one for fp32 whose memory does not grow with the square of a length.
CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class RotaryScaling:
    """How positions beyond the trained context are made to look like trained ones.

    kind: "none"; "linear", positions divided by `factor` (Chen et al., arXiv 2306.15595); "ntk", the base times
        factor ** (d / (d - 2)), which stretches the longest wavelength by `factor` and leaves the shortest.
    factor: the context over the trained one, at least 1.
    Raises ValueError for another kind, or a factor below 1.
    """

    kind: RotaryKind = "none"
    factor: float = 1.0

    def __post_init__(self):
        """Refuse what no formula is for."""
        allowed = get_args(RotaryKind)
        if self.kind not in allowed:
            raise ValueError(f"kind = {self.kind!r}: one of {', '.join(map(repr, allowed))} is allowed")
        if self.factor < 1:
            raise ValueError(f"factor = {self.factor}: at least 1 is allowed")


class SoftmaxRotaryAttention(MegatronModule):
    """A `core_attention` for packed sequences: rotates q and k by their position in the document, then causal softmax
    attention per document.

    rotary_base: the longest wavelength is about 2 * pi * rotary_base positions.
    Attribute `scaling`: a RotaryScaling, which may be set between calls.
    Raises ValueError for what it does not do: context parallelism, dropout, an unpacked input.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        rotary_base=10000.0,
    ):
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError(
                f"context_parallel_size = {config.context_parallel_size}: the softmax baseline runs without "
                "context parallelism (1)"
            )
        if config.attention_dropout:
            raise ValueError(f"attention_dropout = {config.attention_dropout}: the softmax baseline has none (0)")
        self.softmax_scale = softmax_scale
        self.rotary_base = rotary_base
        self.scaling = RotaryScaling()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        *,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> Tensor:
        """query: (t, h, d); key, value: (t, h_kv, d) -> (t, h * d)."""
        if packed_seq_params is None:
            raise ValueError("packed_seq_params = None: the softmax baseline takes packed sequences (qkv_format 'thd')")
        batch = _shared.get(packed_seq_params.cu_seqlens_q, query, self.rotary_base, self.scaling)
        rotate = _fused_rotate if query.is_cuda else _rotate
        query, key = rotate(query, batch.cos, batch.sin), rotate(key, batch.cos, batch.sin)
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
        return self._attend(query, key, value, batch).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, batch: _Batch) -> Tensor:
        """Each document's causal attention, (t, h, d): in one call where there is a kernel for it, else in one each."""
        equal = len(set(batch.lengths)) == 1
        if not equal and query.is_cuda and query.dtype != torch.float32:
            bounds, longest = batch.cu_seqlens, max(batch.lengths)
            window = (-1, 0)  # causal
            return varlen_attn(
                query, key, value, bounds, bounds, longest, longest, scale=self.softmax_scale, window_size=window
            )
        at_once = len(batch.lengths) if equal else 1
        outputs = []
        with sdpa_kernel(CUDA_BACKENDS, set_priority=True) if query.is_cuda else contextlib.nullcontext():
            for start, end in itertools.pairwise(batch.bounds[::at_once]):
                rows = (x[start:end].unflatten(0, (at_once, -1)).transpose(1, 2) for x in (query, key, value))
                out = scaled_dot_product_attention(*rows, is_causal=True, scale=self.softmax_scale)
                outputs.append(out.transpose(1, 2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def set_rotary_scaling(model: torch.nn.Module, scaling: RotaryScaling) -> None:
    """Set it in every layer of `model` that has a SoftmaxRotaryAttention."""
    for module in model.modules():
        if isinstance(module, SoftmaxRotaryAttention):
            module.scaling = scaling


@dataclass(frozen=True)
class _Batch:
    """What all layers share of a batch. bounds: cu_seqlens on the host; lengths: between them. cos, sin: (t, 1, d / 2),
    in q's dtype.
    """

    cu_seqlens: Tensor
    bounds: list[int]
    lengths: list[int]
    cos: Tensor
    sin: Tensor


class _LastBatch:
    """Bounds and angles of the batch that was asked for last: made by its first layer, not by each of them."""

    def __init__(self) -> None:
        self._key: tuple | None = None

    def get(self, cu_seqlens: Tensor, query: Tensor, base: float, scaling: RotaryScaling) -> _Batch:
        key = (id(cu_seqlens), cu_seqlens._version, query.shape, query.dtype, base, scaling)
        if key != self._key:
            bounds = cu_seqlens.tolist()
            lengths = [end - start for start, end in itertools.pairwise(bounds)]
            self._batch = _Batch(cu_seqlens, bounds, lengths, *_angles(lengths, query, base, scaling))
            self._key = key  # of what _batch keeps alive: an id is only unique among the living
        return self._batch


_shared = _LastBatch()


def _angles(lengths: list[int], query: Tensor, base: float, scaling: RotaryScaling) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, (t, 1, d / 2) each, the angles in float64."""
    tokens, _, dim = query.shape
    position = torch.cat([torch.arange(length) for length in lengths])
    position = torch.nn.functional.pad(position, (0, tokens - position.numel())).to(query.device, torch.float64)
    if scaling.kind == "linear":
        position = position / scaling.factor
    if scaling.kind == "ntk":
        base = base * scaling.factor ** (dim / (dim - 2))
    inverse_wavelengths = base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=query.device) / dim)
    angle = position[:, None, None] * inverse_wavelengths
    return angle.cos().to(query.dtype), angle.sin().to(query.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + d / 2])."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


_fused_rotate = torch.compile(_rotate)
