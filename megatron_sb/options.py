"""The options of stick-breaking attention: their names, defaults and valid values.

Functions, modules and integrations take their options from the classes here, so that an option is named, given a
default and validated in one place. This module does not import torch, so that a trainer's configuration can be read
without it. For the same reason it is not part of `megatron_sb.ops`: importing any module of that package loads torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_sb.validation import check_choice, check_finite, check_flag, check_number, python_number

DEFAULT_MASS_THRESHOLD = 2.0**-24
LOGITS = ("dot", "euclidean")
LAYOUTS = ("zigzag", "contiguous", "balanced")
LOADER_LAYOUTS = LAYOUTS[:2]  # that Megatron's data loaders make; every mode supports them
PACKINGS = ("per_document", "whole_stream")
COMMS = ("auto", "p2p", "all_gather", "a2a", "a2a+p2p")

# Limits of the kernels.
HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 256
MIN_REACH, MAX_REACH = 1 / 64, 64
_MULTIPLES_OF_REACH = 2**18  # the reach of a head is a multiple of 2^-18
MAX_HEAD_DIM_EUCLIDEAN = 248  # Euclidean logits take 8 more columns of q and k.


def check_head_dim(name: str, head_dim: int, *, extra_columns: bool = False) -> None:
    """Raise ValueError unless the kernels support a head_dim. extra_columns: with Euclidean logits or with biases.

    Example:
        >>> from megatron_sb.options import check_head_dim
        >>> check_head_dim("head_dim", 256, extra_columns=True)
        Traceback (most recent call last):
            ...
        ValueError: head_dim must be a multiple of 8 and at most 248 with Euclidean logits or biases, got 256.
    """
    if problem := head_dim_problem(name, head_dim, extra_columns=extra_columns):
        raise ValueError(f"{problem}.")


def head_dim_problem(name: str, head_dim: int, *, extra_columns: bool = False) -> str | None:
    """Return why the kernels do not support a head_dim, or None. See `check_head_dim`."""
    limit, why = (MAX_HEAD_DIM_EUCLIDEAN, " with Euclidean logits or biases") if extra_columns else (MAX_HEAD_DIM, "")
    if head_dim % HEAD_DIM_MULTIPLE == 0 and 0 < head_dim <= limit:
        return None
    return f"{name} must be a multiple of {HEAD_DIM_MULTIPLE} and at most {limit}{why}, got {head_dim}"


def check_option_types(scale: object, attend_current: object, mass_threshold: object, reach: object) -> None:
    """Raise TypeError for a wrong type. Other code checks the values: `AttentionOptions`, or a collective operator."""
    if scale is not None:
        check_number("scale", scale)
    check_flag("attend_current", attend_current)
    check_number("mass_threshold", mass_threshold)
    if reach is not None:
        if not isinstance(reach, (tuple, list)):
            raise TypeError(f"reach must be two numbers or None, got {type(reach).__name__}.")
        for number in reach:
            check_number("reach", number)


def check_reach(reach: tuple[float, float]) -> None:
    """Raise ValueError unless the reach of the first and of the last head can be used. Their types are numbers."""
    if len(reach) != 2 or not all(MIN_REACH <= a <= MAX_REACH for a in reach):
        raise ValueError(
            f"reach must be two numbers from {MIN_REACH} to {MAX_REACH}, of the first and the last head, got {reach}."
        )


def reach_and_step(reach: tuple[float, float], num_heads: int) -> tuple[float, float]:
    """Return the reach of the first head, and by how much that of a head differs from that of the head before it.

    Both are multiples of 2^-18, which are exact in fp32 up to 64. So a head has the same reach, bit for bit, in a call
    with only some of the heads. The operators compute the reach in the same way. The step is rounded towards 0, so that
    the last head stays within the bounds.

    Example:
        >>> from megatron_sb.options import reach_and_step
        >>> reach_and_step((1.0, 8.0), 8)
        (1.0, 1.0)
    """
    first = round(reach[0] * _MULTIPLES_OF_REACH) / _MULTIPLES_OF_REACH
    step = (reach[1] - first) / (num_heads - 1) if num_heads > 1 else 0.0
    return first, math.trunc(step * _MULTIPLES_OF_REACH) / _MULTIPLES_OF_REACH


def reach_of_heads(
    reach: tuple[float, float] | None, num_heads: int, first: int, end: int
) -> tuple[float, float] | None:
    """Return the reach of the heads first to end - 1 of num_heads heads, for a call with these heads alone.

    Raises:
        ValueError: If reach is not two numbers from 1/64 to 64.

    Example:
        >>> from megatron_sb.options import reach_of_heads
        >>> reach_of_heads((1.0, 8.0), 8, 4, 8)  # of the second of two tensor-parallel ranks
        (5.0, 8.0)
    """
    if reach is None:
        return None
    check_reach(reach)
    of_first, step = reach_and_step(reach, num_heads)
    return of_first + first * step, of_first + (end - 1) * step


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one call of the attention.

    A configuration with more fields derives from this class, calls `super().__post_init__()`, and passes
    `attention_options()` to the attention functions. An argument parser takes its defaults from the fields, for
    example `AttentionOptions.mass_threshold`.

    Args:
        scale: factor of the logits, a finite number. Default: 1 / sqrt(head_dim), and 1 for Euclidean logits.
        attend_current: whether a query also attends to the key at its own position. Default: False, older keys only.
        mass_threshold: number in [0, 1). Once the mass of every row of Q in a tile is below this number, older keys are
            skipped. This changes an output by at most mass_threshold * max |v|. 0 disables skipping. Default: 2^-24.
        logits: "dot" for z_ij = scale * q_j . k_i, or "euclidean" for z_ij = -scale * |q_j - k_i|^2 (NU-CS-2024-15).
            Default: "dot".
        reach: the reach of the first and of the last head, two numbers from 1/64 to 64. The values of the other heads
            are evenly spaced between them, rounded to multiples of 2^-18. A head with reach a adds an offset to its
            logits: beta is 2^-a if z_ij without the offset is 0, so the stick lasts for about 2^a keys. Default: None,
            no offset, which is a reach of 1.

    Raises:
        TypeError: If scale, mass_threshold or reach is not numeric, or attend_current is not a bool.
        ValueError: If scale is not finite, mass_threshold is not in [0, 1), logits is unknown, or reach is not two
            numbers from 1/64 to 64.

    Example:
        >>> from megatron_sb.options import AttentionOptions
        >>> AttentionOptions(mass_threshold=0.0).attention_options()
        {'scale': None, 'attend_current': False, 'mass_threshold': 0.0, 'logits': 'dot', 'reach': None}
        >>> AttentionOptions(mass_threshold=2)
        Traceback (most recent call last):
            ...
        ValueError: mass_threshold must be in [0, 1), got 2. Use 0 to disable skipping.
    """

    scale: float | None = None
    attend_current: bool = False
    mass_threshold: float = DEFAULT_MASS_THRESHOLD
    logits: str = "dot"
    reach: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_option_types(self.scale, self.attend_current, self.mass_threshold, self.reach)
        if self.scale is not None:
            check_finite("scale", self.scale)
        if not 0 <= self.mass_threshold < 1:
            raise ValueError(f"mass_threshold must be in [0, 1), got {self.mass_threshold}. Use 0 to disable skipping.")
        check_choice("logits", self.logits, LOGITS)
        if self.reach is not None:
            check_reach(self.reach)
            if any(python_number(number) is not number for number in self.reach):
                object.__setattr__(self, "reach", tuple(map(python_number, self.reach)))
        self._keep_python_number("scale")
        self._keep_python_number("mass_threshold")

    def _keep_python_number(self, name: str) -> None:
        """Replace a number of numpy in a field. JSON and checkpoints do not store it, torch.compile traces an array."""
        value = getattr(self, name)
        if (number := python_number(value)) is not value:
            object.__setattr__(self, name, number)

    def attention_options(self) -> dict[str, object]:
        """Return the fields of `AttentionOptions` as keywords for the attention functions."""
        return {
            "scale": self.scale,
            "attend_current": self.attend_current,
            "mass_threshold": self.mass_threshold,
            "logits": self.logits,
            "reach": self.reach,
        }


@dataclass(frozen=True)
class LayerOptions(AttentionOptions):
    """Options of an attention layer: the options of the attention, and the learnable parts around it.

    Args:
        scale, attend_current, mass_threshold, logits, reach: see `AttentionOptions`.
        remainder_bias: whether the mass times a learnable vector for each head is added to the output (paper eq. 14).
            Default: False.
        head_norm: whether each head's output is normalised: group norm with one group for each head, a learnable
            weight and bias. Default: False.
        forget_gate: whether a gate for each key and KV head, computed from the key's hidden state, multiplies its beta.
            Default: False.
        forget_gate_loss: coefficient of the auxiliary loss mean(-log f), which pushes gates towards open. 0 or more;
            above 0 only with forget_gate. Default: 0.0.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If a field has an invalid value.

    Example:
        >>> from megatron_sb.options import LayerOptions
        >>> LayerOptions(forget_gate=True, forget_gate_loss=0.01).forget_gate_loss
        0.01
    """

    remainder_bias: bool = False
    head_norm: bool = False
    forget_gate: bool = False
    forget_gate_loss: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("remainder_bias", "head_norm", "forget_gate"):
            check_flag(name, getattr(self, name))
        check_finite("forget_gate_loss", self.forget_gate_loss)
        self._keep_python_number("forget_gate_loss")
        if self.forget_gate_loss < 0:
            raise ValueError(f"forget_gate_loss must be at least 0, got {self.forget_gate_loss}.")
        if self.forget_gate_loss > 0 and not self.forget_gate:
            raise ValueError(
                f"forget_gate_loss must be 0 without forget_gate, got {self.forget_gate_loss}. Set forget_gate=True."
            )
