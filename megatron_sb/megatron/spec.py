"""Layer specs with stick-breaking attention.

`with_stickbreaking` converts any stock spec. `stickbreaking_block_spec` makes the spec of a pipeline stage from a
config. Megatron's `--spec` can name this function, or the object `stickbreaking_layer_spec`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from megatron_sb.megatron.arguments import StickBreakingOptions, options_from_args
from megatron_sb.megatron.bridge_checkpoints import compare_when_bridge_loads
from megatron_sb.megatron.checked_attention import CheckedAttention, CheckedMLASelfAttention, CheckedSelfAttention
from megatron_sb.megatron.core_attention import StickBreakingCoreAttention
from megatron_sb.megatron.layer_selection import (
    attention_layers_in,
    attention_layers_of,
    hybrid_pattern_of,
    is_selected,
    keeps_softmax,
)
from megatron_sb.megatron.saved_attention import record_options
from megatron_sb.megatron.settings import script_arguments
from megatron_sb.megatron.stand_ins import install_stand_ins

# What a layer that becomes stick-breaking must have.
_ACCEPTED = {
    "self_attention": "Megatron's SelfAttention, its MLASelfAttention with a dense core attention, or a subclass of "
    "megatron_sb.megatron.CheckedSelfAttention or CheckedMLASelfAttention",
    "cross_attention": "IdentityOp",
}
BRIDGE_MODELS = "megatron.bridge.models."
# Megatron's attention and what takes its place.
_CHECKED = {SelfAttention: CheckedSelfAttention, MLASelfAttention: CheckedMLASelfAttention}


class _DenseSelfAttention(CheckedSelfAttention):
    """The attention of `stickbreaking_layer_spec`. Reject a config with layers that Megatron builds from another spec.

    The spec has no experts. For multi-token prediction Megatron's scripts (since 0.19) take their own spec, not that of
    `--spec`, so those layers would be softmax attention.
    """

    def __init__(self, config, *args, **kwargs):
        if config.mtp_num_layers is not None:
            raise ValueError(
                "config.mtp_num_layers (--mtp-num-layers) must be None with stickbreaking_layer_spec, got "
                f"{config.mtp_num_layers}: Megatron builds these layers from its own spec, with softmax attention. Use "
                "the launcher (python -m megatron_sb.megatron.launch) instead of --spec."
            )
        if config.num_moe_experts is not None:
            raise ValueError(
                "config.num_moe_experts (--num-experts) must be None with stickbreaking_layer_spec, a dense layer, got "
                f"{config.num_moe_experts}. Use with_stickbreaking(get_gpt_decoder_block_spec(config, ...))."
            )
        super().__init__(config, *args, **kwargs)


def with_stickbreaking(spec, *, config=None, hybrid_layer_pattern: str | None = None, **options):
    """Copy a stock spec and put stick-breaking attention into its layers. `spec` itself does not change.

    Args:
        spec: the ModuleSpec of a transformer layer (dense or mixture of experts, local or Transformer Engine), a
            TransformerBlockSubmodules with `layer_specs`, the submodules of a hybrid stack (`hybrid_stack_spec`,
            `mamba_stack_spec`), or a ModuleSpec that holds one of the last two. Layers without attention (Mamba, a
            gated delta net, an MLP, a mixture of experts, a no-op, a linear layer) do not change.
        config: the model's TransformerConfig. Needed only with `layers`, for a heterogeneous model: it says which
            layers have attention.
        hybrid_layer_pattern: the pattern of a hybrid model. Needed only with `layers`, if the script has no argument
            of this name.
        options: fields of `StickBreakingOptions`. If `layers` contains 0, those layers keep the attention of `spec`,
            which may be any kind of attention.

    Returns:
        A copy of `spec`, of the same type.

    Raises:
        TypeError: if `spec` is another object, such as the function that makes a spec, or an option is unknown.
        ValueError: if an option has an invalid value, or the self-attention of a layer that becomes stick-breaking is
            neither Megatron's `SelfAttention` nor its `MLASelfAttention`. With `layers` this is raised when the layer
            is built.

    Example:
        >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        >>> from megatron_sb.megatron import with_stickbreaking
        >>> spec = with_stickbreaking(get_gpt_layer_local_spec(), attend_current=True)
        >>> spec.submodules.self_attention.submodules.core_attention.module.__name__
        'StickBreakingCoreAttention'
    """
    numbers, choices = None, StickBreakingOptions(**options)
    record_options(choices)  # here, because a pipeline stage can have no stick-breaking layer
    pattern = hybrid_layer_pattern or hybrid_pattern_of(config, script_arguments())
    stack = getattr(spec, "submodules", spec)
    if hasattr(stack, "attention_layer") and choices.layers is not None and pattern is None:
        raise ValueError(
            "hybrid_layer_pattern must be given to with_stickbreaking together with layers for a hybrid stack, got "
            "None."
        )
    if hybrid_layer_pattern is not None:
        numbers = attention_layers_in(hybrid_layer_pattern)
    elif config is not None and choices.layers is not None:
        numbers = attention_layers_of(config, script_arguments())
    return _replace_in_layers(spec, choices, numbers)


def _replace_in_layers(spec, options: StickBreakingOptions, numbers: tuple[int, ...] | None):
    """Replace the attention in a spec of any kind. numbers: those of the attention layers, or None."""
    spec = copy.copy(spec)
    if hasattr(spec, "layer_specs"):
        spec.layer_specs = [_replace_in_layers(layer, options, numbers) for layer in spec.layer_specs]
    elif hasattr(spec, "attention_layer"):
        for name, replace in ATTENTION_LAYERS.items():
            layer = getattr(spec, name, IdentityOp)
            if module_of(layer) is not IdentityOp:
                setattr(spec, name, replace(layer, options, numbers))
    elif any(hasattr(getattr(spec, "submodules", None), name) for name in ("layer_specs", "attention_layer")):
        spec.submodules = _replace_in_layers(spec.submodules, options, numbers)
    else:
        stock = getattr(spec, "submodules", None)
        if mixer_of(stock) is None:
            kind = module_of(spec)
            raise TypeError(
                "spec must be that of a transformer layer, a block or a hybrid stack, such as the result of "
                f"get_gpt_layer_local_spec(), got {getattr(kind, '__name__', type(kind).__name__)}. For multi-token "
                "prediction, pass the converted spec of the decoder to get_gpt_mtp_block_spec."
            )
        spec.submodules = with_core_attention(stock, options, numbers)
        if spec.submodules is stock and has_attention(mixer_of(stock)):
            spec = _checked(spec, options, numbers)
    return spec


def _checked(layer_spec, options: StickBreakingOptions, numbers: tuple[int, ...] | None):
    """Copy the spec of a layer. Building it raises ValueError if its attention should be stick-breaking and is not."""
    layer_spec = copy.copy(layer_spec)
    layer_spec.module = _checked_layer(get_module(layer_spec))
    layer_spec.params = {**layer_spec.params, "layers": options.layers, "attention_layers": numbers}
    return layer_spec


def _replace_in_mla_layer(layer_spec, options: StickBreakingOptions, numbers: tuple[int, ...] | None):
    """Replace the attention in the spec of a layer of a hybrid stack, which may still put another in its place."""
    return _checked(_replace_in_layers(layer_spec, options, numbers), options, numbers)


# What is done with the layers of a hybrid stack that have attention. A stack has specs of layers that it never builds.
ATTENTION_LAYERS = {"attention_layer": _replace_in_layers, "mla_layer": _replace_in_mla_layer, "dsa_layer": _checked}


@functools.cache
def _checked_layer(kind: type) -> type:
    """Return a subclass of a layer that raises ValueError if its attention should be stick-breaking and is not."""
    stock = getattr(kind, "stock_layer", kind)

    class CheckedLayer(stock):
        stock_layer = stock

        def __init__(self, config, submodules, *args, layers=None, attention_layers=None, **kwargs):
            attention = mixer_of(submodules)
            if "softmax" in getattr(attention, "params", {}) and not _is_checked(module_of(attention)):
                raise ValueError(
                    "config.mla_down_proj_fusion (--mla-down-proj-fusion) must be False with with_stickbreaking, got "
                    f"{getattr(config, 'mla_down_proj_fusion', None)}: the hybrid stack put "
                    f"{module_of(attention).__name__} in the place of the attention of the layer spec."
                )
            super().__init__(config, submodules, *args, **kwargs)
            check_built_layer(self, layers, attention_layers)

    return CheckedLayer


def check_built_layer(layer, layers: tuple[int, ...] | None, attention_layers: tuple[int, ...] | None = None) -> None:
    """Raise ValueError if a layer has attention of another kind although `layers` makes it stick-breaking."""
    for name in ("self_attention", "cross_attention"):
        attention = getattr(layer, name)
        other = hasattr(attention, "core_attention") and not isinstance(attention, CheckedAttention)
        if other and is_selected(layer.layer_number, layer.config, layers, attention_layers):
            raise ValueError(
                f"{name} of layer {layer.layer_number} must be {_ACCEPTED[name]} to become stick-breaking, got "
                f"{type(attention).__name__}. Set the entry of this layer in layers (--sb-layers) to 0 to keep it."
            )


def module_of(spec):
    """Return the module class of a ModuleSpec, or `spec` itself if it is a class."""
    return getattr(spec, "module", spec)


def _is_checked(module) -> bool:
    """Return whether a module of a spec is an attention with the checks of this package."""
    return isinstance(module, type) and issubclass(module, CheckedAttention)


def _is_replaceable(attention) -> bool:
    """Return whether the spec of an attention is of a kind that can become stick-breaking.

    Sparse attention has the module of multi-latent attention. Its core attention has submodules, such as an indexer.
    """
    dense = getattr(getattr(attention.submodules, "core_attention", None), "submodules", None) is None
    return _is_checked(attention.module) or (attention.module in _CHECKED and dense)


def _core_of(attention) -> str:
    """Return a phrase with the core attention of a spec, for a message. It is empty if there is none."""
    core = getattr(getattr(attention, "submodules", None), "core_attention", None)
    return "" if core is None else f" with core_attention {module_of(core)!r}"


def mixer_of(submodules):
    """Return the self_attention of a layer's submodules, or the mixer of a Mamba layer. None: they are of no layer."""
    return getattr(submodules, "self_attention", getattr(submodules, "mixer", None))


def has_attention(mixer) -> bool:
    """Return whether the result of `mixer_of` is an attention, which has a core attention.

    Mamba, a no-op (`IdentityOp`), a linear layer and a gated delta net are not.
    """
    module = module_of(mixer)
    inner = getattr(mixer, "submodules", None)
    return not isinstance(module, type) or issubclass(module, Attention) or hasattr(inner, "core_attention")


def options_of(submodules) -> StickBreakingOptions | None:
    """Return the options in the submodules of a layer that `with_stickbreaking` has converted, None in others."""
    attention = mixer_of(submodules)
    core = getattr(getattr(attention, "submodules", None), "core_attention", None)
    return getattr(core, "params", {}).get("options") if module_of(core) is StickBreakingCoreAttention else None


def with_core_attention(submodules, options: StickBreakingOptions, attention_layers: tuple[int, ...] | None = None):
    """Copy the submodules of a transformer layer and put stick-breaking attention into them.

    Submodules of a layer without attention are returned as they are. So are those with another kind of attention, if
    `options.layers` can keep it. Call `check_built_layer` for them.
    """
    attention = mixer_of(submodules)
    module = module_of(attention)
    if not has_attention(attention):
        return submodules
    if module is attention or not _is_replaceable(attention):
        if isinstance(module, type) and keeps_softmax(options.layers):
            return submodules
        raise ValueError(
            f"self_attention of the layer spec must be {_ACCEPTED['self_attention']}, got {module!r}"
            f"{_core_of(attention)}. In a model with other layers, layers (--sb-layers) can keep this attention."
        )
    stock, attention = attention, copy.copy(attention)
    softmax = stock.params.get("softmax", stock.submodules.core_attention)
    attention.module = _CHECKED.get(module, module)
    selection = {"layers": options.layers, "attention_layers": attention_layers}
    attention.params = {**stock.params, **selection, "softmax": softmax}
    attention.submodules = copy.copy(stock.submodules)
    core = {"options": options, "unrotated": issubclass(attention.module, MLASelfAttention)}
    attention.submodules.core_attention = ModuleSpec(StickBreakingCoreAttention, params=core)
    submodules = copy.copy(submodules)
    submodules.self_attention = attention
    return submodules


def stickbreaking_block_spec(config, vp_stage: int | None = None, **options):
    """Make the spec of the layers of a pipeline stage, with stick-breaking attention in the chosen layers.

    The other parts are those of the spec that Megatron's scripts make for `config`: dense layers, experts, or layers of
    a heterogeneous model. They use Transformer Engine if it is installed and `config.transformer_impl` selects it.
    Otherwise the function calls `install_stand_ins`.

    Megatron-Core (0.19, `--spec` and `GPTModelConfig`) and Megatron-Bridge
    (`GPTModelProvider(transformer_layer_spec=...)`) call functions with this signature. Set options with
    `functools.partial(stickbreaking_block_spec, head_norm=True)`. The groups of `parallel_state` must be initialised,
    except those of pipelines if a provider of Megatron-Bridge has its own.

    Args:
        config: a TransformerConfig, such as Megatron-Bridge's `GPTModelProvider`, or a `GPTModelConfig`.
        vp_stage: stage of a virtual pipeline. Default: None, without one.
        options: fields of `StickBreakingOptions`. In a script whose parser went through `add_arguments`, its `--sb-*`
            flags are the defaults.

    Returns:
        A TransformerBlockSubmodules.

    Raises:
        TypeError: if `config` is another object, or an option is unknown.
        ValueError: as `with_stickbreaking`. Or if the model has layers for multi-token prediction that Megatron would
            build from its own spec, with softmax attention. Or if `config` is a provider of Megatron-Bridge with layers
            of its own.

    Example:
        >>> from functools import partial
        >>> from megatron_sb.megatron import stickbreaking_block_spec
        >>> make_spec = partial(stickbreaking_block_spec, layers=(1, 1, 0))
        >>> # provider = GPTModelProvider(num_layers=3, transformer_layer_spec=make_spec, ...)
    """
    transformer = getattr(config, "transformer", config)
    if not isinstance(transformer, TransformerConfig):
        raise TypeError(
            "config of stickbreaking_block_spec must be a TransformerConfig, a provider of Megatron-Bridge or a "
            f"GPTModelConfig, got {type(config).__name__}."
        )
    _check_provider(type(transformer))
    use_te = gpt_layer_specs.HAVE_TE and transformer.transformer_impl == "transformer_engine"
    if not use_te:
        install_stand_ins()
    stock = _stock_block_spec(transformer, use_te, vp_stage)
    if transformer.mtp_num_layers is not None and (transformer is not config or not stock.layer_specs):
        raise ValueError(
            "config.mtp_num_layers (--mtp-num-layers) must be None with stickbreaking_block_spec, got "
            f"{transformer.mtp_num_layers}: Megatron builds these layers from its own spec, with softmax attention, "
            "for a GPTModelConfig and in stages without other layers. Use the launcher (python -m "
            "megatron_sb.megatron.launch)."
        )
    compare_when_bridge_loads()
    args = script_arguments()
    flags = options_from_args(args) if hasattr(args, "sb_allow_mismatch") else {}
    return with_stickbreaking(stock, config=transformer, **{**flags, **options})


def _check_provider(kind: type) -> None:
    """Raise ValueError for a class of provider of Megatron-Bridge with layers of its own, such as that of Gemma 2."""
    for field in dataclasses.fields(kind):
        if field.name != "transformer_layer_spec":
            continue
        factory = field.default_factory
        spec = field.default if factory is dataclasses.MISSING else factory()
        function = getattr(spec, "func", spec)  # of a functools.partial
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        if module.startswith(BRIDGE_MODELS) and module != BRIDGE_MODELS + "gpt_provider":
            raise ValueError(
                "config of stickbreaking_block_spec must have the layers of Megatron-Core, got a provider "
                f"{kind.__name__}, whose layers are those of {name}. Convert these: make a function that returns "
                f"with_stickbreaking({name}(config))."
            )


def _stock_block_spec(config, use_te: bool, vp_stage: int | None):
    """Return Megatron's spec of the layers of a pipeline stage."""
    group = getattr(getattr(config, "_pg_collection", None), "pp", None)  # Megatron-Bridge may not use parallel_state
    stage = {"vp_stage": vp_stage, "pp_rank": None if group is None else group.rank()}
    if config.experimental_attention_variant is not None:
        return get_transformer_block_with_experimental_attention_variant_spec(config, **stage)
    if config.heterogeneous_block_specs:
        return get_gpt_heterogeneous_layer_spec(config, use_te, **stage)
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm, **stage
    )


def _bare_layer_spec() -> ModuleSpec:
    """Return the spec of a dense layer, with Transformer Engine if it is installed, as Megatron's scripts do."""
    if gpt_layer_specs.HAVE_TE:
        stock = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        stock = gpt_layer_specs.get_gpt_layer_local_spec()
    spec = _replace_in_layers(stock, StickBreakingOptions(), None)
    spec.submodules.self_attention.module = _DenseSelfAttention
    return spec


# For `--spec megatron_sb.megatron.spec stickbreaking_layer_spec`: dense layers without q/k norm, default options.
stickbreaking_layer_spec = _bare_layer_spec()
