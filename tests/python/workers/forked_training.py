"""Run `python -m MODULE ARGUMENTS` with ranks that are forked from the supervisor's process.

    forked_training.py MODULE ARGUMENTS..

MODULE is megatron_sb.training, or megatron_sb.cli with the subcommand train. Only the start of a rank differs from a
user's job: a forked rank has already imported torch and Megatron-Core. The ranks are children of the supervisor and run
the same command with the same environment and file descriptors. Each has its own session, as in a user's job.
"""

import os
import runpy
import signal
import sys
import traceback
from types import SimpleNamespace
from typing import NoReturn

from megatron_sb.training import supervisor

RANK_MODULE = "megatron_sb.training"


class ForkedRank:
    """The part of `subprocess.Popen` that the supervisor uses."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], pass_fds: tuple[int, ...], start_new_session: bool
    ) -> None:
        assert start_new_session
        self.returncode = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(command[command.index(RANK_MODULE) :], env, pass_fds)

    def poll(self) -> int | None:
        """Return the exit status, -n if signal n ended the process, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the end and return the exit status."""
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def _run(arguments: list[str], environment: dict[str, str], descriptors: tuple[int, ...]) -> NoReturn:
    """Do what `python -m ARGUMENTS` does, in a forked process without the parent's signal handlers and descriptors."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kept = sorted({0, 1, 2, *descriptors})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = arguments
        runpy.run_module(RANK_MODULE, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    supervisor.subprocess = SimpleNamespace(Popen=ForkedRank)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
