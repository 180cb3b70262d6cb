"""Options of stick-breaking attention in a Megatron model, and the command-line flags that set them."""

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
    """What a model may choose about its stick-breaking attention. The same for every layer of one layer spec.

    Attributes:
        attend_current: a query also attends to its own key (ModuleFormer eq. 4); by default only to older ones.
        mass_threshold: once less than this is left of a row's stick, older keys are skipped; 0 turns skipping off.
        remainder_bias: what is left of the stick carries a learnable vector per head into the output (paper eq. 14).
        head_norm: group norm behind that, one group per head, with a learnable weight and bias.
        logits: "dot", or "euclidean": minus the squared distance of query and key, at scale 1 (NU-CS-2024-15).
        forget_gate: a gate of each key and KV head, made from the key's hidden state, multiplies its beta.
        forget_gate_loss: coefficient of the auxiliary loss mean(-log f), which keeps gates open unless closing them
            pays.
        cp_layout: how context parallelism cuts a sequence, "zigzag" (Megatron's) or "contiguous".
        packing: how it cuts a packed (thd) stream, "per_document" (each document by `cp_layout`) or "whole_stream".
        layers: 1 for a layer with stick-breaking attention, 0 for one that keeps its softmax, an entry for every layer
            of the model; None means every layer.

    Raises:
        ValueError: an unknown layout, packing or kind of logits; a forget_gate_loss below 0 or without gates; an entry
            of `layers` that is neither 0 nor 1.
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
        """Refuse unknown names now: without context parallelism nothing else would read them."""
        for name, allowed in (("cp_layout", CP_LAYOUTS), ("packing", PACKINGS), ("logits", LOGITS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, allowed))}")
        if self.forget_gate_loss < 0 or (self.forget_gate_loss > 0 and not self.forget_gate):
            raise ValueError(
                f"forget_gate_loss={self.forget_gate_loss} (--sb-forget-gate-loss) with forget_gate={self.forget_gate} "
                "(--sb-forget-gate); allowed: 0, or with gates more"
            )
        if self.layers is not None and not {*self.layers} <= {0, 1}:
            raise ValueError(f"layers={self.layers} (--sb-layers) may hold 0 (softmax) and 1 (stick-breaking) only")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the stick-breaking flags to `parser` and return it (the shape of Megatron's `extra_args_provider`)."""
    group = parser.add_argument_group(title="stick-breaking attention")
    group.add_argument(
        "--stick-breaking-attention",
        action="store_true",
        help="Replace softmax attention by stick-breaking attention in every layer.",
    )
    group.add_argument(
        "--sb-attend-current",
        action="store_true",
        help="Let a query attend to its own key too, not only to older ones.",
    )
    group.add_argument(
        "--sb-mass-threshold",
        type=float,
        default=DEFAULT_MASS_THRESHOLD,
        metavar="X",
        help="Skip older keys once less than X is left of the stick; 0 skips nothing (default: 2^-24).",
    )
    group.add_argument(
        "--sb-remainder-bias",
        action="store_true",
        help="Add what is left of the stick, times a learnable vector per head, to the attention's output.",
    )
    group.add_argument(
        "--sb-head-norm",
        action="store_true",
        help="Normalise each head's output (group norm, one group per head), with a learnable weight and bias.",
    )
    group.add_argument(
        "--sb-logits",
        choices=LOGITS,
        default=StickBreakingOptions.logits,
        help="Logits are dot products, or minus squared Euclidean distances (default: %(default)s).",
    )
    group.add_argument(
        "--sb-forget-gate",
        action="store_true",
        help="Multiply each key's beta by a gate made from the key's hidden state, one for each KV head.",
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
        help="How the data loader cuts a sequence over context-parallel ranks (default: %(default)s).",
    )
    group.add_argument(
        "--sb-packing",
        choices=PACKINGS,
        default=StickBreakingOptions.packing,
        help="Whether it cuts packed sequences document by document or the stream as a whole (default: %(default)s).",
    )
    group.add_argument(
        "--sb-layers",
        type=layer_pattern,
        metavar="PATTERN",
        help="Which layers are stick-breaking (1) and which keep their softmax (0), as in --moe-layer-freq: "
        '"([1]*3+[0]*1)*10" (default: all are).',
    )
    return parser


def options_from_args(args: argparse.Namespace) -> dict:
    """Keywords for `with_stickbreaking` from the parsed flags of `add_arguments`."""
    return {field.name: getattr(args, f"sb_{field.name}") for field in dataclasses.fields(StickBreakingOptions)}
