"""Old module names, kept for one release. Importing one warns, and gives the module that has the new name."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from types import ModuleType

MOVED = {
    "megatron_sb.config": "megatron_sb.training.config",
    "megatron_sb.context_parallel": "megatron_sb.ops.context_parallel",
    "megatron_sb.convert": "megatron_sb.checkpoints",
    "megatron_sb.functional": "megatron_sb.ops",
    "megatron_sb.gates": "megatron_sb.nn.gates",
    "megatron_sb.geometric": "megatron_sb.baselines.geometric",
    "megatron_sb.kvcache": "megatron_sb.ops.kvcache",
    "megatron_sb.modules": "megatron_sb.nn",
    "megatron_sb.softmax": "megatron_sb.baselines.softmax",
    "megatron_sb.training.recall": "megatron_sb.experiments.recall",
    "megatron_sb.training.ruler": "megatron_sb.experiments.ruler",
}
TOP_LEVEL = tuple(name.removeprefix("megatron_sb.") for name in MOVED if name.count(".") == 1)


def _new_name(name: str) -> str | None:
    package = next((old for old in MOVED if name == old or name.startswith(f"{old}.")), None)
    return MOVED[package] + name.removeprefix(package) if package else None


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is deprecated; import {new} instead.", DeprecationWarning, stacklevel=stacklevel + 1)


def attribute(name: str) -> ModuleType:
    """Return the module for `megatron_sb.name`, one of TOP_LEVEL. The warning names the line that reads the attribute.

    It must be called by the package's `__getattr__`. Python shows a warning by default only if it names a line of the
    user's script.
    """
    old = f"megatron_sb.{name}"
    _warn(old, MOVED[old], stacklevel=3)
    return importlib.import_module(MOVED[old])


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find the old names in MOVED, and the old names of modules inside a moved package."""

    def find_spec(self, fullname, path=None, target=None):
        """Return a spec for an old name. Return None for any other name."""
        return importlib.machinery.ModuleSpec(fullname, self) if _new_name(fullname) else None

    def exec_module(self, module):
        """Import the module that has the new name, and make the old name in sys.modules refer to it."""
        new = _new_name(module.__name__)
        _warn(module.__name__, new, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)


def install() -> None:
    """Make old names importable.

    The finder must be the first one: Python's own finders would load the files of a moved package a second time.
    """
    sys.meta_path.insert(0, _MovedModules())
