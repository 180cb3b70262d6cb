"""Versions of torch. What depends on the version of the installed torch is decided with these functions only."""

import importlib
import re
from typing import Any

import torch


def major_minor(version: str) -> tuple[int, int]:
    """Return the major and minor number of a release, a pre-release or a vendor's build of torch.

    Raises:
        ValueError: If the version does not begin with two numbers.

    Example:
        >>> major_minor("2.9.0a0+git-nv25.09")
        (2, 9)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise ValueError(f"A version of torch must begin with two numbers, such as 2.11, got {version}.")
    return int(numbers[1]), int(numbers[2])


def from_torch(module: str, name: str, since: str) -> Any:
    """Import a function or class that older versions of torch lack, or whose arguments changed.

    Args:
        module: module of torch.
        name: name of the function or class.
        since: first version of torch that has it as it is used here.

    Raises:
        ImportError: If the installed torch is older.
    """
    if major_minor(torch.__version__) < major_minor(since):
        raise ImportError(
            f"This call needs {name} of {module}, which torch {since} and later have, but torch {torch.__version__} is "
            "installed. Install a newer torch, then build megatron_sb again."
        )
    return getattr(importlib.import_module(module), name)
