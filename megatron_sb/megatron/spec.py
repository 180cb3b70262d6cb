"""Layer specs with stick-breaking attention: `with_stickbreaking` for any stock spec, `stickbreaking_layer_spec`."""

from __future__ import annotations

import copy
import dataclasses

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_sb.megatron.arguments import StickBreakingOptions
from megatron_sb.megatron.core_attention import StickBreakingCoreAttention, without_rope
from megatron_sb.megatron.gates import gate_projection, with_gate_loss, with_gates


class CheckedSelfAttention(SelfAttention):
    """Megatron's self-attention, refusing what would go round its core attention: nothing else is changed.

    A core attention never sees rotary embeddings (they are applied to q and k before it) and is not called at all by
    dynamic inference, and `--attention-backend local` replaces it; all three would run without a word.

    With `forget_gate` it has gate_proj, which makes a gate for each key and KV head from the hidden states, and the
    core attention gets the keys with their gates behind them. gate_loss is the latest micro-batch's mean of -log f over
    this rank's tokens and heads.

    In a mixed model (`layers`) the layers that are not stick-breaking are Megatron's own, with the core attention
    `softmax` and without these checks. Rotary embeddings are for them: `--no-rope-freq` has to name the others.
    """

    def __init__(self, config, submodules, layer_number, *args, layers=None, softmax=None, **kwargs):
        refuse_layers(layers, config, "config")
        self.stick_breaking = layers is None or bool(layers[layer_number - 1])
        if not self.stick_breaking:
            submodules = dataclasses.replace(submodules, core_attention=softmax)
        if layers is not None:  # layers that hold different parameters cannot share their keys of a checkpoint
            config.hetereogenous_dist_checkpoint = True
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        if self.stick_breaking and not isinstance(self.core_attention, StickBreakingCoreAttention):
            raise ValueError(
                f"core_attention is {type(self.core_attention).__name__}, not StickBreakingCoreAttention: something "
                "replaced it after with_stickbreaking (--attention-backend local does); use --attention-backend auto"
            )
        for name, flag in (("qk_layernorm", "--qk-layernorm"), ("qk_l2_norm", "--qk-l2-norm")):
            if getattr(config, name, False) and isinstance(self.q_layernorm, (IdentityOp, type(None))):
                raise ValueError(
                    f"config.{name}=True ({flag}), but this layer spec has no q_layernorm; use with_stickbreaking on a "
                    f"spec built with {name}=True"
                )
        options = self.core_attention.options if self.stick_breaking else StickBreakingOptions()
        self.gate_proj, self.gate_loss, self.gate_loss_coefficient = None, None, options.forget_gate_loss
        if options.forget_gate:
            self.gate_proj = gate_projection(config, self.linear_qkv, self.pg_collection.tp)

    def get_query_key_value_tensors(self, hidden_states, *args, **kwargs):
        """As in Megatron-Core; keys come with their gates."""
        made = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        if self.gate_proj is None:
            return made
        logits, _ = self.gate_proj(hidden_states)
        logits, self.gate_loss = with_gate_loss(logits, self.gate_loss_coefficient, self.config)
        query, key, *others = made
        return query, with_gates(key, logits), *others

    def forward(self, hidden_states, attention_mask, key_value_states=None, inference_context=None, **kwargs):
        """As in Megatron-Core; a stick-breaking layer raises ValueError for rotary embeddings and dynamic inference."""
        if self.stick_breaking:
            context = inference_context if inference_context is not None else kwargs.get("inference_params")
            self._check_call(context, kwargs)
        return super().forward(hidden_states, attention_mask, key_value_states, inference_context, **kwargs)

    def _check_call(self, inference_context, kwargs: dict) -> None:
        """Refuse what only a call shows. Rotary embeddings that `--no-rope-freq` spares this layer come here too."""
        spared = {"rotary_pos_emb"} if without_rope(self.config, self.layer_number) else set()
        for name, value in kwargs.items():
            if name.startswith("rotary_") and name not in spared and value is not None:
                raise ValueError(
                    f"{name} was given to a stick-breaking layer (--position-embedding-type rope, mrope or yarn): the "
                    "order of the stick tells positions; use --position-embedding-type none"
                )
        if inference_context is not None and self.gate_proj is not None:
            raise ValueError(
                f"inference_context={type(inference_context).__name__} with forget_gate=True (--sb-forget-gate): "
                "Megatron's caches have no room for gates"
            )
        if inference_context is not None and not inference_context.is_static_batching():
            raise ValueError(
                f"inference_context={type(inference_context).__name__} is dynamic: it bypasses core_attention and "
                "would run softmax; stick-breaking attention allows static batching only"
            )


def refuse_layers(layers, settings, source: str) -> None:
    """Raise a ValueError where `layers` (`StickBreakingOptions.layers`) does not fit a model's config or arguments."""
    if layers is None:
        return
    if len(layers) != settings.num_layers:
        raise ValueError(
            f"layers={layers} (--sb-layers) has {len(layers)} entries, but {source}.num_layers={settings.num_layers} "
            "(--num-layers); it needs one entry for every layer"
        )
    if settings.mtp_num_layers is not None:
        raise ValueError(
            f"layers={layers} (--sb-layers) says nothing about the {settings.mtp_num_layers} layers of "
            f"{source}.mtp_num_layers (--mtp-num-layers); mixed layers allow none of those"
        )


class _DenseSelfAttention(CheckedSelfAttention):
    """For the bare spec object, which cannot see the config and would build a dense model where experts were asked."""

    def __init__(self, config, *args, **kwargs):
        if config.num_moe_experts is not None:
            raise ValueError(
                f"config.num_moe_experts={config.num_moe_experts} (--num-experts), but stickbreaking_layer_spec is a "
                "dense layer; use with_stickbreaking(get_gpt_decoder_block_spec(config, ...))"
            )
        super().__init__(config, *args, **kwargs)


def with_stickbreaking(spec, **options):
    """A copy of a stock spec with stick-breaking attention in every layer; `spec` itself is left as it was.

    Args:
        spec: the ModuleSpec of a transformer layer (dense or mixture of experts, local or Transformer Engine), a
            TransformerBlockSubmodules with `layer_specs`, or a ModuleSpec that holds one.
        options: fields of `StickBreakingOptions`. They travel in the `params` of the core attention's ModuleSpec. With
            `layers` some layers keep the core attention that `spec` has.

    Raises:
        TypeError: an unknown option.
        ValueError: an unknown value of one; a layer whose self-attention is not Megatron's `SelfAttention`.
    """
    return _replace_in_layers(spec, StickBreakingOptions(**options))


def _replace_in_layers(spec, options: StickBreakingOptions):
    spec = copy.copy(spec)
    if hasattr(spec, "layer_specs"):
        spec.layer_specs = [_replace_in_layers(layer, options) for layer in spec.layer_specs]
    elif hasattr(getattr(spec, "submodules", None), "layer_specs"):
        spec.submodules = _replace_in_layers(spec.submodules, options)
    else:
        spec.submodules = with_core_attention(getattr(spec, "submodules", None), options)
    return spec


def with_core_attention(submodules, options: StickBreakingOptions):
    """A copy of a transformer layer's submodules with stick-breaking attention, for `with_stickbreaking`."""
    attention = getattr(submodules, "self_attention", None)
    module = getattr(attention, "module", attention)
    if module is not SelfAttention and not (isinstance(module, type) and issubclass(module, CheckedSelfAttention)):
        raise ValueError(
            f"self_attention of the layer spec is {module!r}; with_stickbreaking allows Megatron's SelfAttention, or a "
            "class derived from megatron_sb.megatron.CheckedSelfAttention"
        )
    stock, attention = attention, copy.copy(attention)
    softmax = stock.params.get("softmax", stock.submodules.core_attention)
    attention.module = CheckedSelfAttention if module is SelfAttention else module
    attention.params = {**stock.params, "layers": options.layers, "softmax": softmax}
    attention.submodules = copy.copy(stock.submodules)
    attention.submodules.core_attention = ModuleSpec(StickBreakingCoreAttention, params={"options": options})
    submodules = copy.copy(submodules)
    submodules.self_attention = attention
    return submodules


def _bare_layer_spec() -> ModuleSpec:
    """A dense layer with Transformer Engine where it is installed, as Megatron's scripts default to."""
    if gpt_layer_specs.HAVE_TE:
        stock = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        stock = gpt_layer_specs.get_gpt_layer_local_spec()
    spec = with_stickbreaking(stock)
    spec.submodules.self_attention.module = _DenseSelfAttention
    return spec


# For `--spec megatron_sb.megatron.spec stickbreaking_layer_spec`: dense layers without q/k norm, default options.
stickbreaking_layer_spec = _bare_layer_spec()
