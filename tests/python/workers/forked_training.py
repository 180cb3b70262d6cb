"""Run `python -m MODULE ARGUMENTS` with ranks that are forked from the process that starts them.

    forked_training.py MODULE ARGUMENTS..

MODULE is megatron_sb.training, megatron_sb.cli with the subcommand train, or torch.distributed.run (torchrun). Only the
start of a rank differs from a user's job: a forked rank has already imported torch and Megatron-Core. The ranks are
children of the supervisor or of torchrun. They run the same command with the same environment and file descriptors.
Each has its own session, as in a user's job.

Pictures are made but not drawn, unless the environment has SB_DRAW=1. The two of an evaluation take 0.4 s, as long as
ten steps.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from matplotlib.figure import Figure
from support.fork_server import run_program
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from megatron_sb.training import supervisor


class ForkedRank:
    """The part of `subprocess.Popen` that the supervisor and torchrun use."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: dict[str, str],
        start_new_session: bool,
        pass_fds: tuple[int, ...] = (),
        stdout: None = None,
        stderr: None = None,
    ) -> None:
        assert start_new_session and stdout is None and stderr is None
        self.returncode = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(args, env, pass_fds)

    def poll(self) -> int | None:
        """Return the exit status, -n if signal n ended the process, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end and return the exit status. Raise subprocess.TimeoutExpired after `timeout` seconds."""
        if timeout is None:
            return self._wait(0)
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def _run(command: Sequence[str], environment: dict[str, str], descriptors: tuple[int, ...]) -> NoReturn:
    """Do what the command does, in a forked process without the parent's signal handlers and file descriptors."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        kept = sorted({0, 1, 2, *descriptors})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        os.environ.clear()
        os.environ.update(environment)
        start = next(index for index, word in enumerate(command) if word == "-m" or word.endswith(".py"))
        run_program(command[start:])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for child in multiprocessing.active_children():  # as Python does with daemons, which os._exit leaves running
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def write_an_empty_picture(figure: Figure, file: Path, **options: object) -> None:
    """Take the place of `Figure.savefig`."""
    file.write_bytes(b"\x89PNG\r\n\x1a\n")


if __name__ == "__main__":
    if os.environ.get("SB_DRAW") != "1":
        Figure.savefig, Figure.tight_layout = write_an_empty_picture, lambda figure: None
    supervisor.subprocess = SimpleNamespace(Popen=ForkedRank)
    subprocess_handler.Popen = ForkedRank
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
