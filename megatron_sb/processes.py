"""Commands of new processes, and their start and streams. No torch here, so that a launcher starts others at once."""

import contextlib
import errno
import gc
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_READER = (errno.EPIPE, errno.EIO)  # of a pipe, and of a terminal that was closed
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


def discard(stream: TextIO) -> None:
    """Direct a standard stream to nowhere. Python would write what is left in it when it exits, and fail."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class _Droppable:
    """A standard stream that drops its text once nobody reads its pipe, its terminal is closed or its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (*NO_READER, *DISK_FULL):
                raise
            discard(self._stream)
            if error.errno in DISK_FULL:  # the file that is left looks complete
                print(f"megatron-sb: standard output: {error.strerror}; continuing without it", file=sys.stderr)


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Continue without output when the reader of standard output or standard error is gone, or their disk is full.

    Ctrl-C also ends the `tee` of `megatron-sb train CONFIG.yaml 2>&1 | tee FILE`. The job must still save. A terminal
    can be closed while a job runs in the background. The disk of the log need not be the one of the checkpoints.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Droppable, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


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
