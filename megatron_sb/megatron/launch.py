"""Runs a Megatron training script as it is, with stick-breaking attention: one flag more on its command line.

    torchrun ... -m megatron_sb.megatron.launch pretrain_gpt.py <Megatron's flags> --stick-breaking-attention [--sb-...]

Without `--stick-breaking-attention` the script runs as `python pretrain_gpt.py ...` would run it, and nothing of
Megatron is touched. With it, before the script starts:

- The `--sb-*` flags (see arguments.py) join Megatron's parser: `add_megatron_arguments`, which every script's parser
  goes through.
- What the command line asks for and stick-breaking attention cannot honour is refused.
- `TransformerLayer` puts stick-breaking attention into the submodules it is given. This is the one place that every
  attention layer comes by, whoever made its spec: dense or mixture of experts, local or Transformer Engine, stages of a
  virtual pipeline, multi-token prediction, hybrid models. What has no attention there is left alone.
- `stand_ins.install_stand_ins`, for what plain Megatron-Core lacks.

Only modules that do without Megatron-Core are imported at the top: the script's own folder comes first in `sys.path`,
as under `python`, and decides which Megatron is meant.
"""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
from pathlib import Path

from megatron_sb.megatron.arguments import StickBreakingOptions, add_arguments, options_from_args

FLAG = "--stick-breaking-attention"
USAGE = f"usage: python -m megatron_sb.megatron.launch SCRIPT.py [flags of the script] [{FLAG} [--sb-...]]"
# As in core_attention.py: flags that make a script go round its own command line or Megatron-Core.
LAUNCHER_REFUSALS = (
    ("yaml_cfg", "--yaml-cfg", None, f"the file takes the place of the command line and of {FLAG} with it"),
    ("use_legacy_models", "--use-legacy-models", False, "legacy models have an attention of their own"),
)


def main() -> None:
    """Run the script that the command line names."""
    script, *flags = sys.argv[1:] or [""]
    if not script.endswith(".py") or not Path(script).is_file():
        raise SystemExit(f"{USAGE}\nSCRIPT.py={script!r} is not a Python file")
    sys.argv = [script, *flags]
    if not getattr(sys.flags, "safe_path", False):  # with -P python puts no folder there
        sys.path[0] = str(Path(script).resolve().parent)
    if FLAG in flags:
        _prepare(flags)
    runpy.run_path(script, run_name="__main__")


def _prepare(flags: list[str]) -> None:
    from megatron.training import arguments

    stock = arguments.add_megatron_arguments
    arguments.add_megatron_arguments = lambda parser: add_arguments(stock(parser))
    # The script's own flags are unknown here, as are the values it will set later.
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args, _ = parser.parse_known_args(flags)
    options = StickBreakingOptions(**options_from_args(args))
    refuse_arguments(args, options)
    replace_core_attention(options)
    if os.environ.get("RANK", "0") == "0":
        print(f"stick-breaking attention: {options}", flush=True)


def refuse_arguments(args: argparse.Namespace, options: StickBreakingOptions) -> None:
    """Raise a ValueError for the first of Megatron's flags that stick-breaking attention cannot honour.

    Every layer checks its own config again: a checkpoint (`--use-checkpoint-args`) or the script may change a value.
    """
    from megatron_sb.megatron.core_attention import (
        CONFIG_REFUSALS,
        SCRIPT_REFUSALS,
        refuse_position_embedding,
        refuse_settings,
    )
    from megatron_sb.megatron.spec import refuse_layers

    refuse_settings(args, "args", (*LAUNCHER_REFUSALS, *CONFIG_REFUSALS, *SCRIPT_REFUSALS))
    refuse_position_embedding(args, "args", no_rope=bool(args.no_rope_freq))
    if args.attention_backend.name == "local":
        raise ValueError(
            "stick-breaking attention cannot run with args.attention_backend='local' (--attention-backend): that is "
            "Megatron's own softmax attention; it must be 'auto'"
        )
    if args.num_layers is not None:
        refuse_layers(options.layers, args, "args")
    cut_as_whole = getattr(args, "dataloader_inter_document_masking", False) and not args.sft
    if cut_as_whole and args.context_parallel_size > 1 and options.packing != "whole_stream":
        raise ValueError(
            "args.dataloader_inter_document_masking=True (--dataloader-inter-document-masking) with "
            f"--context-parallel-size {args.context_parallel_size} cuts packed sequences as a whole; --sb-packing must "
            f"be 'whole_stream', not {options.packing!r}"
        )


def replace_core_attention(options: StickBreakingOptions) -> None:
    """Let every `TransformerLayer` of this process have stick-breaking attention, and install the stand-ins.

    Layers raise a ValueError for cross-attention and for a self-attention that is not Megatron's `SelfAttention`.
    """
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_sb.megatron.spec import with_core_attention
    from megatron_sb.megatron.stand_ins import install_stand_ins

    install_stand_ins()
    stock = TransformerLayer.__init__

    @functools.wraps(stock)
    def init(self, config, submodules, *args, **kwargs):
        if submodules.cross_attention is not IdentityOp:
            raise ValueError(
                f"cross_attention of a layer is {submodules.cross_attention!r}: {FLAG} has self-attention only, and it "
                "would stay softmax; it must be IdentityOp"
            )
        if submodules.self_attention is not IdentityOp:
            submodules = with_core_attention(submodules, options)
        stock(self, config, submodules, *args, **kwargs)

    TransformerLayer.__init__ = init


if __name__ == "__main__":
    main()
