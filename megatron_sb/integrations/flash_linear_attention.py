"""Run the stick-breaking models of flash-linear-attention (package `fla`) on this library's kernels.

The layer and the models of `fla` compute stick-breaking attention with the function `parallel_stickbreaking_attn`.
`install` replaces it by `megatron_sb.compat.parallel_stickbreaking_attn`, which has the same interface.
"""

import functools
import importlib
import os
import sys
from types import ModuleType

from megatron_sb.compat import parallel_stickbreaking_attn

_OPERATION, _NAME = "fla.ops.stickbreaking_attn", "parallel_stickbreaking_attn"
_LAYER = "fla.layers.stickbreaking_attn"  # loaded first, so that it gets the function too


class _State:
    active = False  # whether the backend of `_backend` accepts calls
    replaced: tuple[ModuleType, ...] = ()  # modules that have our function in place of `theirs`
    theirs = None


def install() -> None:
    """Compute the stick-breaking attention of flash-linear-attention with this library, in this process.

    If the installed release can dispatch the function to backends, this library becomes the first backend. Otherwise,
    this library's function replaces the original function in each imported module of `fla`, and modules that are
    imported later import the replaced function. A second call changes nothing. `uninstall` restores the original
    functions.

    Raises:
        ModuleNotFoundError: flash-linear-attention is not installed, or has no stick-breaking attention.

    Example:
        >>> from megatron_sb.integrations import flash_linear_attention
        >>> flash_linear_attention.install()  # doctest: +SKIP
    """
    if _State.active or _State.replaced:
        return
    try:
        operation = importlib.import_module(_OPERATION)
        importlib.import_module(_LAYER)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "flash-linear-attention with stick-breaking attention (0.6.0 or later) is needed, and "
            f"{error.name or _OPERATION} is missing: pip install flash-linear-attention",
            name=error.name,
        ) from error
    _State.theirs = getattr(operation, _NAME)
    if _register(_State.theirs):
        _State.active = True
        return
    found = [module for name, module in sys.modules.items() if name.partition(".")[0] == "fla"]
    _State.replaced = tuple(module for module in found if vars(module).get(_NAME) is _State.theirs)
    for module in _State.replaced:
        setattr(module, _NAME, parallel_stickbreaking_attn)


def uninstall() -> None:
    """Give flash-linear-attention its own function back, in the modules that `install` changed."""
    _State.active = False
    for module in _State.replaced:
        setattr(module, _NAME, _State.theirs)
    _State.replaced = ()


def _register(entry_point) -> bool:
    """Register this library as a backend of a function. Return whether the function dispatches to backends."""
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return False
    try:
        register = importlib.import_module("fla.backends").register
        register(entry_point, backend=_backend())(parallel_stickbreaking_attn)
    except (ModuleNotFoundError, KeyError):  # an older release, or a function that does not dispatch
        return False
    return True


@functools.cache
def _backend() -> type:
    """Return the class that describes this library to flash-linear-attention."""
    base = importlib.import_module("fla.backends").BaseBackend

    class Backend(base):
        backend_type = "megatron_sb"
        priority = -1  # before the package's own backends

        def is_enabled(self) -> bool:
            return _State.active

    return Backend
