"""Commands of new processes, and their start. This module loads no torch, so that a launcher starts others at once."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of this package in a new process, from the same installation.

    Python searches the current folder first. A checkout there would hide the installed package, so -P excludes the
    folder.
    """
    runs_in_checkout = Path(__file__).parents[1] == Path.cwd()
    return [sys.executable, *([] if runs_in_checkout else ["-P"]), "-m", module]


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause the garbage collector, for code that creates many objects and drops few, such as imports.

    The collector would look at all objects of the process again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
