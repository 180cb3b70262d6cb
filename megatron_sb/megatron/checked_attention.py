"""The self-attention of a layer: Megatron's, with checks and forget gates for stick-breaking attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.utils import get_pg_size
from torch import Tensor

from megatron_sb.megatron import versions
from megatron_sb.megatron.arguments import StickBreakingOptions
from megatron_sb.megatron.core_attention import StickBreakingCoreAttention
from megatron_sb.megatron.dynamic_inference import Requests, attend_to_blocks
from megatron_sb.megatron.gates import GATE_COLUMNS, gate_projection, normalized, with_gate_loss, with_gates
from megatron_sb.megatron.layer_selection import is_selected
from megatron_sb.megatron.packed import is_packed
from megatron_sb.megatron.settings import LATENT_REQUIREMENTS, check_settings, rope_disabled_in


class CheckedAttention:
    """Mix-in that adds checks, forget gates and dynamic inference to a self-attention of Megatron-Core.

    The checks reject settings that a core attention cannot detect. Rotary embeddings are applied to q and k before the
    core attention runs. `--attention-backend local` replaces it. Without the checks, the model would silently compute
    another attention.

    Dynamic inference does not call the core attention either, but `flash_decode_and_prefill`. Here that method computes
    stick-breaking attention.

    With `forget_gate` the module has gate_proj, which computes a gate for each key and KV head from the hidden states.
    The core attention gets the keys with their gates appended. gate_loss is the mean of -log f over this rank's tokens
    and heads in the latest micro-batch.

    In a mixed model (`layers`) the other layers are Megatron's own, with the core attention `softmax` and without
    checks. Only they may use rotary embeddings: `--no-rope-freq` must name the stick-breaking layers. Entry i of
    `layers` is for the layer with number `attention_layers[i]`. None: as Megatron's settings say, see
    `attention_layers_of`.
    """

    def __init__(
        self, config, submodules, layer_number, *args, layers=None, attention_layers=None, softmax=None, **kwargs
    ):
        self.stick_breaking = is_selected(layer_number, config, layers, attention_layers)
        if self.stick_breaking:
            self._check_config(config)
        else:
            submodules = dataclasses.replace(submodules, core_attention=softmax)
        if layers is not None:  # layers with different parameters need different keys in a checkpoint
            config.hetereogenous_dist_checkpoint = True
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        if self.stick_breaking and not isinstance(self.core_attention, StickBreakingCoreAttention):
            raise ValueError(
                "core_attention must be a StickBreakingCoreAttention, got "
                f"{type(self.core_attention).__name__}. --attention-backend local replaces it; use --attention-backend "
                "auto."
            )
        self._check_norms(config)
        self.dynamic_context = None  # of the forward that is running
        options = self.core_attention.options if self.stick_breaking else StickBreakingOptions()
        self.gate_proj, self.gate_loss, self.gate_loss_coefficient = None, None, options.forget_gate_loss
        if options.forget_gate:
            # Kept, because an adapter such as LoRA can wrap the projection and hide its norm. As an entry of a tuple it
            # is not a second module.
            self._gate_source = projection, num_kv_heads = self._gate_inputs()
            self.gate_proj = gate_projection(config, projection, self.pg_collection.tp, num_kv_heads)
            self.key_hidden_size += GATE_COLUMNS  # of the keys in Megatron's static caches

    def _check_config(self, config) -> None:
        """Raise ValueError for a setting of this kind of attention that is not supported."""

    def _check_norms(self, config) -> None:
        """Raise ValueError if the layer spec lacks a norm of q and k that the config asks for."""
        raise NotImplementedError

    def _gate_inputs(self) -> tuple[torch.nn.Module, int]:
        """Return a projection of the hidden states of which the gates are computed, and the number of KV heads."""
        raise NotImplementedError

    def get_query_key_value_tensors(self, hidden_states, *args, **kwargs):
        """Compute q, k and v as Megatron-Core does, and append the gates to the keys."""
        qkv = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        if self.gate_proj is None:
            return qkv
        projection, num_kv_heads = self._gate_source
        logits, _ = self.gate_proj(normalized(hidden_states, projection))
        logits, self.gate_loss = with_gate_loss(logits, self.gate_loss_coefficient, self.config, num_kv_heads)
        query, key, *others = qkv
        return query, with_gates(key, logits.view(key.shape[:-1])), *others

    def forward(self, hidden_states, attention_mask, key_value_states=None, inference_context=None, **kwargs):
        """Attend as in Megatron-Core.

        Raises:
            ValueError: in a stick-breaking layer, for rotary embeddings, and for dynamic inference with forget gates,
                Euclidean logits, multi-latent attention, or a CUDA graph of prompts.
        """
        if self.stick_breaking:
            context = inference_context if inference_context is not None else kwargs.get("inference_params")
            self._check_call(kwargs)
            if context is not None and not context.is_static_batching():
                self._check_dynamic(context)
                self.dynamic_context = context
        try:
            return super().forward(hidden_states, attention_mask, key_value_states, inference_context, **kwargs)
        finally:
            self.dynamic_context = None

    def flash_decode_and_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqlens_k: Tensor,
        block_table: Tensor,
        is_decode_only: bool,
        **kwargs,
    ) -> Tensor:
        """Compute the attention of a step of dynamic inference. Arguments are those of Megatron's method.

        Args:
            q: (t, 1, h, d), the queries of all requests.
            k: (num_blocks, block_size, g, d).
            v: (num_blocks, block_size, g, d).
            max_seqlen_q: upper bound of the number of queries of a request.
            max_seqlen_k: upper bound of the number of keys of a request.
            cu_seqlens_q: int32 (n + 1,), offsets of the queries of n requests.
            cu_seqlens_k: not used by stick-breaking layers.
            seqlens_k: int32 (n,), the number of keys of each request.
            block_table: int32 (n, max_blocks).
            is_decode_only: whether no request processes its prompt.
            kwargs: not used by stick-breaking layers, whose softmax settings are checked.

        Returns:
            (t, 1, h, d).
        """
        if not self.stick_breaking:
            lengths = (max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqlens_k)
            return super().flash_decode_and_prefill(q, k, v, *lengths, block_table, is_decode_only, **kwargs)
        core, context = self.core_attention, self.dynamic_context
        requests = Requests(
            num_decoding=len(seqlens_k) if is_decode_only else context.num_decode_requests,
            queries_to_decode=1 + getattr(context, "num_speculative_tokens", 0),  # 0.16 has no such tokens
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            block_table=block_table,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )
        out, mass = attend_to_blocks(q.squeeze(1), k, v, requests, **core.attention_options)
        return core.head_output(out, mass)[:, None]

    def _check_call(self, kwargs: dict) -> None:
        """Raise ValueError for arguments of a call that are not supported."""
        # Megatron also passes rotary embeddings to layers where --no-rope-freq disables them.
        ignored = {"rotary_pos_emb"} if rope_disabled_in(self.config, self.layer_number) else set()
        for name, value in kwargs.items():
            if name.startswith("rotary_") and name not in ignored and value is not None:
                raise ValueError(
                    f"{name} must be None in a stick-breaking layer, got rotary embeddings in layer "
                    f"{self.layer_number}: the order of the keys encodes positions. Use --position-embedding-type "
                    "none, or disable them in this layer with --no-rope-freq (config.no_rope_freq)."
                )

    def _check_dynamic(self, inference_context) -> None:
        """Raise ValueError for a layer or a step that dynamic inference does not support."""
        options = self.core_attention.options
        found = {
            "forget_gate=True (--sb-forget-gate)": options.forget_gate,
            f"logits={options.logits!r} (--sb-logits)": options.logits != "dot",
            "multi-latent attention (--multi-latent-attention)": self.core_attention.is_latent,
        }
        for name, is_set in found.items():
            if is_set:
                raise ValueError(
                    f"inference_context must use static batching with {name}, got a dynamic "
                    f"{type(inference_context).__name__}, whose blocks have no room for these keys."
                )
        if inference_context.using_cuda_graph_this_step() and not inference_context.is_decode_only():
            raise ValueError(
                "use_cuda_graphs_for_non_decode_steps must be False with stick-breaking attention "
                "(--decode-only-cuda-graphs), got a CUDA graph of a step with prompts."
            )


class CheckedSelfAttention(CheckedAttention, SelfAttention):
    """Megatron's self-attention with the checks and forget gates of `CheckedAttention`."""

    def _check_norms(self, config) -> None:
        for name, flag in (("qk_layernorm", "--qk-layernorm"), ("qk_l2_norm", "--qk-l2-norm")):
            if getattr(config, name, False) and isinstance(self.q_layernorm, (IdentityOp, type(None))):
                raise ValueError(
                    f"config.{name}=True ({flag}) needs a layer spec with q_layernorm, and this one has none. Use "
                    f"with_stickbreaking on a spec built with {name}=True."
                )

    def _gate_inputs(self) -> tuple[torch.nn.Module, int]:
        return self.linear_qkv, self.config.num_query_groups


class CheckedMLASelfAttention(CheckedAttention, MLASelfAttention):
    """Megatron's multi-latent attention with the checks and forget gates of `CheckedAttention`.

    In a stick-breaking layer nothing is rotated. Megatron's multi-latent attention has a rotary embedding of its own
    for the last qk_pos_emb_head_dim channels of q and k, which no setting disables. `NoRotation` takes its place, so
    that these channels are as the projections make them. The parameters are those of Megatron's layer.
    """

    def __init__(self, config, submodules, layer_number, *args, **kwargs):
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        if self.stick_breaking:
            self.rotary_pos_emb = NoRotation(config.rope_type, lambda: next(self.parameters()).device)

    def _check_config(self, config) -> None:
        check_settings(config, "config", LATENT_REQUIREMENTS)

    def _check_norms(self, config) -> None:
        in_projection = "LayerNorm" in type(self.linear_kv_up_proj).__name__
        if config.qk_layernorm and isinstance(self.kv_layernorm, IdentityOp) and not in_projection:
            raise ValueError(
                "config.qk_layernorm=True (--qk-layernorm) needs a layer spec with kv_layernorm, and this one has "
                "none. Use with_stickbreaking on a spec built with qk_layernorm=True."
            )

    def _gate_inputs(self) -> tuple[torch.nn.Module, int]:
        return self.linear_kv_down_proj, self.config.num_attention_heads

    def get_query_key_value_tensors(
        self,
        hidden_states,
        key_value_states=None,
        position_ids=None,
        packed_seq_params=None,
        inference_context=None,
        **kwargs,
    ):
        """Compute q, k and v as Megatron-Core does, without rotation, and append the gates to the keys."""
        if self.stick_breaking:
            # Only the rotation reads the documents. Without them it treats the rows as one sequence, so that documents
            # can have any length on a context-parallel rank, and the host does not wait for their lengths.
            packed_seq_params = PackedSeqParams(qkv_format="thd") if is_packed(packed_seq_params) else None
        query, key, *others = super().get_query_key_value_tensors(
            hidden_states,
            key_value_states,
            position_ids,
            packed_seq_params,
            inference_context=inference_context,
            **kwargs,
        )
        if self.stick_breaking and self._shared_gradient_is_partial():
            key = _SumSharedGradient.apply(key, self.config.qk_head_dim, self.q_head_dim, self.pg_collection.tp)
        return query, key, *others

    def _shared_gradient_is_partial(self) -> bool:
        """Return whether Megatron leaves out the other ranks' heads in the gradient of the keys' shared channels.

        All heads have the same last qk_pos_emb_head_dim channels of a key. Each tensor-parallel rank has the gradient
        from its own heads. Megatron sums it only if sequence parallelism gathers these channels from replicated
        projections, those of Transformer Engine.
        """
        if get_pg_size(self.pg_collection.tp) == 1 or versions.SUMS_SHARED_GRADIENT:
            return False
        columns = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        is_replicated = self.linear_kv_down_proj.weight.shape[0] == columns
        return not (is_replicated and self.config.sequence_parallel)

    def _run_core_attention(
        self, query, key, value, attention_mask, packed_seq_params=None, attn_mask_type=None, **kwargs
    ):
        """Call the core attention. Megatron-Core 0.19 would pad packed values to the channels of the keys."""
        run = self.core_attention if self.stick_breaking else super()._run_core_attention
        return run(
            query,
            key,
            value,
            attention_mask,
            packed_seq_params=packed_seq_params,
            attn_mask_type=attn_mask_type,
            **kwargs,
        )


class _SumSharedGradient(torch.autograd.Function):
    """Pass keys on, and sum the gradient of the channels that all heads share over the heads of all ranks.

    The sum goes to the first head and 0 to the others, because the backward of Megatron's `expand` adds up the heads.
    """

    @staticmethod
    def forward(ctx, key: Tensor, first: int, end: int, group) -> Tensor:
        ctx.first, ctx.end, ctx.group = first, end, group
        return key.view_as(key)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        total = grad[..., ctx.first : ctx.end].sum(-2)
        torch.distributed.all_reduce(total, group=ctx.group)
        grad = grad.clone()
        shared = grad[..., ctx.first : ctx.end]
        shared.zero_()
        shared[..., 0, :] = total
        return grad, None, None, None


class NoRotation(RotaryEmbedding):
    """A rotary embedding of 0 channels, for Megatron's multi-latent attention.

    Megatron rotates as many channels as the angles have columns, and passes on the others unchanged, in their order and
    without YaRN's factor. These angles have no columns.

    Args:
        rope_type: `config.rope_type`, "rope" or "yarn", which decides what the caller expects.
        device: returns the device of the layer's parameters, which can change after the layer was built.

    Example:
        >>> import torch
        >>> from megatron_sb.megatron.checked_attention import NoRotation
        >>> rotary = NoRotation("rope", lambda: torch.device("cpu"))
        >>> rotary(rotary.get_rotary_seq_len())[0:128].shape  # of a sequence of 128 rows
        torch.Size([128, 1, 1, 0])
    """

    MAX_ROWS = 2**40  # more than any sequence has; an empty tensor takes no memory

    def __init__(self, rope_type: str, device: Callable[[], torch.device]):
        torch.nn.Module.__init__(self)
        self.rope_type, self.device = rope_type, device

    def get_rotary_seq_len(self, *args, **kwargs) -> int:
        """Return the number of rows of the angles. The caller takes those that it needs."""
        return self.MAX_ROWS

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None
    ) -> Tensor | tuple[Tensor, float]:
        """Return angles (max_seq_len, 1, 1, 0), or (1, 1, 0) for packed rows. For YaRN, also its factor, 1."""
        shape = (1, 1, 0) if packed_seq else (max_seq_len, 1, 1, 0)
        angles = torch.empty(shape, device=self.device())
        return (angles, 1.0) if self.rope_type == "yarn" else angles
