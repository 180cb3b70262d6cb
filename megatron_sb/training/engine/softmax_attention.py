"""Softmax baselines as Megatron-Core's core attention, for packed sequences, without context parallelism.

Megatron-Core's own attention needs Transformer Engine or a GPU for packed sequences and for rotary embeddings. This
core attention uses torch's kernels and runs on every device that torch supports.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_sb.baselines.softmax import RotaryScaling, SoftmaxAttention
from megatron_sb.validation import InputError


class SoftmaxCoreAttention(MegatronModule):
    """A causal `core_attention` for packed sequences around `megatron_sb.baselines.softmax.SoftmaxAttention`.

    Args:
        global_interval: every so many layers, one attends to all keys and has no positions. Default None: no layer.
        options: position, window, stable_mask_gamma and rotary_base of SoftmaxAttention. The other arguments are those
            of Megatron-Core.

    Raises:
        ValueError: The configuration has context parallelism or dropout.
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
        global_interval=None,
        **options,
    ):
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise InputError(
                "context_parallel_size must be 1, because softmax attention has no context parallelism, "
                f"got {config.context_parallel_size}"
            )
        if config.attention_dropout:
            raise InputError(f"attention_dropout must be 0, got {config.attention_dropout}")
        if global_interval is not None and layer_number % global_interval == 0:
            options |= {"position": "none", "window": None}
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
        """Compute the attention.

        Args:
            query: (t, h, d).
            key: (t, h_kv, d).
            value: (t, h_kv, d).
            attention_mask: ignored, as are attn_mask_type and attention_bias.
            packed_seq_params: required. Its cu_seqlens_q are the offsets of the documents.

        Returns:
            (t, h * d).

        Raises:
            ValueError: packed_seq_params is None.
        """
        if packed_seq_params is None:
            raise InputError("packed_seq_params must be packed sequences (qkv_format 'thd'), got None")
        return self.attention(query, key, value, packed_seq_params.cu_seqlens_q).flatten(1)


def set_rotary_scaling(model: torch.nn.Module, scaling: RotaryScaling) -> None:
    """Set the scaling of rotary positions in every SoftmaxAttention of `model`."""
    for module in model.modules():
        if isinstance(module, SoftmaxAttention):
            module.scaling = scaling
