"""Old module names, kept for one release: importing one warns and returns the module under its new name."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings

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


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of MOVED and of the packages in it."""

    def find_spec(self, fullname, path=None, target=None):
        """Return a spec for an old name, None for any other."""
        return importlib.machinery.ModuleSpec(fullname, self) if _new_name(fullname) else None

    def exec_module(self, module):
        """Put the module under its new name in the old one's place."""
        new = _new_name(module.__name__)
        warnings.warn(f"{module.__name__} is deprecated; import {new} instead.", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)


def install() -> None:
    """Make old names importable. It must come before Python's own finders, which would load a package's file twice."""
    sys.meta_path.insert(0, _MovedModules())
