"""A gated delta net as Megatron-Core's self-attention, for packed sequences on one GPU.

Megatron-Core's own `GatedDeltaNet` has no packed sequences. This module holds the layer of flash-linear-attention, with
its Triton kernels.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_sb.megatron.packed import document_bounds, is_packed
from megatron_sb.validation import InputError


class GatedDeltaNet(MegatronModule):
    """A gated delta net (arXiv 2412.06464): linear attention, whose state has a fixed size for each head.

    The projections have the initial weights of the model's other linear layers, and the rest has that of
    flash-linear-attention.

    Args:
        config: a TransformerConfig without tensor, context and sequence parallelism.
        layer_number: 1-based, as Megatron counts.
        num_heads: heads of queries, keys and values.
        expand_v: channels of a head's values for each channel of its keys; config.kv_channels are those of the keys.
        unused: what Megatron-Core passes to every self-attention.
    """

    def __init__(self, config, layer_number, num_heads, expand_v, **unused):
        from fla.layers import GatedDeltaNet as PublishedGatedDeltaNet  # its import takes ten seconds

        super().__init__(config=config)
        self.layer_number = layer_number
        self.net = PublishedGatedDeltaNet(
            hidden_size=config.hidden_size,
            head_dim=config.kv_channels,
            num_heads=num_heads,
            expand_v=expand_v,
            norm_eps=config.layernorm_epsilon,
        ).to(config.params_dtype)
        for name, module in self.net.named_children():
            if isinstance(module, torch.nn.Linear):
                init = config.output_layer_init_method if name == "o_proj" else config.init_method
                init(module.weight)

    def forward(self, hidden_states: Tensor, *unused, packed_seq_params=None, **kwargs) -> tuple[Tensor, None]:
        """Compute the layer.

        Args:
            hidden_states: (t, 1, hidden_size), packed documents.
            packed_seq_params: required. Its cu_seqlens_q are the offsets of the documents, from 0 to t.
            unused, kwargs: what Megatron-Core passes to every self-attention.

        Returns:
            (t, 1, hidden_size), and None for the bias, which this layer does not have.

        Raises:
            ValueError: packed_seq_params has no packed sequences.
        """
        if not is_packed(packed_seq_params):
            raise InputError("packed_seq_params must be packed sequences (qkv_format 'thd'), got None")
        cu_seqlens, _ = document_bounds(packed_seq_params)
        output, *_ = self.net(hidden_states.transpose(0, 1), cu_seqlens=cu_seqlens)
        return output.transpose(0, 1), None
