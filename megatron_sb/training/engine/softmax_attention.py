"""The baselines of a comparison as Megatron-Core's core attention: softmax over packed sequences, on torch's kernels,
without context parallelism.

Megatron-Core's own needs Transformer Engine or a GPU for packed sequences and for its rotary embedding; this one runs
wherever torch does.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_sb.baselines.softmax import RotaryScaling, SoftmaxAttention


class SoftmaxCoreAttention(MegatronModule):
    """A causal `core_attention` for packed sequences around `megatron_sb.baselines.softmax.SoftmaxAttention`.

    options: those of SoftmaxAttention beside its sizes and scale: position, window, stable_mask_gamma, rotary_base.
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
        **options,
    ):
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError(
                f"context_parallel_size = {config.context_parallel_size}: softmax attention runs without context "
                "parallelism (1)"
            )
        if config.attention_dropout:
            raise ValueError(f"attention_dropout = {config.attention_dropout}: softmax attention has none (0)")
        num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.attention = SoftmaxAttention(num_heads, config.kv_channels, scale=softmax_scale, **options)

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
            raise ValueError("packed_seq_params = None: softmax attention takes packed sequences (qkv_format 'thd')")
        return self.attention(query, key, value, packed_seq_params.cu_seqlens_q).flatten(1)


def set_rotary_scaling(model: torch.nn.Module, scaling: RotaryScaling) -> None:
    """Set it in every layer of `model` that has a SoftmaxAttention."""
    for module in model.modules():
        if isinstance(module, SoftmaxAttention):
            module.scaling = scaling
