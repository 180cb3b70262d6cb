"""Compare the attention of a checkpoint with that of the model that loads it, in Megatron-Bridge's training loop.

Megatron-Bridge writes the settings of a job into `run_config.yaml` of each checkpoint. They contain the function that
makes the layer spec, and its options. Megatron-Bridge compares only parallel sizes, and the weights of a model have the
same names and shapes with every kind of attention.

Only a job that resumes (`checkpoint.load`) must have the attention of the checkpoint. With
`checkpoint.pretrained_checkpoint` and `checkpoint.finetune`, weights are loaded into any model.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import ModuleType

from megatron_sb.megatron.arguments import StickBreakingOptions
from megatron_sb.megatron.saved_attention import COMPARED

CHECKPOINTING = "megatron.bridge.training.checkpointing"
BLOCK_SPEC = "megatron_sb.megatron.spec.stickbreaking_block_spec"
STOCK = "megatron."  # starts the names of functions that make stock layer specs
RUN_CONFIG = "run_config.yaml"


def compare_when_bridge_loads() -> None:
    """Make Megatron-Bridge's training loop compare the attention of the checkpoints that it resumes from.

    Without this loop in the process, and on further calls, this function has no effect.
    """
    checkpointing = sys.modules.get(CHECKPOINTING)
    stock = getattr(checkpointing, "_load_base_checkpoint", None)
    if stock is None or hasattr(stock, "compares_attention"):
        return
    _patch(checkpointing, stock)


def _patch(checkpointing: ModuleType, stock) -> None:
    """Compare after each read of a checkpoint. Megatron-Bridge first reads one without its weights."""

    @functools.wraps(stock)
    def load(load_dir, checkpoint_config, *others, cfg=None, **kwargs):
        loaded = stock(load_dir, checkpoint_config, *others, cfg=cfg, **kwargs)
        state, path = loaded[:2]
        resumes = load_dir == checkpoint_config.load and not checkpoint_config.finetune
        # A local checkpoint has an identifier instead of a path, and no settings.
        if state and cfg is not None and resumes and isinstance(path, (str, os.PathLike)):
            check_run_config(Path(path), cfg.model.transformer_layer_spec)
        return loaded

    load.compares_attention = True
    checkpointing._load_base_checkpoint = load


def check_run_config(folder: Path, layer_spec: object) -> None:
    """Raise ValueError if a checkpoint of Megatron-Bridge was saved by a model with another attention.

    Only `stickbreaking_block_spec`, with options of `functools.partial` or without, and Megatron's own functions are
    compared: nothing is known about other functions.

    Args:
        folder: the checkpoint.
        layer_spec: `transformer_layer_spec` of the provider of the model.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from megatron_sb.megatron.bridge_checkpoints import check_run_config
        >>> folder = Path(tempfile.mkdtemp())  # without settings, nothing is compared
        >>> check_run_config(folder, layer_spec=None)
    """
    import yaml

    file = folder / RUN_CONFIG
    if not file.is_file():
        return
    settings = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    saved = settings.get("model", {}).get("transformer_layer_spec")
    if not isinstance(saved, dict):
        return
    function = getattr(layer_spec, "func", layer_spec)  # of a functools.partial
    own_name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    saved_name = str(saved.get("_target_"))
    found, own = _options_of(saved_name, saved), _options_of(own_name, getattr(layer_spec, "keywords", {}))
    if None in (found, own) or found == own:
        return
    name, value, got = "transformer_layer_spec of the provider", saved_name, own_name
    if found and own:
        option = next(name for name in COMPARED if found[name] != own[name])
        name, value, got = f"{option} of the provider's transformer_layer_spec", found[option], own[option]
    raise ValueError(
        f"{name} must be {value!r} as in checkpoint {folder}, got {got!r}. Set it with "
        "functools.partial(stickbreaking_block_spec, ...), or load the weights into this other model with "
        "checkpoint.pretrained_checkpoint."
    )


def _options_of(function: str, options: dict) -> dict | None:
    """Return the compared options of a function of layer specs: {} of a stock function, None of an unknown one."""
    if function != BLOCK_SPEC:
        return {} if function.startswith(STOCK) else None
    found = {name: options.get(name, getattr(StickBreakingOptions, name)) for name in COMPARED}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}  # of YAML
    if found["layers"] is not None and all(found["layers"]):
        found["layers"] = None
    return found
