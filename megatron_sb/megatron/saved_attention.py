"""Compare the attention of a checkpoint with that of the model that loads it, in Megatron's training loop.

Megatron saves the script's arguments in every checkpoint, and with them the `--sb-*` flags. It does not compare them:
the weights of a model have the same names and shapes with every kind of attention. `compare_when_loading` makes
`megatron.training.checkpointing` compare them. The launcher calls it, and so does a stick-breaking layer that is built
in a script of Megatron's. `with_stickbreaking` and the layer also record the options in the arguments, for scripts that
set them without flags.

The checkpoints of such models contain a marker (see `StickBreakingCoreAttention.sharded_state_dict`) that a softmax
model does not know. Megatron's strict loading reports it, also in scripts without this package.

Nothing here imports Megatron-Core, because the launcher imports this module before the script decides which Megatron
to import.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from megatron_sb.megatron.arguments import StickBreakingOptions
from megatron_sb.megatron.layer_selection import hybrid_pattern_of
from megatron_sb.megatron.settings import MARKER, script_arguments

ALLOW_FLAG = "--sb-allow-mismatch"
# Options that change the function of a model. mass_threshold only bounds the weights that skipping omits.
COMPARED = ("attend_current", "remainder_bias", "head_norm", "logits", "reach", "forget_gate", "layers")
NO_OFFSETS = (1.0, 1.0)  # the reach that changes no logit, as None
SWITCH = "stick_breaking_attention"
CHECKPOINTING = "megatron.training.checkpointing"
REPLACED = ("_load_base_checkpoint", "_build_sharded_state_dict_metadata")  # functions of that module
SPEC_MODULE = "megatron_sb.megatron.spec"
STACK = "decoder.layers."  # in the names of weights, followed by the number of a layer if it has names of its own
_allowed_in_process: set[str] = set()  # contains ALLOW_FLAG if the launcher took it from the command line


def record_options(options: StickBreakingOptions) -> None:
    """Write the options of a model into the script's arguments, which Megatron saves in checkpoints.

    Arguments that say the same already do not change: Megatron requires that all ranks save equal arguments, and only
    the ranks with stick-breaking layers call this function after a parser has made them.

    Without a Megatron training script in this process, this function has no effect.
    """
    args = script_arguments()
    if args is None:
        return
    setattr(args, SWITCH, True)
    for name in COMPARED:
        value, flag = getattr(options, name), f"sb_{name}"
        found = getattr(args, flag, ...)  # a parser makes lists
        if (tuple(found) if isinstance(found, list) else found) != value:
            setattr(args, flag, value)
    compare_when_loading()


def compare_when_loading() -> None:
    """Make Megatron's training loop compare the attention of every checkpoint that it loads. Import nothing.

    If the module that loads checkpoints is not imported yet, the change is made right after its import. Further calls
    have no effect.
    """
    if CHECKPOINTING in sys.modules:
        _patch(sys.modules[CHECKPOINTING])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(CHECKPOINTING, _patch))


def allow_mismatches() -> None:
    """Let this process load every checkpoint, as with `sb_allow_mismatch` in the arguments of the script."""
    _allowed_in_process.add(ALLOW_FLAG)


def check_checkpoint(saved: argparse.Namespace | None, folder: Path, args: argparse.Namespace) -> None:
    """Raise ValueError if a checkpoint was saved by a model with another attention than the model of a script.

    Args:
        saved: the arguments in the checkpoint. None if it has none, as a converted checkpoint: then only the kind of
            attention is compared, if the checkpoint records it.
        folder: the checkpoint.
        args: the arguments of the script. With `sb_allow_mismatch` nothing is compared.

    Raises:
        ValueError: if the attention differs. The message names the argument, both values, and what to do.

    Example:
        >>> from argparse import Namespace
        >>> from pathlib import Path
        >>> from megatron_sb.megatron.saved_attention import check_checkpoint
        >>> saved = Namespace(stick_breaking_attention=True, sb_logits="euclidean")
        >>> check_checkpoint(saved, Path("run/iter_0000100"), Namespace(stick_breaking_attention=True))
        Traceback (most recent call last):
            ...
        ValueError: args.sb_logits (--sb-logits) must be 'euclidean' as in checkpoint run/iter_0000100, got 'dot': \
pass --sb-logits euclidean, or pass --sb-allow-mismatch to load the weights into this other model.
    """
    found, own = _saved_attention(saved, folder, args), _attention_of(args)
    allowed = getattr(args, "sb_allow_mismatch", False) or ALLOW_FLAG in _allowed_in_process
    if found is None or allowed or not (found[SWITCH] or own[SWITCH]):
        return
    for name, value in found.items():
        if own[name] != value:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"args.{name} ({flag}) must be {value!r} as in checkpoint {folder}, got {own[name]!r}: "
                f"{_remedy(flag, value)}, or pass {ALLOW_FLAG} to load the weights into this other model."
            )


def _check_layer_names(saved: argparse.Namespace | None, folder: Path, args: argparse.Namespace) -> None:
    """Raise ValueError if a distributed checkpoint lacks the names of the weights of a mixed model.

    It names the weights of each layer, or stacks those of all layers under one name. Mixed models need the former.
    Megatron would list all names as missing keys. A hybrid model names its layers in any case, and Megatron finds the
    stacked weights for it.

    Args:
        saved: the arguments in the checkpoint. None if it has none.
        folder: the checkpoint, of any format.
        args: the arguments of the script.
    """
    layers = getattr(args, "sb_layers", None) if _attention_of(args)[SWITCH] else None
    if layers is None or hybrid_pattern_of(args) or getattr(saved, "sb_layers", None) is not None:
        return
    if not (folder / ".metadata").is_file():
        return
    from megatron_sb.megatron.metadata import read_metadata

    try:
        names = [name for name in read_metadata(folder).state_dict_metadata if STACK in name]
    except ValueError:
        return  # Megatron reads it, too, and says what is wrong
    if names and not any(name.partition(STACK)[2][0].isdigit() for name in names):
        raise ValueError(
            f"args.sb_layers (--sb-layers) must be None with the distributed checkpoint {folder}, got {layers!r}: it "
            "stacks the weights of all layers, and a model with --sb-layers names them layer by layer. Convert the "
            "checkpoint with Megatron's --ckpt-convert-format torch first."
        )


def _attention_of(args: argparse.Namespace) -> dict:
    """Return the value of each compared argument. A missing argument has the default of its flag."""
    found = {SWITCH: bool(getattr(args, SWITCH, False)) or SPEC_MODULE in (getattr(args, "spec", None) or ())}
    for name in COMPARED:
        found[f"sb_{name}"] = getattr(args, f"sb_{name}", getattr(StickBreakingOptions, name))
    layers = found["sb_layers"]
    reach = None if found["sb_reach"] is None else tuple(found["sb_reach"])
    found["sb_reach"] = None if reach == NO_OFFSETS else reach
    found["sb_layers"] = None if layers is None or all(layers) else tuple(layers)
    return found


def _saved_attention(saved: argparse.Namespace | None, folder: Path, args: argparse.Namespace) -> dict | None:
    """Return the compared values of a checkpoint, or None if they are unknown."""
    if saved is None:
        from megatron_sb.megatron.weights import read_attention_kind

        kind = read_attention_kind(folder)
        return None if kind is None else {SWITCH: kind != "softmax"}
    found = _attention_of(saved)
    # Without the flags, a script of older releases did not record what it passed to with_stickbreaking.
    known = found[SWITCH] or hasattr(saved, SWITCH) or hasattr(args, "sb_allow_mismatch")
    return found if known else None


def _expect_saved_layers(state: dict, args: argparse.Namespace) -> None:
    """Let Megatron load the names and markers that a distributed checkpoint has. They depend on the saved layers."""
    saved, metadata = state.get("args"), state.get("content_metadata")
    if not saved or not metadata or not _attention_of(saved)[SWITCH]:
        return
    if getattr(saved, "sb_layers", None) is not None:
        metadata["non_homogeneous_layers"] = True  # checkpoints of older releases of this package do not say it
    if _attention_of(saved)["sb_layers"] != _attention_of(args)["sb_layers"]:
        metadata.pop(MARKER, None)  # it would miss those of other layers


def _remedy(flag: str, value: object) -> str:
    """Return what to do so that a flag has a value."""
    if value is None or value is False:
        return f"remove {flag}"
    if value is True:
        return f"pass {flag}"
    if flag == "--sb-reach":
        value = " ".join(map(str, value))
    return f"pass {flag} {str(list(value)).replace(' ', '') if isinstance(value, tuple) else value}"


def _patch(checkpointing: ModuleType) -> None:
    """Compare after each read of a checkpoint's arguments, and mark the checkpoints of stick-breaking models."""
    missing = [name for name in REPLACED if not hasattr(checkpointing, name)]
    if missing:
        warnings.warn(
            f"The attention of checkpoints is not compared: {CHECKPOINTING} of this release of Megatron has no "
            f"{missing[0]}.",
            stacklevel=2,
        )
        return
    stock_load = checkpointing._load_base_checkpoint
    if hasattr(stock_load, "compares_attention"):
        return

    @functools.wraps(stock_load)
    def load(load_dir, args, *others, **kwargs):
        # Megatron reads the common state of a distributed checkpoint first, so the weights are not read in vain.
        loaded = stock_load(load_dir, args, *others, **kwargs)
        state, path = loaded[:2]
        # With --use-checkpoint-args Megatron also reads a checkpoint while it parses the arguments.
        if state and args is script_arguments():
            # A local checkpoint (--non-persistent-ckpt-type local) has an identifier instead of a path.
            folder = Path(path if isinstance(path, (str, os.PathLike)) else args.non_persistent_local_ckpt_dir)
            check_checkpoint(state.get("args"), folder, args)
            _check_layer_names(state.get("args"), folder, args)
            _expect_saved_layers(state, args)
        return loaded

    load.compares_attention = True
    checkpointing._load_base_checkpoint = load
    stock_metadata = checkpointing._build_sharded_state_dict_metadata

    @functools.wraps(stock_metadata)
    def build_metadata(args, *others, **kwargs):
        metadata = stock_metadata(args, *others, **kwargs)
        if not _attention_of(args)[SWITCH]:
            return metadata
        # Megatron reads these when it loads the checkpoint, also into a model without mixed layers.
        names = {} if getattr(args, "sb_layers", None) is None else {"non_homogeneous_layers": True}
        return {**metadata, MARKER: True, **names}

    checkpointing._build_sharded_state_dict_metadata = build_metadata


class _AfterImport(importlib.abc.MetaPathFinder):
    """Call a function with a module, once, right after its import."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Find the module as Python does, and let its loader call the function."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._call(module)

            spec.loader.exec_module = exec_module
        return spec
