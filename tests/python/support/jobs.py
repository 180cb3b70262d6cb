"""Jobs that are killed."""

import contextlib
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil


def kill_while_it_saves(job: subprocess.Popen, checkpoints: Path) -> None:
    """SIGKILL all processes of a job with a checkpoint half written, after a first whole one."""
    half_written = False
    while not half_written:
        assert job.poll() is None, job.communicate()[0]
        if not (list(checkpoints.glob(".*.tmp")) and (checkpoints / "latest").exists()):
            continue
        parent = psutil.Process(job.pid)
        processes = [parent, *parent.children(recursive=True)]
        _signal_all(processes, signal.SIGSTOP)
        half_written = bool(list(checkpoints.glob(".*.tmp")))  # still, now that nothing moves
        _signal_all(processes, signal.SIGKILL if half_written else signal.SIGCONT)
    job.communicate()


def _signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
