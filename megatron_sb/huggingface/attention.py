"""`attn_implementation="stickbreaking"` for the decoders of transformers.

A model of transformers hands queries, keys and a mask to a function that its configuration names. Ours refuses whatever
would make it something else than stick-breaking attention (Tan et al., arXiv 2410.17980): above all positions in
queries and keys, which the order of the keys replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

from megatron_sb.huggingface.packing import Packing, document_mask, documents_of, leftpad_of
from megatron_sb.ops import stickbreaking_attention, stickbreaking_attention_varlen
from megatron_sb.ops.kvcache import attend_to_filled, is_decoding_step
from megatron_sb.options import DEFAULT_MASS_THRESHOLD

NAME = "stickbreaking"
NO_ROTATION = "none"  # the rope_type whose rotations do nothing
MODEL_TYPE = "stick_breaking"  # of our own models, which have no positions
# What models hand over beside q, k, v, and the only value with which attention is what it says.
REFUSED = {"sliding_window": None, "softcap": None, "s_aux": None, "position_bias": None, "head_mask": None}


def register() -> None:
    """Make the name known to transformers; importing this package does it."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    ROPE_INIT_FUNCTIONS[NO_ROTATION] = _no_rotation
    # Configurations look for a method of this name, and warn where there is none.
    RotaryEmbeddingConfigMixin._validate_none_rope_parameters = lambda self, parameters, ignore_keys=None: None


def without_positions(config: PreTrainedConfig) -> PreTrainedConfig:
    """Switch rotary positions off in the configuration of a decoder, in place, and return it.

    A model made with it rotates nothing, so that attn_implementation="stickbreaking" takes it. Weights keep their
    names and shapes; those that were trained with positions have to be trained on.

    Raises:
        ValueError: a configuration without rope_parameters: its positions, if it has any, are of another kind.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        raise ValueError(f"config: {text.model_type!r} has no rope_parameters to switch off")
    for parameters in _rope_by_layer(rope).values():
        if parameters is not None:
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
    """Attend as a module of transformers asks to: q (b, h, s, d), k (b, h_kv, s_k, d), v (b, h_kv, s_k, d_v).

    attention_mask: what `attention_mask` made. Where it is None and there are no older keys, packed documents are taken
    from position_ids or cu_seq_lens_q, if the model hands them on. The configuration's attend_current and
    mass_threshold are followed where it has them.
    Returns (b, s, h, d_v), 0 for padding, and no weights.

    Raises:
        ValueError: positions, dropout, windows, soft caps, sinks, attention to later tokens, wanted weights.
    """
    refuse_positions(module)
    _refuse(dropout == 0, "dropout", dropout, "0")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse(bool(causal), "is_causal", causal, "True")
    _refuse(not kwargs.get("output_attentions"), "output_attentions", True, "False: they are never made")
    for name, allowed in REFUSED.items():
        _refuse(kwargs.get(name) is allowed, name, kwargs.get(name), str(allowed))
    if attention_mask is None and query.shape[2] == key.shape[2]:
        rows = (query.shape[0], query.shape[2])
        attention_mask = document_mask(kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"), rows)
    config = module.config
    out = attend(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        scale=scaling,
        attend_current=getattr(config, "attend_current", False),
        mass_threshold=getattr(config, "mass_threshold", DEFAULT_MASS_THRESHOLD),
    )
    return out, None


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, return_mass: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`stickbreaking_attention` of q (b, s, h, d), k and v (b, s_k, h_kv, d) without what the mask hides.

    mask: None, or int (b, s_k) as `attention_mask` makes it; keys beyond its columns are places that are still empty.
    With return_mass the mass too, (b, h, s); for padding the output is 0 and the mass 1.
    """
    if mask is None:
        attention = attend_to_filled if is_decoding_step(q, k, v) else stickbreaking_attention
        return attention(q, k, v, return_mass=return_mass, **options)
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {mask.dim()} dimensions; two, (batch, tokens), 0 for padding, are allowed"
        )
    if mask.shape[1] < q.shape[1]:
        raise ValueError(
            "attention_mask: stick-breaking attention is causal within each document; the model asks for another mask "
            "(a sliding window, chunks, or tokens that see later ones)"
        )
    leftpad = getattr(mask, "leftpad", None)
    if leftpad is not None and is_decoding_step(q, k, v):
        return attend_to_filled(q, k, v, mask.shape[1], leftpad, return_mass=return_mass, **options)
    k, v = k[:, : mask.shape[1]], v[:, : mask.shape[1]]
    packing = getattr(mask, "packing", None) or Packing.of(mask, q.shape[1])
    result = stickbreaking_attention_varlen(
        q.flatten(0, 1)[packing.queries],
        k.flatten(0, 1)[packing.keys],
        v.flatten(0, 1)[packing.keys],
        packing.cu_seqlens,
        cu_seqlens_k=packing.cu_seqlens_k,
        return_mass=return_mass,
        **options,
    )
    o, mass = result if return_mass else (result, None)
    out = o.new_zeros(q.shape[0] * q.shape[1], *o.shape[1:]).index_copy(0, packing.queries, o)
    out = out.unflatten(0, q.shape[:2])
    if mass is None:
        return out
    left = mass.new_ones(q.shape[0] * q.shape[1], q.shape[2]).index_copy(0, packing.queries, mass.t())
    return out, left.unflatten(0, q.shape[:2]).transpose(1, 2)


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
    """Make what `attend` takes of what transformers knows of a batch; called once a forward.

    None where all keys count; else int32 (b, keys so far): 0 for padding, else the number of the key's document. Its
    attributes `packing` and `leftpad` (of rows that begin with padding and have no other, for steps; or None)
    spare layers the work of finding them. Without columns: a mask that is refused, once a layer uses it.

    Raises:
        ValueError: a cache that forgets; a configuration that says nothing of its positions: some such models ask for
            the mask and then attend by themselves.
    """
    if config is not None:
        _refuse_unsaid_positions(config)
    _refuse(kv_offset == 0, "a cache that forgets its oldest keys, kv_offset", kv_offset, "0")
    num_keys = int(q_offset) + q_length  # of a static cache, those that are filled
    kept = None if attention_mask is None else attention_mask[:, :num_keys].to(device=device, dtype=torch.bool)
    if mask_function is causal_mask_function and num_keys == kv_length and (kept is None or bool(kept.all())):
        return None
    documents = documents_of(mask_function, (batch_size, num_keys), torch.device(device))
    if documents is None:
        return torch.empty(batch_size, 0, dtype=torch.int32, device=device)
    mask = documents if kept is None else documents * kept
    mask.leftpad = leftpad_of(mask) if q_length < num_keys else None
    mask.packing = Packing.of(mask, q_length)
    return mask


def refuse_positions(module: nn.Module) -> None:
    """Raise ValueError unless an attention module's configuration says that it has no positions."""
    config = module.config
    if config.model_type == MODEL_TYPE or getattr(module, "use_rope", True) in (False, 0):
        return
    _refuse_unsaid_positions(config)
    kind = getattr(config, "position_embedding_type", "rope")
    if kind in (None, "none", "nope"):
        return
    if kind != "rope":
        raise ValueError(f"position_embedding_type = {kind!r} contradicts attn_implementation = {NAME!r}")
    rope = config.rope_parameters
    kinds = {parameters["rope_type"] for parameters in _rope_by_layer(rope).values() if parameters is not None}
    if kinds - {NO_ROTATION}:
        raise ValueError(
            f"attn_implementation = {NAME!r}: rope_parameters have rope_type {', '.join(sorted(map(repr, kinds)))}; "
            f"{NO_ROTATION!r} is allowed, as megatron_sb.huggingface.without_positions(config) makes it"
        )


def _refuse_unsaid_positions(config: PreTrainedConfig) -> None:
    kind = getattr(config, "position_embedding_type", "rope")
    said = config.model_type == MODEL_TYPE or getattr(config, "rope_parameters", None) or kind != "rope"
    if not said:
        raise ValueError(
            f"attn_implementation = {NAME!r}: the configuration of {config.model_type!r} does not say that it has no "
            "position embedding (no rope_parameters to be switched off); models with rotary positions can be taken"
        )


def _rope_by_layer(rope: dict) -> dict[str, dict | None]:
    """rope_parameters by the type of a layer, where they have types, or as the only one."""
    return {"": rope} if "rope_type" in rope or "rope_theta" in rope else rope


def _no_rotation(
    config: PreTrainedConfig, device: Any = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Frequencies of 0: every cosine is 1 and every sine 0."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    share = rope.get("partial_rotary_factor", 1.0)
    return torch.zeros(int(head_dim * share) // 2, device=device), 1.0


def _refuse(allowed: bool, name: str, value: object, what: str) -> None:
    if not allowed:
        raise ValueError(f"attn_implementation = {NAME!r}: {name} = {value!r}; {what} is allowed")
