"""`attn_implementation="stickbreaking"` for the decoders of transformers.

A transformers model passes queries, keys, values and a mask to the attention function that its configuration names.
This function rejects everything that stick-breaking attention (Tan et al., arXiv 2410.17980) does not support. Above
all, it rejects positions in queries and keys: the order of the keys replaces them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_sb.huggingface.operators import (
    attend_to_filled,
    is_decoding_step,
    keys_and_gates,
    stickbreaking_attention,
    stickbreaking_attention_varlen,
)
from megatron_sb.huggingface.packing import (
    Packing,
    check_mask_shape,
    documents_of,
    leftpad_of,
    of_step_mask,
    step_mask,
    with_documents,
)
from megatron_sb.options import AttentionOptions

NAME = "stickbreaking"
# The rope_type that rotates by angle 0. A program that lacks the import fails with KeyError, which shows this text.
NO_ROTATION = "none (needs: import megatron_sb.huggingface)"
NO_ROTATION_0_1 = "none"  # its name in checkpoints of version 0.1
MODEL_TYPE = "stick_breaking"  # of StickBreakingConfig. Its models have no positions.
# Model types with rotary positions that compute the attention themselves. They ignore attn_implementation.
OWN_ATTENTION = ("gpt_neox_japanese",)
# Keyword arguments that models pass to the attention, and the only supported value of each.
REQUIRED_VALUES = dict.fromkeys(
    ("sliding_window", "softcap", "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices")
)
# Options of StickBreakingConfig that this function would ignore in another configuration, and the supported value.
REQUIRED_OPTIONS = {"reach": None, "logits": "dot", "forget_gate": False, "remainder_bias": False, "head_norm": False}


def register() -> None:
    """Register the attention with transformers, and the name of the model. Importing this package calls it."""
    # Trainer finds here whether to shift the labels for label_smoothing_factor.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = "StickBreakingForCausalLM"
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    for rope_type in (NO_ROTATION, NO_ROTATION_0_1):
        ROPE_INIT_FUNCTIONS[rope_type] = _no_rotation
        # Configurations call a method of this name, and warn if there is none.
        name = f"_validate_{rope_type}_rope_parameters"
        setattr(RotaryEmbeddingConfigMixin, name, lambda self, parameters, ignore_keys=None: None)
    _keep_implementation()


def without_positions(config: PreTrainedConfig) -> PreTrainedConfig:
    """Disable rotary positions in the configuration of a decoder, in place.

    Models that are made from the result, and checkpoints of these models, load only with
    attn_implementation="stickbreaking". Weights keep their names and shapes. Weights that were trained with positions
    need further training.

    Args:
        config: configuration of a decoder with rotary positions.

    Returns:
        config.

    Raises:
        TypeError: if config is not a configuration of transformers, but for example a model.
        ValueError: if the configuration has no rope_parameters, or its model ignores attn_implementation.

    Example:
        >>> from transformers import LlamaConfig
        >>> from megatron_sb.huggingface import without_positions
        >>> without_positions(LlamaConfig()).rope_parameters["rope_type"]
        'none (needs: import megatron_sb.huggingface)'
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config must be a PreTrainedConfig of transformers, got {type(config).__name__}.")
    text = config.get_text_config()
    _check_calls_attention(text)
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        raise ValueError(f"config must have rope_parameters, got {text.model_type!r} without them.")
    for parameters in _rope_by_layer(rope).values():
        if parameters is not None:
            if parameters.get("rope_type") == "proportional":  # its frequencies are for all channels, some of them 0
                parameters.pop("partial_rotary_factor", None)
            parameters["rope_type"] = NO_ROTATION
    return config


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a transformers module. The signature is that of transformers' attention functions.

    Args:
        module: the attention module. Its configuration may have `attend_current` and `mass_threshold`.
        query: (b, h, s, d).
        key: (b, h_kv, s_k, d).
        value: (b, h_kv, s_k, d_v).
        attention_mask: as `attention_mask` returns it. If it has no padding and there are no older keys, packed
            documents are taken from the keyword arguments position_ids or cu_seq_lens_q.
        dropout: must be 0.
        scaling: factor of the logits. Default None: 1 / sqrt(d).
        is_causal: must be True or None.
        kwargs: other arguments of the model. Those in REQUIRED_VALUES must have the value given there.

    Returns:
        (b, s, h, d_v), 0 at padding, and None for the weights.

    Raises:
        ValueError: if the call needs positions, dropout, a sliding window, a soft cap, sinks, a selection of keys,
            attention to newer keys, or output_attentions, or the configuration has an option of REQUIRED_OPTIONS.
    """
    check_positions(module)
    _require(dropout == 0, "dropout", dropout, "0")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _require(bool(causal), "is_causal", causal, "True")
    wants_weights = kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False)
    _require(not wants_weights, "output_attentions", True, "False")
    for name, required in REQUIRED_VALUES.items():
        _require(kwargs.get(name) is required, name, kwargs.get(name), str(required))
    num_keys = key.shape[2] if attention_mask is None else attention_mask.shape[1]  # without empty slots of a cache
    if query.shape[2] == num_keys:  # no older keys
        documents = (kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"))
        attention_mask = with_documents(attention_mask, *documents, (query.shape[0], query.shape[2]))
    config = module.config
    check_options(config)
    out = attend(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        scale=scaling,
        attend_current=getattr(config, "attend_current", AttentionOptions.attend_current),
        mass_threshold=getattr(config, "mass_threshold", AttentionOptions.mass_threshold),
    )
    return out, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    logits: str = AttentionOptions.logits,
    forget_gate: Tensor | bool | None = None,
    return_mass: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `stickbreaking_attention` over the tokens that the mask keeps.

    Args:
        q: (b, s, h, d).
        k: (b, s_k, h_kv, d). With Euclidean logits or forget gates, keys of a cache are `stored_keys`.
        v: (b, s_k, h_kv, d_v).
        mask: as `attention_mask` returns it: None, int (b, num_keys), or a `step_mask`. Keys after the columns of the
            second are empty slots of a cache.
        logits: "dot" or "euclidean". Default "dot".
        forget_gate: without a cache, the gates (b, s_k, h_kv), or None. With a cache, whether its keys have gates.
            Default None: no gates.
        return_mass: also return the mass. Default False.
        options: scale, attend_current, mass_threshold and reach.

    Returns:
        The output (b, s, h, d_v), and with return_mass the mass (b, h, s). At padding the output is 0 and the mass 1.
    """
    options = {"logits": logits, "return_mass": return_mass, **options}
    if mask is None:
        if is_decoding_step(q, k, v):
            return attend_to_filled(q, k, v, forget_gate=bool(forget_gate), **options)
        k, gates = _keys_and_gates(k, q.shape[-1], logits, forget_gate)
        return stickbreaking_attention(q, k, v, forget_gate=gates, **options)
    if (step := of_step_mask(mask)) is not None:
        if not is_decoding_step(q, k, v):
            raise ValueError(
                "attention_mask of a decoding step must be used without gradients, got tensors that require them. "
                "Make the mask and call the model under torch.no_grad()."
            )
        leftpad, num_keys = step
        return attend_to_filled(q, k, v, num_keys, leftpad, forget_gate=bool(forget_gate), **options)
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask must have 2 dimensions, (batch, tokens) with 0 for padding, got {mask.dim()} dimensions."
        )
    if mask.shape[1] < q.shape[1]:
        raise ValueError(
            "attention_mask must be causal within each document with stick-breaking attention, got another mask of the "
            "model (for example a sliding window, chunks, or a bidirectional prefix)."
        )
    leftpad = getattr(mask, "leftpad", None)
    if leftpad is not None and is_decoding_step(q, k, v):
        return attend_to_filled(q, k, v, mask.shape[1], leftpad, forget_gate=bool(forget_gate), **options)
    packing = getattr(mask, "packing", None) or Packing.of(mask, q.shape[1])
    k, v = k[:, : mask.shape[1]], v[:, : mask.shape[1]]
    k, gates = _keys_and_gates(k, q.shape[-1], logits, forget_gate)
    k, v, gates = (x if x is None else x.flatten(0, 1)[packing.keys] for x in (k, v, gates))
    bounds = {"cu_seqlens": packing.cu_seqlens, "cu_seqlens_k": packing.cu_seqlens_k}
    result = stickbreaking_attention_varlen(
        q.flatten(0, 1)[packing.queries], k, v, forget_gate=gates, **bounds, **options
    )
    o, mass = result if return_mass else (result, None)
    out = o.new_zeros(q.shape[0] * q.shape[1], *o.shape[1:]).index_copy(0, packing.queries, o)
    out = out.unflatten(0, q.shape[:2])
    if mass is None:
        return out
    left = mass.new_ones(q.shape[0] * q.shape[1], q.shape[2]).index_copy(0, packing.queries, mass.t())
    return out, left.unflatten(0, q.shape[:2]).transpose(1, 2)


def _keys_and_gates(
    k: Tensor, head_dim: int, logits: str, forget_gate: Tensor | bool | None
) -> tuple[Tensor, Tensor | None]:
    """Return keys without the columns of `stored_keys`, and their gates. The arguments are those of `attend`."""
    if isinstance(forget_gate, Tensor):
        return k, forget_gate
    if not forget_gate and k.shape[-1] == head_dim:  # plain keys
        return k, None
    return keys_and_gates(k, head_dim, logits=logits, forget_gate=bool(forget_gate))


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Make the mask of a batch for `attend`. transformers calls this once for each forward, with its own arguments.

    Returns:
        None if all keys are visible. `step_mask` for a decoding step of one token with a static cache, without padding
        or with padding on the left, if no gradients are recorded. Otherwise int32 (b, num_keys): 0 for padding, else
        the document number of the key. Its attribute `packing` is the batch's `Packing`. Its attribute `leftpad` is the
        number of padding tokens of each row, for decoding steps, or None if padding is not on the left only. Its
        attribute `is_padding_only` is whether each row is one document, and `has_padding` whether a 0 is in it. A mask
        without columns stands for an unsupported mask; a layer that uses it raises ValueError.

    Raises:
        ValueError: if attention_mask has a wrong shape, the cache drops old keys, or the configuration selects keys or
            does not state its kind of positions. Some models without that statement request the mask and then compute
            the attention themselves.
    """
    if config is not None:
        _check_position_kind(config)
        # A model whose indexer selects keys reads the values of this mask before it calls the attention.
        num_selected = getattr(config, "index_topk", None)
        _require(
            num_selected is None, "index_topk of the configuration (keys that an indexer selects)", num_selected, "None"
        )
    _require(kv_offset == 0, "kv_offset (a cache that drops its oldest keys)", kv_offset, "0")
    if attention_mask is not None:
        if attention_mask.shape == (batch_size, 0) and kv_length:  # an unsupported one, made before (PaliGemma)
            return attention_mask
        check_mask_shape(attention_mask, batch_size)
    has_rows = attention_mask is not None and attention_mask.shape == (batch_size, q_length) and q_length == kv_length
    if torch.compiler.is_compiling() and mask_function is causal_mask_function and has_rows:
        is_token = attention_mask.to(device=device, dtype=torch.bool)
        mask = is_token.int()
        mask.packing = Packing.of_rows(is_token)  # also if nothing is padding, which only the values tell
        mask.is_padding_only = True
        return mask
    has_static_cache = isinstance(q_offset, Tensor) and q_length < kv_length
    if has_static_cache and q_length == 1 and mask_function is causal_mask_function and not torch.is_grad_enabled():
        padding = None if attention_mask is None else attention_mask.to(device=device, dtype=torch.bool)
        mask = step_mask((q_offset + q_length).to(device), padding, batch_size)
        if mask is not None:
            return mask
    num_keys = int(q_offset) + q_length  # in a static cache, the filled slots
    if attention_mask is not None:
        check_mask_shape(attention_mask, batch_size, num_keys)
    kept = None if attention_mask is None else attention_mask[:, :num_keys].to(device=device, dtype=torch.bool)
    if mask_function is causal_mask_function and num_keys == kv_length and (kept is None or bool(kept.all())):
        return None
    documents = documents_of(mask_function, (batch_size, num_keys), torch.device(device))
    if documents is None:
        return torch.empty(batch_size, 0, dtype=torch.int32, device=device)
    mask = documents if kept is None else documents * kept
    if num_keys == kv_length and bool((mask == 1).all()):
        return None  # under torch.compile, transformers asks for a mask also where there is none to make
    mask.leftpad = leftpad_of(mask) if q_length < num_keys else None
    mask.packing = Packing.of(mask, q_length)
    mask.is_padding_only = mask_function is causal_mask_function
    mask.has_padding = kept is not None and not bool(kept.all())
    return mask


def check_keeps_keys(cache: Cache | None) -> None:
    """Raise ValueError if a layer of a cache drops its oldest keys. `attention_mask` sees only one of the layers."""
    if any(getattr(layer, "is_sliding", False) for layer in getattr(cache, "layers", ())):
        raise ValueError(
            f"cache must keep all keys, got {type(cache).__name__} with sliding windows. Make it for a configuration "
            "without sliding_window and layer_types."
        )


def check_options(config: PreTrainedConfig) -> None:
    """Raise ValueError if a decoder's configuration has options of StickBreakingConfig that would be ignored."""
    for name, required in REQUIRED_OPTIONS.items():
        chosen = getattr(config, name, required)
        _require(chosen == required, f"{name} of the configuration", chosen, repr(required))


def check_positions(module: nn.Module) -> None:
    """Raise ValueError unless the configuration of an attention module states that it has no positions."""
    config = module.config
    if config.model_type == MODEL_TYPE or getattr(module, "use_rope", True) in (False, 0):
        return
    _check_position_kind(config)
    kind = getattr(config, "position_embedding_type", "rope")
    if kind in (None, "none", "nope"):
        return
    if kind != "rope":
        raise ValueError(f"position_embedding_type must be 'none' with attn_implementation={NAME!r}, got {kind!r}.")
    rope = config.rope_parameters
    kinds = {parameters["rope_type"] for parameters in _rope_by_layer(rope).values() if parameters is not None}
    if kinds - {NO_ROTATION, NO_ROTATION_0_1}:
        raise ValueError(
            f"rope_type in rope_parameters must be {NO_ROTATION!r} with attn_implementation={NAME!r}, got "
            f"{', '.join(sorted(map(repr, kinds)))}. Use megatron_sb.huggingface.without_positions(config)."
        )


def _check_position_kind(config: PreTrainedConfig) -> None:
    """Raise ValueError if the configuration has positions, or may have them, of a kind that cannot be disabled."""
    _check_calls_attention(config)
    kind = getattr(config, "position_embedding_type", "rope")
    is_known = config.model_type == MODEL_TYPE or getattr(config, "rope_parameters", None) or kind != "rope"
    if not is_known:
        raise ValueError(
            f"attn_implementation={NAME!r} needs a model with rotary positions that can be disabled (rope_parameters), "
            f"got {config.model_type!r}, which has no positions or other ones."
        )


def _check_calls_attention(config: PreTrainedConfig) -> None:
    """Raise ValueError if the model of a configuration would compute softmax, whatever its attn_implementation is."""
    if config.model_type in OWN_ATTENTION:
        raise ValueError(
            f"attn_implementation={NAME!r} needs a model that calls the attention of attn_implementation, got "
            f"{config.model_type!r}, which always computes softmax itself."
        )


def _rope_by_layer(rope: dict) -> dict[str, dict | None]:
    """Return rope_parameters for each layer type. The layer type is "" if all layers share them."""
    return {"": rope} if "rope_type" in rope or "rope_theta" in rope else rope


def _no_rotation(
    config: PreTrainedConfig, device: Any = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Return frequencies of 0, so that every cosine is 1 and every sine 0.

    transformers calls this when it builds a model. Raise ValueError if the model would use another attention, which
    would not know the order of the keys.
    """
    _check_implementation(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    share = rope.get("partial_rotary_factor", 1.0)
    return torch.zeros(int(head_dim * share) // 2, device=device), 1.0


def _check_implementation(config: PreTrainedConfig) -> None:
    """Raise ValueError if a model without positions has another attention than this one."""
    implementation = config._attn_implementation
    if implementation != NAME:
        raise ValueError(
            f"attn_implementation must be {NAME!r} for a model without positions (rope_type {NO_ROTATION!r}), got "
            f"{implementation!r}. Load it with from_pretrained(FOLDER, attn_implementation={NAME!r})."
        )


def has_rotation_disabled(rope: dict | None) -> bool:
    """Return whether `rope_parameters` of a configuration are those of `without_positions`, in any type of layer.

    Example:
        >>> from megatron_sb.huggingface.attention import has_rotation_disabled
        >>> has_rotation_disabled({"rope_type": "default", "rope_theta": 10000.0})
        False
    """
    by_layer = [part for part in _rope_by_layer(rope or {}).values() if isinstance(part, dict)]
    kinds = {part.get("rope_type") for part in by_layer}
    return bool(kinds & {NO_ROTATION, NO_ROTATION_0_1})


def _keep_implementation() -> None:
    """Let `set_attn_implementation` of every model refuse another attention, if the model has no positions.

    transformers calls nothing of this package when a model changes its attention after it was built.
    """
    change = PreTrainedModel.set_attn_implementation
    if hasattr(change, "keeps_stickbreaking"):  # the code of a saved folder calls this, too
        return

    @functools.wraps(change)
    def set_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        configs = {id(part.config): part.config for part in self.modules() if isinstance(part, PreTrainedModel)}
        before = {key: config._attn_implementation for key, config in configs.items()}
        change(self, *args, **kwargs)
        try:
            for config in configs.values():
                if has_rotation_disabled(getattr(config, "rope_parameters", None)):
                    _check_implementation(config)
        except ValueError:
            for key, config in configs.items():
                config._attn_implementation_internal = before[key]  # the property would also set nested ones
            raise

    set_attn_implementation.keeps_stickbreaking = True
    PreTrainedModel.set_attn_implementation = set_attn_implementation


def _require(condition: bool, name: str, value: object, required: str) -> None:
    if not condition:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} must be {required} with attn_implementation={NAME!r}, got {got}.")
