"""Replace the package `stickbreaking_attention` by this library, for programs that import the published package.

The package has the functions `sb_attn` and `sb_attn_varlen`. dolomite-engine imports them, and so did lm-engine until
September 2025. A program runs unmodified under this module, also with torchrun:

    python -m megatron_sb.integrations.stickbreaking_attention SCRIPT.py ARGUMENTS..
    python -m megatron_sb.integrations.stickbreaking_attention -m MODULE ARGUMENTS..
"""

import importlib.util
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from megatron_sb import compat

PACKAGE = "stickbreaking_attention"
# The functions of the package and of each of its modules.
_MODULES = {
    PACKAGE: ("sb_attn", "sb_attn_varlen"),
    f"{PACKAGE}.sb_attn": ("sb_attn",),
    f"{PACKAGE}.sb_varlen": ("sb_attn_varlen",),
}
_USAGE = f"usage: python -m megatron_sb.integrations.{PACKAGE} (SCRIPT.py | -m MODULE) [arguments]"


def install() -> None:
    """Let `import stickbreaking_attention` give the functions of `megatron_sb.compat`, in this process.

    Call it before the program imports the package. The package need not be installed. A second call changes nothing.
    `uninstall` undoes the call.

    Raises:
        RuntimeError: if this process has already imported the published package.

    Example:
        >>> from megatron_sb.integrations import stickbreaking_attention as package
        >>> package.install()
        >>> from stickbreaking_attention import sb_attn
        >>> sb_attn.__module__
        'megatron_sb.compat'
        >>> package.uninstall()
    """
    imported = sys.modules.get(PACKAGE)
    if imported is not None and not _is_ours(imported):
        raise RuntimeError(
            f"install must be called before the first import of {PACKAGE}, got the package from "
            f"{getattr(imported, '__file__', None)}."
        )
    for name, functions in _MODULES.items():
        module = ModuleType(name, f"megatron_sb.compat with the name of {name}.")
        module.__spec__ = ModuleSpec(name, loader=None, is_package=name == PACKAGE)
        if name == PACKAGE:
            module.__path__ = []
        for function in functions:
            setattr(module, function, getattr(compat, function))
        module.served_by = __name__
        sys.modules[name] = module


def uninstall() -> None:
    """Let later imports of `stickbreaking_attention` find the published package again, if it is installed."""
    for name in _MODULES:
        if _is_ours(sys.modules.get(name)):
            del sys.modules[name]


def _is_ours(module: ModuleType | None) -> bool:
    return getattr(module, "served_by", None) == __name__


def main() -> None:
    """Run the script or the module that the command line names, as `python` does."""
    first, *rest = sys.argv[1:] or [""]
    if first == "-m" and rest:
        install()
        sys.argv = rest
        _set_paths(os.getcwd())
        _check_module(rest[0])
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first.endswith(".py") and os.path.isfile(first):
        install()
        sys.argv = [first, *rest]
        _set_paths(os.path.dirname(os.path.realpath(first)))
        runpy.run_path(first, run_name="__main__")
    else:
        raise SystemExit(f"{_USAGE}\nSCRIPT.py must be an existing Python file, got {first!r}.")


def _check_module(name: str) -> None:
    """End with a message if there is no such module. runpy's error would show a traceback of this module."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # an import within a package that exists
            raise
        found = None
    except ImportError:
        if not name.startswith("."):
            raise
        found = None  # a relative name
    if found is None:
        raise SystemExit(f"{_USAGE}\nMODULE must be a module that can be imported, got {name!r}.")


def _set_paths(folder: str) -> None:
    """Search modules in a folder first, as `python` does without -P.

    The next folder has the package for the processes that multiprocessing spawns, which would not find it.
    """
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "spawned"))


if __name__ == "__main__":
    main()
