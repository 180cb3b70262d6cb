"""Options of stick-breaking attention in a Megatron model, and the command-line flags for them."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

from megatron_sb.megatron.layer_pattern import layer_pattern
from megatron_sb.options import COMMS, LAYOUTS, LOADER_LAYOUTS, LOGITS, PACKINGS, LayerOptions
from megatron_sb.validation import check_choice


@dataclass(frozen=True)
class StickBreakingOptions(LayerOptions):
    """Options of the stick-breaking attention in all layers of a layer spec.

    Args:
        attend_current, mass_threshold, logits, reach: see `AttentionOptions`.
        remainder_bias, head_norm, forget_gate, forget_gate_loss: see `LayerOptions`.
        scale: must be None. Megatron sets the scale of the logits: `config.softmax_scale`, or mscale^2 / sqrt(d) in
            multi-latent attention.
        cp_layout: how the data loader shards a sequence over context-parallel ranks: "zigzag", as Megatron does,
            "contiguous", or "balanced", which Megatron's loaders do not make. Default: "zigzag".
        packing: how the data loader shards a packed (thd) stream: "per_document" shards each document by `cp_layout`,
            "whole_stream" shards the stream as one sequence. Default: "per_document".
        cp_comm: how the ranks exchange keys, a mode of `context_parallel_attention`. Default: None, which is
            `config.cp_comm_type`.
        layers: one entry for each attention layer of the model: 1 for stick-breaking attention, 0 for the stock
            attention. Layers without attention have no entry. Default: None, which is 1 for every attention layer.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if a field has an unknown value or is out of range.

    Example:
        >>> from megatron_sb.megatron import StickBreakingOptions
        >>> StickBreakingOptions(head_norm=True, layers=(1, 1, 0)).layers
        (1, 1, 0)
    """

    cp_layout: str = "zigzag"
    packing: str = "per_document"
    cp_comm: str | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Validate all fields. Without context parallelism, nothing else would read some of them."""
        super().__post_init__()
        if self.scale is not None:
            raise ValueError(f"scale must be None, got {self.scale}. Set config.softmax_scale instead.")
        check_choice("cp_layout", self.cp_layout, LAYOUTS)
        check_choice("packing", self.packing, PACKINGS)
        if self.cp_comm is not None:
            check_choice("cp_comm", self.cp_comm, COMMS)
        if self.layers is not None and not isinstance(self.layers, (tuple, list)):
            raise TypeError(f"layers (--sb-layers) must be a tuple of 0 and 1, or None, got {self.layers!r}.")
        if self.layers is not None and any(entry not in (0, 1) for entry in self.layers):
            raise ValueError(
                f"layers (--sb-layers) must contain only 0 (softmax) and 1 (stick-breaking), got {self.layers}."
            )


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the stick-breaking flags to a parser. A parser that has them already does not change.

    Args:
        parser: any parser. This function can be Megatron's `extra_args_provider`.

    Returns:
        parser.

    Example:
        >>> import argparse
        >>> from megatron_sb.megatron import add_arguments
        >>> add_arguments(argparse.ArgumentParser()).parse_args(["--sb-head-norm"]).sb_head_norm
        True
    """
    if "--stick-breaking-attention" in parser._option_string_actions:  # the launcher has added them before the script
        return parser
    group = parser.add_argument_group(title="stick-breaking attention")
    group.add_argument(
        "--stick-breaking-attention",
        action="store_true",
        help="Replace softmax attention by stick-breaking attention, also in multi-latent attention, which then does "
        "not rotate q and k (default: off).",
    )
    _add_attention_flags(group)
    _add_loader_flags(group)
    group.add_argument(
        "--sb-layers",
        type=layer_pattern,
        metavar="PATTERN",
        help="Attention layers with stick-breaking attention (1) and with their stock attention (0), in the syntax of "
        '--moe-layer-freq: "([1]*3+[0]*1)*10". Layers without attention have no entry (default: 1 for every layer).',
    )
    group.add_argument(
        "--sb-allow-mismatch",
        action="store_true",
        help="Load checkpoints of models with another attention (default: off, they raise an error).",
    )
    return parser


def _add_attention_flags(group) -> None:
    """Add the flags of the options of a layer to a group of a parser."""
    group.add_argument(
        "--sb-attend-current",
        action="store_true",
        help="Let a query also attend to its own key, not only to older keys (default: off).",
    )
    group.add_argument(
        "--sb-mass-threshold",
        type=float,
        default=StickBreakingOptions.mass_threshold,
        metavar="X",
        help="Skip older keys once the mass is below X, in [0, 1). 0 disables skipping (default: %(default)s, 2**-24).",
    )
    group.add_argument(
        "--sb-remainder-bias",
        action="store_true",
        help="Add the mass, times a learnable vector for each head, to the attention's output (default: off).",
    )
    group.add_argument(
        "--sb-head-norm",
        action="store_true",
        help="Normalise the output of each head, with learnable weight and bias (default: off).",
    )
    group.add_argument(
        "--sb-logits",
        choices=LOGITS,
        default=StickBreakingOptions.logits,
        help="Kind of logits: dot products, or negative squared Euclidean distances (default: %(default)s).",
    )
    group.add_argument(
        "--sb-reach",
        nargs=2,
        type=float,
        metavar=("FIRST", "LAST"),
        help="Reach of the first and the last head, that of the others evenly between: a head with reach a starts with "
        "sticks that last for about 2**a keys. Recommended: 0.5 10 (default: 1 for all heads).",
    )
    group.add_argument(
        "--sb-forget-gate",
        action="store_true",
        help="Multiply the beta of each key by a gate computed from its hidden state (default: off).",
    )
    group.add_argument(
        "--sb-forget-gate-loss",
        type=float,
        default=StickBreakingOptions.forget_gate_loss,
        metavar="X",
        help="Add X times the mean of -log(gate) to the loss (default: %(default)s).",
    )


def _add_loader_flags(group) -> None:
    """Add the flags of context parallelism and of the data loader to a group of a parser."""
    group.add_argument(
        "--sb-cp-layout",
        choices=LOADER_LAYOUTS,
        help="How the data loader shards a sequence over context-parallel ranks (default: zigzag, or Megatron's "
        "--cp-partition-mode if it has one).",
    )
    group.add_argument(
        "--sb-packing",
        choices=PACKINGS,
        help="How the data loader shards packed sequences: each document, or the stream as a whole (default: "
        "whole_stream with --dataloader-inter-document-masking and without --sft, else per_document).",
    )
    group.add_argument(
        "--sb-cp-comm",
        choices=COMMS,
        help="How context-parallel ranks exchange keys (default: --cp-comm-type if it is given, else auto).",
    )


def splits_whole_streams(args: argparse.Namespace) -> bool:
    """Return whether Megatron's data loader shards packed sequences as one stream, by the arguments of its scripts."""
    return getattr(args, "dataloader_inter_document_masking", False) and not getattr(args, "sft", False)


def options_from_args(args: argparse.Namespace) -> dict:
    """Convert the parsed flags of `add_arguments` to keyword arguments of `with_stickbreaking`.

    Args:
        args: result of a parser that went through `add_arguments`. Without --sb-cp-layout and --sb-packing, the
            arguments for Megatron's data loader determine both values, if args has them.

    Returns:
        A dict with a value for each field of `StickBreakingOptions` except scale.

    Raises:
        ValueError: if args does not have the flags.

    Example:
        >>> import argparse
        >>> from megatron_sb.megatron import add_arguments, options_from_args
        >>> args = add_arguments(argparse.ArgumentParser()).parse_args(["--sb-head-norm"])
        >>> options_from_args(args)["head_norm"]  # pass all options as with_stickbreaking(spec, **options)
        True
    """
    names = [field.name for field in dataclasses.fields(StickBreakingOptions) if field.name != "scale"]
    missing = next((name for name in names if not hasattr(args, f"sb_{name}")), None)
    if missing is not None:
        raise ValueError(
            f"args must be the result of a parser with the flags of add_arguments, got one without sb_{missing}. Pass "
            "add_arguments to Megatron as extra_args_provider."
        )
    options = {name: getattr(args, f"sb_{name}") for name in names}
    options["reach"] = None if options["reach"] is None else tuple(options["reach"])
    if options["cp_layout"] is None:
        options["cp_layout"] = getattr(args, "cp_partition_mode", None) or StickBreakingOptions.cp_layout
    if options["packing"] is None:
        options["packing"] = "whole_stream" if splits_whole_streams(args) else StickBreakingOptions.packing
    return options
