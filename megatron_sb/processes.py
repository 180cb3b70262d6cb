"""Commands of new processes. This module loads no torch, so that a launcher starts its processes at once."""

import sys
from pathlib import Path


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of this package in a new process, from the same installation.

    Python searches the current folder first. A checkout there would hide the installed package, so -P excludes the
    folder.
    """
    runs_in_checkout = Path(__file__).parents[1] == Path.cwd()
    return [sys.executable, *([] if runs_in_checkout else ["-P"]), "-m", module]
