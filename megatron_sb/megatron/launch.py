"""Run an unmodified Megatron training script with stick-breaking attention.

    torchrun ... -m megatron_sb.megatron.launch pretrain_gpt.py <Megatron's flags> --stick-breaking-attention [--sb-...]

In both cases below, Megatron compares the attention of a checkpoint with that of the model (see saved_attention.py).
Without `--stick-breaking-attention` the script otherwise runs as under `python pretrain_gpt.py ...`. With
`--sb-allow-mismatch` it does so without the comparison. With `--stick-breaking-attention` the launcher does the
following before the script starts:

- It adds the `--sb-*` flags (see arguments.py) to Megatron's parser, in `add_megatron_arguments`.
- Without `--cp-comm-type` and `--sb-cp-comm`, context parallelism chooses its communication ("auto"). Megatron's own
  default is p2p, which is slower.
- It rejects Megatron's flags that stick-breaking attention does not support.
- It patches `TransformerLayer` to put stick-breaking attention into the submodules that it receives. Megatron builds
  every attention layer in this way: dense or mixture of experts, local or Transformer Engine, stages of a virtual
  pipeline, multi-token prediction and hybrid models. Layers without attention do not change.
- It calls `stand_ins.install_stand_ins`, for modules that plain Megatron-Core lacks.

The top of this file imports nothing that imports Megatron-Core. The script's folder must come first in `sys.path`, as
under `python`, because it decides which Megatron is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import runpy
import sys
from pathlib import Path

from megatron_sb.megatron.arguments import (
    StickBreakingOptions,
    add_arguments,
    options_from_args,
    splits_whole_streams,
)
from megatron_sb.megatron.layer_selection import (
    LINEAR_ATTENTION,
    PATTERN_SETTINGS,
    REPLACEABLE_SYMBOLS,
    attention_layers_of,
    check_layers,
    hybrid_pattern_of,
    keeps_softmax,
)
from megatron_sb.megatron.saved_attention import ALLOW_FLAG, allow_mismatches, compare_when_loading
from megatron_sb.megatron.settings import (
    CONFIG_REQUIREMENTS,
    LATENT_REQUIREMENTS,
    ROPE_FUSION,
    SCRIPT_REQUIREMENTS,
    check_position_embedding,
    check_settings,
)

FLAG = "--stick-breaking-attention"
USAGE = f"usage: python -m megatron_sb.megatron.launch SCRIPT.py [flags of the script] [{FLAG} [--sb-...]]"
# As in settings.py: flags that bypass the command line or Megatron-Core.
LAUNCHER_REQUIREMENTS = (
    ("yaml_cfg", "--yaml-cfg", None, f"the file replaces the command line, including {FLAG}"),
    ("use_legacy_models", "--use-legacy-models", False, "legacy models have their own attention"),
)


def main() -> None:
    """Run the script named on the command line."""
    script, *flags = sys.argv[1:] or [""]
    if not script.endswith(".py") or not Path(script).is_file():
        raise SystemExit(f"{USAGE}\nSCRIPT.py must be an existing Python file, got {script!r}.")
    sys.argv = [script, *flags]
    if not getattr(sys.flags, "safe_path", False):  # with -P, Python does not add the folder of the script
        sys.path[0] = str(Path(script).resolve().parent)
    if FLAG in flags:
        _prepare(flags)
    elif ALLOW_FLAG in flags:
        # Megatron's parser does not know the flag. A script with layers of this package compares without the launcher.
        sys.argv = [script, *(flag for flag in flags if flag != ALLOW_FLAG)]
        allow_mismatches()
    else:
        compare_when_loading()
    runpy.run_path(script, run_name="__main__")


def _prepare(flags: list[str]) -> None:
    from megatron.training import arguments

    stock = arguments.add_megatron_arguments
    arguments.add_megatron_arguments = lambda parser: add_arguments(stock(parser))
    # Flags that the script itself adds, and values that it sets later, are unknown at this point.
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args, _ = parser.parse_known_args(flags)
    if args.sb_cp_comm is None and not any(flag.partition("=")[0] == "--cp-comm-type" for flag in flags):
        args.sb_cp_comm = "auto"
    options = StickBreakingOptions(**options_from_args(args))
    check_arguments(args, options)
    compare_when_loading()
    replace_core_attention(options)
    if os.environ.get("RANK", "0") == "0":
        print(f"stick-breaking attention: {options}", flush=True)


def check_arguments(args: argparse.Namespace, options: StickBreakingOptions) -> None:
    """Raise ValueError for the first of Megatron's flags that stick-breaking attention does not support.

    Every layer checks its own config again, because a checkpoint (`--use-checkpoint-args`) or the script may change it.
    """
    check_settings(args, "args", (*LAUNCHER_REQUIREMENTS, *CONFIG_REQUIREMENTS, *SCRIPT_REQUIREMENTS))
    check_position_embedding(args, "args", rope_disabled=bool(args.no_rope_freq))
    if args.attention_backend.name == "local":
        raise ValueError(
            "args.attention_backend (--attention-backend) must be 'auto' with stick-breaking attention, got 'local', "
            "which is Megatron's softmax attention."
        )
    _check_layers(args, options)
    if splits_whole_streams(args) and args.context_parallel_size > 1 and options.packing != "whole_stream":
        raise ValueError(
            "--sb-packing must be 'whole_stream' with args.dataloader_inter_document_masking=True "
            f"(--dataloader-inter-document-masking) and --context-parallel-size {args.context_parallel_size}, got "
            f"{options.packing!r}: the data loader shards packed sequences as a whole."
        )
    partition = getattr(args, "cp_partition_mode", None)
    if partition is not None and args.context_parallel_size > 1 and options.cp_layout != partition:
        raise ValueError(
            f"--sb-cp-layout must be {partition!r} with args.cp_partition_mode={partition!r} (--cp-partition-mode) and "
            f"--context-parallel-size {args.context_parallel_size}, got {options.cp_layout!r}: the data loader shards "
            "sequences in this way."
        )


def _check_layers(args: argparse.Namespace, options: StickBreakingOptions) -> None:
    """Check the flags that say which layers have which attention."""
    pattern = hybrid_pattern_of(args)
    if pattern and not set(pattern) & set(REPLACEABLE_SYMBOLS):
        raise ValueError(
            f"--hybrid-layer-pattern must contain attention layers (* or +) with {FLAG}, got {pattern!r}: no layer of "
            "this model can be stick-breaking."
        )
    if not keeps_softmax(options.layers):  # otherwise the layers check their own attention
        if args.multi_latent_attention:
            # Without RoPE, Megatron sets apply_rope_fusion to False later.
            fused = (ROPE_FUSION,) if args.position_embedding_type == "rope" else ()
            check_settings(args, "args", (*fused, *(row for row in LATENT_REQUIREMENTS if row is not ROPE_FUSION)))
        variant = getattr(args, "experimental_attention_variant", None)
        if variant not in (None, LINEAR_ATTENTION):
            raise ValueError(
                "args.experimental_attention_variant (--experimental-attention-variant) must be None or "
                f"{LINEAR_ATTENTION!r} with stick-breaking attention, got {variant!r}: --sb-layers can keep layers."
            )
    sizes = ("num_layers", *PATTERN_SETTINGS)
    if options.layers is not None and any(getattr(args, name, None) is not None for name in sizes):
        check_layers(options.layers, attention_layers_of(args), args, "args")
    if options.layers is not None and not any(options.layers):
        raise ValueError(
            f"layers (--sb-layers) must contain a 1 with {FLAG}, got {options.layers}: no layer would be "
            "stick-breaking."
        )


def replace_core_attention(options: StickBreakingOptions) -> None:
    """Patch `TransformerLayer` in this process to use stick-breaking attention, and install the stand-ins.

    Layers that become stick-breaking then raise ValueError for cross-attention, for a self-attention that is neither
    Megatron's `SelfAttention` nor its `MLASelfAttention`, and for other options in the script's own spec. Other layers
    do not change.
    """
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_sb.megatron.spec import check_built_layer, module_of, options_of, with_core_attention
    from megatron_sb.megatron.stand_ins import install_stand_ins

    install_stand_ins()
    stock = TransformerLayer.__init__

    @functools.wraps(stock)
    def init(self, config, submodules, *args, **kwargs):
        if module_of(submodules.cross_attention) is not IdentityOp and not keeps_softmax(options.layers):
            raise ValueError(
                f"cross_attention of a layer must be IdentityOp with {FLAG}, got {submodules.cross_attention!r}, which "
                "would remain softmax attention."
            )
        _check_own_options(options_of(submodules), options)
        stock(self, config, with_core_attention(submodules, options), *args, **kwargs)
        check_built_layer(self, options.layers)

    TransformerLayer.__init__ = init


def _check_own_options(own: StickBreakingOptions | None, options: StickBreakingOptions) -> None:
    """Raise ValueError for an option of a script's own spec that the flags replace.

    Args:
        own: the options of `with_stickbreaking` in the script, or None for a stock spec. Flags replace its defaults.
        options: those of the flags.
    """
    for field in dataclasses.fields(StickBreakingOptions) if own is not None else ():
        value, of_flags = getattr(own, field.name), getattr(options, field.name)
        if isinstance(value, list):
            value = tuple(value)
        if value not in (field.default, of_flags):
            raise ValueError(
                f"{field.name} of with_stickbreaking must be {of_flags!r}, the value of the launcher's flags, got "
                f"{value!r}: pass --sb-{field.name.replace('_', '-')} to the launcher, or run the script without "
                f"{FLAG}."
            )


if __name__ == "__main__":
    main()
