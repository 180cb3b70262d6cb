"""Commands of new processes, and their start and streams. No torch here, so that a launcher starts others at once."""

import contextlib
import gc
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_RUN_MODULE = (
    "import runpy, sys; del sys.path[0]; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of this package in a new process, from the same installation.

    Python searches the current folder first. A checkout there would hide the installed package, so -P excludes the
    folder. Python 3.10 has no -P: there a line of code excludes it.
    """
    runs_in_checkout = Path(__file__).parents[1] == Path.cwd()
    if runs_in_checkout:
        return [sys.executable, "-m", module]
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", module]
    return [sys.executable, "-c", _RUN_MODULE, module]


def prepare_streams() -> None:
    """Open the standard streams that the caller has closed, and let the output have any character.

    Without this, `print` would do nothing, `flush` would fail, and the next file that the command opens would get the
    number of the closed stream, into which libraries write. A terminal or a log can have an encoding without some
    characters of a text or of a file name: standard output shows them as `\\xe9`, as standard error does.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)  # also for the processes of `train`
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


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
