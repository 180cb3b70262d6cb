"""Checks of arguments, shared by functions and modules."""

import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}; a torch.Tensor is allowed")


def check_number(
    name: str, value: object, allowed: str = "a number", fits: Callable[[float], bool] | None = None
) -> None:
    """fits, which number is allowed, is only for what torch.compile does not trace: it would settle a symbol's value.

    A tensor is no number: the operators would take its value and give it no gradient.
    """
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} is {type(value).__name__}; {allowed} is allowed")
    if fits is not None and not fits(value):
        raise ValueError(f"{name} is {value}; {allowed} is allowed")


def check_finite(name: str, value: object) -> None:
    check_number(name, value, "a finite number", math.isfinite)


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {type(value).__name__}; True or False is allowed")


def check_counts(sizes: dict[str, object]) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; an int of 1 or more is allowed")


def head_dim_of(hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size is {hidden_size}; without head_dim a multiple of num_heads, {num_heads}, is allowed"
        )
    return hidden_size // num_heads if head_dim is None else head_dim
