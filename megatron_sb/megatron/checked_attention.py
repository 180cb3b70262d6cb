"""The self-attention of a layer: Megatron's, with checks and forget gates for stick-breaking attention."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp

from megatron_sb.megatron.arguments import StickBreakingOptions
from megatron_sb.megatron.core_attention import StickBreakingCoreAttention
from megatron_sb.megatron.gates import gate_projection, with_gate_loss, with_gates
from megatron_sb.megatron.layer_selection import is_selected
from megatron_sb.megatron.settings import rope_disabled_in


class CheckedSelfAttention(SelfAttention):
    """Megatron's self-attention with checks and forget gates for stick-breaking attention.

    The checks reject three settings that a core attention cannot detect. Rotary embeddings are applied to q and k
    before the core attention runs. Dynamic inference does not call it. `--attention-backend local` replaces it. Without
    the checks, the model would silently compute another attention.

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
        if not self.stick_breaking:
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
        for name, flag in (("qk_layernorm", "--qk-layernorm"), ("qk_l2_norm", "--qk-l2-norm")):
            if getattr(config, name, False) and isinstance(self.q_layernorm, (IdentityOp, type(None))):
                raise ValueError(
                    f"config.{name}=True ({flag}) needs a layer spec with q_layernorm, and this one has none. Use "
                    f"with_stickbreaking on a spec built with {name}=True."
                )
        options = self.core_attention.options if self.stick_breaking else StickBreakingOptions()
        self.gate_proj, self.gate_loss, self.gate_loss_coefficient = None, None, options.forget_gate_loss
        if options.forget_gate:
            self.gate_proj = gate_projection(config, self.linear_qkv, self.pg_collection.tp)

    def get_query_key_value_tensors(self, hidden_states, *args, **kwargs):
        """Compute q, k and v as Megatron-Core does, and append the gates to the keys."""
        qkv = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        if self.gate_proj is None:
            return qkv
        logits, _ = self.gate_proj(hidden_states)
        logits, self.gate_loss = with_gate_loss(logits, self.gate_loss_coefficient, self.config)
        query, key, *others = qkv
        return query, with_gates(key, logits), *others

    def forward(self, hidden_states, attention_mask, key_value_states=None, inference_context=None, **kwargs):
        """Attend as in Megatron-Core.

        Raises:
            ValueError: in a stick-breaking layer, for rotary embeddings and dynamic inference.
        """
        if self.stick_breaking:
            context = inference_context if inference_context is not None else kwargs.get("inference_params")
            self._check_call(context, kwargs)
        return super().forward(hidden_states, attention_mask, key_value_states, inference_context, **kwargs)

    def _check_call(self, inference_context, kwargs: dict) -> None:
        """Raise ValueError for arguments of a call that are not supported."""
        # Megatron also passes rotary embeddings to layers where --no-rope-freq disables them.
        ignored = {"rotary_pos_emb"} if rope_disabled_in(self.config, self.layer_number) else set()
        for name, value in kwargs.items():
            if name.startswith("rotary_") and name not in ignored and value is not None:
                raise ValueError(
                    f"{name} must be None in a stick-breaking layer, where the order of the keys encodes positions. "
                    "Use --position-embedding-type none."
                )
        if inference_context is not None and self.gate_proj is not None:
            raise ValueError(
                "inference_context must be None with forget_gate=True (--sb-forget-gate), got "
                f"{type(inference_context).__name__}: Megatron's caches cannot store gates."
            )
        if inference_context is not None and not inference_context.is_static_batching():
            raise ValueError(
                "inference_context must use static batching with stick-breaking attention, got a dynamic "
                f"{type(inference_context).__name__}, which bypasses core_attention and would run softmax."
            )
