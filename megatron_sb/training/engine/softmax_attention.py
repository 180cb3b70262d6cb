"""Softmax baselines as Megatron-Core's core attention, for packed sequences, with context parallelism.

Megatron-Core's own attention needs Transformer Engine or a GPU for packed sequences and for rotary embeddings. This
core attention uses torch's kernels and runs on every device that torch supports.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_sb.baselines.softmax import RotaryScaling, SoftmaxAttention, context_parallel_softmax
from megatron_sb.megatron.gates import GATE_COLUMNS, gate_projection, with_gates
from megatron_sb.megatron.packed import document_bounds
from megatron_sb.megatron.plans import hierarchical_levels, shared_plans
from megatron_sb.nn.gates import wide
from megatron_sb.validation import InputError


class GatedSelfAttention(SelfAttention):
    """Megatron's self-attention with gate_proj, which computes a forget gate for each key and KV head.

    The core attention gets the keys with the logits of their gates appended, as in stick-breaking layers.
    """

    def __init__(self, config, submodules, layer_number, *args, **kwargs):
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.gate_proj = gate_projection(config, self.linear_qkv, self.pg_collection.tp)

    def get_query_key_value_tensors(self, hidden_states, *args, **kwargs):
        """Compute q, k and v as Megatron-Core does, and append the logits of the gates to the keys."""
        query, key, *others = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        logits, _ = self.gate_proj(hidden_states)
        return query, with_gates(key, logits), *others


class SoftmaxCoreAttention(MegatronModule):
    """A causal `core_attention` for packed sequences around `megatron_sb.baselines.softmax.SoftmaxAttention`.

    With context parallelism it takes the plan of the stick-breaking layers of the same batch, if there are any.

    Args:
        cp_comm_type: mode of `context_parallel_softmax`. Default None: "auto".
        forget_gate: the last channels of the keys are the logits of forget gates; see `GatedSelfAttention`. Default
            False.
        global_interval: every so many layers, one attends to all keys and has no positions. Default None: no layer.
        cp_layout: layout of the sequences over context-parallel ranks; see `megatron_sb.ContextParallelPlan`. Default
            "zigzag".
        packing: see `megatron_sb.ContextParallelPlan`. Default "per_document".
        options: position, window, stable_mask_gamma and rotary_base of SoftmaxAttention. The other arguments are those
            of Megatron-Core.

    Raises:
        ValueError: The configuration has dropout, or cp_comm_type needs groups that do not exist.
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
        forget_gate=False,
        global_interval=None,
        cp_layout="zigzag",
        packing="per_document",
        **options,
    ):
        super().__init__(config=config)
        if config.attention_dropout:
            raise InputError(f"attention_dropout must be 0, got {config.attention_dropout}")
        if global_interval is not None and layer_number % global_interval == 0:
            options |= {"position": "none", "window": None}
        self.forget_gate = forget_gate
        num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.attention = SoftmaxAttention(num_heads, config.kv_channels, scale=softmax_scale, **options)
        self.cp_comm_type = cp_comm_type or "auto"
        self.cp_layout, self.packing = cp_layout, packing
        self.cp_group, self.hierarchical_groups = None, None
        if config.context_parallel_size > 1:
            self._find_groups(pg_collection)

    def _find_groups(self, pg_collection) -> None:
        """Set this rank's context-parallel group, and with "a2a+p2p" its a2a and p2p groups."""
        self.cp_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        if self.cp_comm_type != "a2a+p2p":
            return
        levels = hierarchical_levels(pg_collection)
        if len(levels) != 2:
            raise InputError(
                f"cp_comm_type = 'a2a+p2p' needs two levels of hierarchical_context_parallel_sizes, got {len(levels)}"
            )
        self.hierarchical_groups = levels

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
            key: (t, h_kv, d), or with forget gates (t, h_kv, d + GATE_COLUMNS).
            value: (t, h_kv, d).
            attention_mask: ignored, as are attn_mask_type and attention_bias.
            packed_seq_params: required. Its cu_seqlens_q (cu_seqlens_q_padded, if set) are the offsets of the documents
                of all context-parallel ranks.

        Returns:
            (t, h * d).

        Raises:
            ValueError: packed_seq_params is None, or a document does not divide into equal chunks of the ranks.
        """
        if packed_seq_params is None:
            raise InputError("packed_seq_params must be packed sequences (qkv_format 'thd'), got None")
        log_gates = None
        if self.forget_gate:
            log_gates = logsigmoid(wide(key[..., -GATE_COLUMNS]))
            key = key[..., :-GATE_COLUMNS]
        cu_seqlens, _ = document_bounds(packed_seq_params)
        if self.cp_group is None:
            return self.attention(query, key, value, cu_seqlens, log_gates).flatten(1)
        plan = shared_plans.get(
            self.cp_group,
            local_len=len(query),
            cu_seqlens=cu_seqlens,
            layout=self.cp_layout,
            packing=self.packing,
        )
        groups = {"comm": self.cp_comm_type, "hierarchical_groups": self.hierarchical_groups}
        return context_parallel_softmax(self.attention, query, key, value, log_gates, plan=plan, **groups).flatten(1)


def set_rotary_scaling(model: torch.nn.Module, scaling: RotaryScaling) -> None:
    """Set the scaling of rotary positions in every SoftmaxAttention of `model`."""
    for module in model.modules():
        if isinstance(module, SoftmaxAttention):
            module.scaling = scaling
