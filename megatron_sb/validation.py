"""Checks of arguments. Every message has the form "<argument> must be <expected>, got <value>."

This module does not import torch, because options are validated without it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

# torch.compile and torch.export pass these in place of numbers; they are not registered as numbers.Real.
_SYMBOLIC_NUMBERS = ("SymInt", "SymFloat")


class InputError(ValueError):
    """What the user gave cannot be used. `megatron-sb` prints the message without a traceback."""


class MissingFileError(InputError, FileNotFoundError):
    """A file or folder that the user named does not exist."""


def is_of_user(error: BaseException) -> bool:
    """Return whether an error is one of the user's files or settings, and not a defect of the program."""
    return isinstance(error, InputError) or (isinstance(error, OSError) and error.filename is not None)


def message_of(error: Exception) -> str:
    """Return the message of an error. That of the file system becomes "FILE: reason", without its number.

    Example:
        >>> from megatron_sb.validation import message_of
        >>> message_of(FileNotFoundError(2, "No such file or directory", "train.yaml"))
        'train.yaml: No such file or directory'
    """
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ValueError if it holds no JSON or another value than an object.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from megatron_sb.validation import read_json_object
        >>> path = Path(tempfile.mkdtemp()) / "config.json"
        >>> path.write_text('{"hidden_size": 64}')
        19
        >>> read_json_object(path)
        {'hidden_size': 64}
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold a JSON object, got {type(found).__name__}.")
    return found


def finite(value: Any) -> Any:
    """Return what JSON can hold of a value: None in place of each number that is not finite, in every list and mapping.

    Example:
        >>> from megatron_sb.validation import finite
        >>> finite({"nll": [0.5, float("nan")]})
        {'nll': [0.5, None]}
    """
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_output_folder(name: str, folder: str | Path) -> None:
    """Raise ValueError unless the folder can be written, or created. name: of the argument."""
    if folder == "":  # as of a shell's variable that is not set; Path("") is the current folder
        raise InputError(f"{name} must be a folder, got ''.")
    folder = Path(folder)
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise InputError(f"{name} must be a folder, got {str(folder)!r}, but {place} is a file.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{name} must be a folder that can be written, got {str(folder)!r}, but {place} cannot.")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an error of the file system. Errors of writing, as with a full disk, do not have it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError unless value is a torch.Tensor, and neither nested, sparse nor quantized."""
    from torch import Tensor, strided

    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}.")
    if value.is_nested or value.layout is not strided or value.is_quantized:
        got = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        got = "a quantized tensor" if value.is_quantized else got
        raise TypeError(f"{name} must be a dense tensor, with layout torch.strided, got {got}.")


def check_optional_tensors(values: dict[str, object]) -> None:
    """Raise TypeError for a value that is neither None nor a tensor. values: name -> value."""
    for name, value in values.items():
        if value is not None:
            check_tensor(name, value)


def check_number(
    name: str, value: object, expected: str = "a number", fits: Callable[[float], bool] | None = None
) -> None:
    """Raise TypeError unless value is a number, and ValueError if fits(value) is False.

    A tensor is not accepted as a number: an operator would read its value and give it no gradient.

    Example:
        >>> from megatron_sb.validation import check_number
        >>> check_number("eps", -1.0, "a number of at least 0", lambda x: x >= 0)
        Traceback (most recent call last):
            ...
        ValueError: eps must be a number of at least 0, got -1.0.
    """
    if isinstance(value, bool) or not (isinstance(value, Real) or type(value).__name__ in _SYMBOLIC_NUMBERS):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}.")
    if fits is not None and not fits(value):
        raise ValueError(f"{name} must be {expected}, got {value}.")


def check_finite(name: str, value: object) -> None:
    """Raise TypeError unless value is a number, and ValueError unless it is finite."""
    check_number(name, value, "a finite number", _is_finite)


def _is_finite(value: float) -> bool:
    # math.isfinite would specialise a symbolic number. Comparisons only add guards. Ints may be larger than any float.
    largest = sys.float_info.max
    if not isinstance(value, (int, float)) and hasattr(value, "item"):
        value = value.item()  # numpy would convert `largest` to the type of the value, to inf in float32
    return -largest <= value <= largest


def check_integer(name: str, value: object) -> None:
    """Raise TypeError unless value is an int, or an integer of numpy."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}.")


def python_number(value: Any) -> Any:
    """Return a number of numpy as the Python number of the same kind, and any other value as it is.

    Example:
        >>> import numpy as np
        >>> from megatron_sb.validation import python_number
        >>> python_number(np.int64(3)), python_number(0.5), python_number(None)
        (3, 0.5, None)
    """
    return value.item() if type(value).__module__ == "numpy" and isinstance(value, Real) else value


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless value is a bool."""
    if not isinstance(value, bool):
        kind = type(value)
        got = f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__  # there is a numpy.bool
        raise TypeError(f"{name} must be True or False, got {got}.")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless value is one of the choices."""
    if not (value is None or isinstance(value, str)) or value not in choices:  # an array cannot be compared
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_counts(sizes: dict[str, object]) -> None:
    """Raise ValueError unless every value is an int of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")


def head_dim_of(hidden_size: int, num_heads: int, head_dim: int | None, heads_name: str = "num_heads") -> int:
    """Return head_dim. Default: hidden_size / num_heads. Raise ValueError if the default is not an integer.

    heads_name: name of num_heads in the message.

    Example:
        >>> from megatron_sb.validation import head_dim_of
        >>> head_dim_of(256, 8, None)
        32
    """
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size must be a multiple of {heads_name}, {num_heads}, got {hidden_size}. Or set head_dim."
        )
    return hidden_size // num_heads if head_dim is None else head_dim
