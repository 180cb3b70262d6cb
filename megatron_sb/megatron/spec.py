"""Layer specs with stick-breaking attention: `with_stickbreaking` for any stock spec, `stickbreaking_layer_spec`."""

from __future__ import annotations

import copy

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_sb.megatron.arguments import StickBreakingOptions
from megatron_sb.megatron.core_attention import StickBreakingCoreAttention


class CheckedSelfAttention(SelfAttention):
    """Megatron's self-attention, refusing what would go round its core attention: nothing else is changed.

    A core attention never sees rotary embeddings (they are applied to q and k before it) and is not called at all by
    dynamic inference, and `--attention-backend local` replaces it; all three would run without a word.
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        if not isinstance(self.core_attention, StickBreakingCoreAttention):
            raise ValueError(
                f"core_attention is {type(self.core_attention).__name__}, not StickBreakingCoreAttention: something "
                "replaced it after with_stickbreaking (--attention-backend local does); use --attention-backend auto"
            )
        if config.qk_layernorm and isinstance(self.q_layernorm, (IdentityOp, type(None))):
            raise ValueError(
                "config.qk_layernorm=True (--qk-layernorm), but this layer spec has no q_layernorm; use "
                "with_stickbreaking on a spec built with qk_layernorm=True"
            )

    def forward(self, hidden_states, attention_mask, key_value_states=None, inference_context=None, **kwargs):
        """As in Megatron-Core; raises ValueError for rotary embeddings and for dynamic inference."""
        for name, value in kwargs.items():
            if name.startswith("rotary_") and value is not None:
                raise ValueError(
                    f"{name} was given to a stick-breaking layer (--position-embedding-type rope, mrope or yarn): the "
                    "order of the stick tells positions; use --position-embedding-type none"
                )
        context = inference_context if inference_context is not None else kwargs.get("inference_params")
        if context is not None and not context.is_static_batching():
            raise ValueError(
                f"inference_context={type(context).__name__} is dynamic: it bypasses core_attention and would run "
                "softmax; stick-breaking attention allows static batching only"
            )
        return super().forward(hidden_states, attention_mask, key_value_states, inference_context, **kwargs)


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
        options: fields of `StickBreakingOptions`. They travel in the `params` of the core attention's ModuleSpec.

    Raises:
        TypeError: an unknown option.
        ValueError: an unknown value of one; a layer whose self-attention is not Megatron's `SelfAttention`.
    """
    return _replace_core_attention(spec, StickBreakingOptions(**options))


def _replace_core_attention(spec, options: StickBreakingOptions):
    spec = copy.copy(spec)
    if hasattr(spec, "layer_specs"):
        spec.layer_specs = [_replace_core_attention(layer, options) for layer in spec.layer_specs]
        return spec
    if hasattr(getattr(spec, "submodules", None), "layer_specs"):
        spec.submodules = _replace_core_attention(spec.submodules, options)
        return spec

    attention = getattr(getattr(spec, "submodules", None), "self_attention", None)
    module = getattr(attention, "module", attention)
    if module is not SelfAttention and not (isinstance(module, type) and issubclass(module, CheckedSelfAttention)):
        raise ValueError(
            f"self_attention of the layer spec is {module!r}; with_stickbreaking allows Megatron's SelfAttention, or a "
            "class derived from megatron_sb.megatron.CheckedSelfAttention"
        )
    attention = copy.copy(attention)
    attention.module = CheckedSelfAttention if module is SelfAttention else module
    attention.submodules = copy.copy(attention.submodules)
    attention.submodules.core_attention = ModuleSpec(StickBreakingCoreAttention, params={"options": options})
    spec.submodules = copy.copy(spec.submodules)
    spec.submodules.self_attention = attention
    return spec


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
