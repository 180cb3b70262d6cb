"""Options of stick-breaking attention in a Megatron model, and the command-line flags for them."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

from megatron_sb.megatron.layer_pattern import layer_pattern
from megatron_sb.options import DEFAULT_MASS_THRESHOLD, LOGITS

CP_LAYOUTS = ("zigzag", "contiguous")
PACKINGS = ("per_document", "whole_stream")


@dataclass(frozen=True)
class StickBreakingOptions:
    """Options of the stick-breaking attention in all layers of a layer spec.

    Args:
        attend_current: a query also attends to its own key (ModuleFormer eq. 4). Default False: only to older keys.
        mass_threshold: older keys are skipped once the mass of a row is below this, in [0, 1). 0 disables skipping.
            Default 2**-24.
        remainder_bias: add the mass, times a learnable vector for each head, to the output (paper eq. 14). Default
            False.
        head_norm: apply a group norm to that sum, one group for each head, with learnable weight and bias. Default
            False.
        logits: "dot", or "euclidean": minus the squared distance of query and key, with scale 1 (NU-CS-2024-15).
            Default "dot".
        forget_gate: multiply the beta of each key by a gate, computed from the key's hidden state for each KV head.
            Default False.
        forget_gate_loss: coefficient of the auxiliary loss mean(-log f), which penalises closed gates. Default 0.
        cp_layout: how the data loader shards a sequence over context-parallel ranks: "zigzag", as Megatron does, or
            "contiguous". Default "zigzag".
        packing: how it shards a packed (thd) stream: "per_document", each document by `cp_layout`, or "whole_stream".
            Default "per_document".
        layers: an entry for every layer of the model: 1 for stick-breaking attention, 0 for the stock softmax
            attention. Default None: 1 for every layer.

    Raises:
        ValueError: if a value is unknown or out of range, or forget_gate_loss is set without forget_gate.

    Example:
        >>> StickBreakingOptions(head_norm=True, layers=(1, 1, 0)).layers
        (1, 1, 0)
    """

    attend_current: bool = False
    mass_threshold: float = DEFAULT_MASS_THRESHOLD
    remainder_bias: bool = False
    head_norm: bool = False
    logits: str = "dot"
    forget_gate: bool = False
    forget_gate_loss: float = 0.0
    cp_layout: str = "zigzag"
    packing: str = "per_document"
    layers: tuple[int, ...] | None = None

    def __post_init__(self):
        """Validate now: without context parallelism nothing else reads some of the fields."""
        for name, choices in (("cp_layout", CP_LAYOUTS), ("packing", PACKINGS), ("logits", LOGITS)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        if self.forget_gate_loss < 0 or (self.forget_gate_loss > 0 and not self.forget_gate):
            raise ValueError(
                "forget_gate_loss (--sb-forget-gate-loss) must be 0, or above 0 with forget_gate=True "
                f"(--sb-forget-gate), got {self.forget_gate_loss} with forget_gate={self.forget_gate}."
            )
        if self.layers is not None and not {*self.layers} <= {0, 1}:
            raise ValueError(
                f"layers (--sb-layers) must contain only 0 (softmax) and 1 (stick-breaking), got {self.layers}."
            )


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the stick-breaking flags to a parser.

    Args:
        parser: any parser. The signature is that of Megatron's `extra_args_provider`.

    Returns:
        parser.

    Example:
        >>> args = add_arguments(argparse.ArgumentParser()).parse_args(["--sb-head-norm"])
        >>> options_from_args(args)["head_norm"]
        True
    """
    group = parser.add_argument_group(title="stick-breaking attention")
    group.add_argument(
        "--stick-breaking-attention",
        action="store_true",
        help="Replace softmax attention by stick-breaking attention (default: off).",
    )
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
        help="Logits: dot products, or negative squared Euclidean distances (default: %(default)s).",
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
    group.add_argument(
        "--sb-cp-layout",
        choices=CP_LAYOUTS,
        default=StickBreakingOptions.cp_layout,
        help="How the data loader shards a sequence over context-parallel ranks (default: %(default)s).",
    )
    group.add_argument(
        "--sb-packing",
        choices=PACKINGS,
        default=StickBreakingOptions.packing,
        help="Whether it shards packed sequences by document or the stream as a whole (default: %(default)s).",
    )
    group.add_argument(
        "--sb-layers",
        type=layer_pattern,
        metavar="PATTERN",
        help="Layers with stick-breaking attention (1) and with softmax attention (0), in the syntax of "
        '--moe-layer-freq: "([1]*3+[0]*1)*10" (default: 1 for every layer).',
    )
    return parser


def options_from_args(args: argparse.Namespace) -> dict:
    """Convert the parsed flags of `add_arguments` to keyword arguments of `with_stickbreaking`.

    Args:
        args: result of a parser that went through `add_arguments`.

    Returns:
        A dict with a value for each field of `StickBreakingOptions`.

    Example:
        >>> spec = with_stickbreaking(get_gpt_layer_local_spec(), **options_from_args(args))
    """
    return {field.name: getattr(args, f"sb_{field.name}") for field in dataclasses.fields(StickBreakingOptions)}
