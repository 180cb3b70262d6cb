"""The baseline of the comparison: softmax attention with rotary embeddings (Su et al., arXiv 2104.09864), packed
sequences, no context parallelism.

Megatron-Core's own needs Transformer Engine or a GPU for packed sequences and for its rotary embedding; this one runs
on torch's scaled_dot_product_attention wherever torch does.
"""

from __future__ import annotations

import itertools

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class SoftmaxRotaryAttention(MegatronModule):
    """A `core_attention` for packed sequences: rotates q and k by their position in the document, then causal softmax
    attention per document.

    rotary_base: the longest wavelength is about 2 * pi * rotary_base positions.
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
        half = config.kv_channels // 2
        self.register_buffer(
            "inverse_wavelengths", rotary_base ** -(torch.arange(half, dtype=torch.float64) / half), persistent=False
        )

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
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        cos, sin = self._rotation(packed_seq_params.cu_seqlens_q, query)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
        outputs = [  # (1, h, s, d): torch's fused kernels take four dimensions only
            scaled_dot_product_attention(
                *(x[None, start:end].transpose(1, 2) for x in (query, key, value)),
                is_causal=True,
                scale=self.softmax_scale,
            )
            for start, end in itertools.pairwise(bounds)
        ]
        return torch.cat(outputs, dim=2)[0].transpose(0, 1).flatten(1)

    def _rotation(self, cu_seqlens: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position's angles, (t, 1, d / 2) each, the angles in float64."""
        position = torch.arange(query.shape[0], device=query.device)
        position = position - cu_seqlens[torch.bucketize(position, cu_seqlens[1:], right=True)]
        angle = position[:, None, None] * self.inverse_wavelengths
        return angle.cos().to(query.dtype), angle.sin().to(query.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + d / 2])."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
