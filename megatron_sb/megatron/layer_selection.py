"""Which layers of a model are stick-breaking: `layers` (`--sb-layers`), with one entry for each attention layer.

Layers without attention have no entry. Megatron's settings say which layers these are: the pattern of a hybrid model
(Mamba, gated delta nets, MLPs and experts), the block configs of a heterogeneous model (no-ops and linear layers), and
the linear layers of `--experimental-attention-variant gated_delta_net`.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_sb.megatron.settings import script_arguments

# Layers of a hybrid pattern: self-attention and multi-latent attention, which can become stick-breaking, and sparse
# attention, which cannot.
REPLACEABLE_SYMBOLS = "*+"
ATTENTION_SYMBOLS = REPLACEABLE_SYMBOLS + "D"
LINEAR_ATTENTION = "gated_delta_net"
# Megatron-Core 0.16 has the second name.
PATTERN_SETTINGS = ("hybrid_layer_pattern", "hybrid_override_pattern")
BLOCK_CONFIG_SETTINGS = ("heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path")


def attention_layers_in(pattern: str) -> tuple[int, ...]:
    """Return the numbers of the attention layers in a hybrid pattern. The first layer has number 1.

    Args:
        pattern: value of `--hybrid-layer-pattern`. The part after "/" (multi-token prediction) is ignored.

    Example:
        >>> from megatron_sb.megatron.layer_selection import attention_layers_in
        >>> attention_layers_in("M*-|M*-")
        (2, 5)
    """
    symbols = pattern.partition("/")[0].replace("|", "")
    return tuple(number for number, symbol in enumerate(symbols, 1) if symbol in ATTENTION_SYMBOLS)


def hybrid_pattern_of(*sources: object) -> str | None:
    """Return the pattern of a hybrid model. Arguments are those of `attention_layers_of`.

    Example:
        >>> from types import SimpleNamespace
        >>> from megatron_sb.megatron.layer_selection import hybrid_pattern_of
        >>> hybrid_pattern_of(None, SimpleNamespace(hybrid_layer_pattern="M*-"))
        'M*-'
    """
    return _first(PATTERN_SETTINGS, sources)


def attention_layers_of(*sources: object) -> tuple[int, ...]:
    """Return the numbers of the attention layers of a model, over all pipeline stages. The first layer has number 1.

    Args:
        sources: the config and the parsed arguments of a script, or one of them. None has no settings.

    Raises:
        ValueError: if the settings do not say which layers have attention.

    Example:
        >>> from types import SimpleNamespace
        >>> from megatron_sb.megatron.layer_selection import attention_layers_of
        >>> attention_layers_of(SimpleNamespace(num_layers=2)), attention_layers_of(
        ...     SimpleNamespace(hybrid_layer_pattern="MM*M*")
        ... )
        ((1, 2), (3, 5))
    """
    pattern = hybrid_pattern_of(*sources)
    if pattern:
        return attention_layers_in(pattern)
    if _first(("hybrid_attention_ratio",), sources):
        raise ValueError(
            "layers (--sb-layers) needs --hybrid-override-pattern in a hybrid model, got --hybrid-attention-ratio "
            f"{_first(('hybrid_attention_ratio',), sources)}."
        )
    num_layers = _first(("num_layers",), sources)
    without: list = [False] * num_layers
    if _is_heterogeneous(sources):
        attentions = [block["attention"] for block in _block_configs(sources)]
        without = [entry.get("no_op") or entry.get("replace_with_linear") for entry in attentions]
    elif _first(("experimental_attention_variant",), sources) == LINEAR_ATTENTION:
        frequency = _first(("linear_attention_freq",), sources)
        if not frequency:
            raise ValueError(
                "linear_attention_freq (--linear-attention-freq) must be a positive number or a list together with "
                f"layers (--sb-layers) in a model with gated delta nets, got {frequency!r}."
            )
        every = isinstance(frequency, int)
        without = [(i + 1) % frequency != 0 for i in range(num_layers)] if every else frequency
    return tuple(number for number, is_without in enumerate(without, 1) if not is_without)


def check_layers(layers: tuple[int, ...], numbers: tuple[int, ...], settings: object, source: str) -> None:
    """Raise ValueError unless `layers` has an entry for every attention layer of the model.

    Args:
        layers: `StickBreakingOptions.layers`.
        numbers: the numbers of the attention layers.
        settings: a TransformerConfig, or the parsed arguments of a script.
        source: name of `settings` in the message: "config" or "args".

    Example:
        >>> from types import SimpleNamespace
        >>> from megatron_sb.megatron.layer_selection import check_layers
        >>> check_layers((1, 1, 0), (1, 2, 3), SimpleNamespace(num_layers=3, mtp_num_layers=None), "config")
    """
    if len(layers) != len(numbers):
        raise ValueError(
            f"layers={layers} (--sb-layers) must have {len(numbers)} entries, one for each attention layer of the "
            f"model, got {len(layers)}. By --num-layers, or --hybrid-layer-pattern, the attention layers are {numbers}."
        )
    if settings.mtp_num_layers is not None:
        raise ValueError(
            f"{source}.mtp_num_layers (--mtp-num-layers) must be None with layers={layers} (--sb-layers), got "
            f"{settings.mtp_num_layers}: the pattern has no entries for those layers."
        )


def is_selected(
    layer_number: int, config: object, layers: tuple[int, ...] | None, numbers: tuple[int, ...] | None
) -> bool:
    """Return whether an attention layer is stick-breaking.

    Args:
        layer_number: 1 for the first layer of the model.
        config: the TransformerConfig of the layer.
        layers: `StickBreakingOptions.layers`.
        numbers: the numbers of the attention layers. None: as the config and the arguments of the script say.

    Raises:
        ValueError: if `layers` does not have one entry for each attention layer, or this layer is none of `numbers`.

    Example:
        >>> from types import SimpleNamespace
        >>> from megatron_sb.megatron.layer_selection import is_selected
        >>> config = SimpleNamespace(num_layers=6, mtp_num_layers=None)
        >>> is_selected(5, config, layers=(0, 1), numbers=(2, 5))  # the second attention layer
        True
    """
    if layers is None:
        return True
    if numbers is None:
        numbers = attention_layers_of(config, script_arguments())
    check_layers(layers, numbers, config, "config")
    if layer_number not in numbers:
        raise ValueError(
            "hybrid_layer_pattern (--hybrid-layer-pattern), or the config of with_stickbreaking, must be that of the "
            f"model together with layers (--sb-layers), got one with the attention layers {numbers}, but layer "
            f"{layer_number} has attention, too."
        )
    selected = {number for number, entry in zip(numbers, layers, strict=True) if entry}
    return layer_number in selected


def keeps_softmax(layers: tuple[int, ...] | None) -> bool:
    """Return whether `layers` leaves an attention layer as it is.

    Example:
        >>> from megatron_sb.megatron.layer_selection import keeps_softmax
        >>> keeps_softmax(None), keeps_softmax((1, 0))
        (False, True)
    """
    return layers is not None and 0 in layers


def _first(names: tuple[str, ...], sources: tuple) -> object:
    """Return the first of these settings that is not None in a source."""
    values = (getattr(source, name, None) for source in sources for name in names)
    return next((value for value in values if value is not None), None)


def _is_heterogeneous(sources: tuple) -> bool:
    return any(getattr(source, "heterogeneous_block_specs", False) for source in sources) or bool(
        _first(BLOCK_CONFIG_SETTINGS, sources)
    )


def _block_configs(sources: tuple) -> list[dict]:
    """Return the block configs of a heterogeneous model. The config of one of its layers does not have them."""
    text, path = (_first((name,), sources) for name in BLOCK_CONFIG_SETTINGS)
    if not text and not path:
        raise ValueError(
            "config must be given to with_stickbreaking together with layers in a heterogeneous model, got None: pass "
            "the HeterogeneousTransformerConfig of the model."
        )
    return json.loads(text or Path(path).read_text(encoding="utf-8"))["block_configs"]
