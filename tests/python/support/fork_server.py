"""Python processes that start in milliseconds, because torch and Megatron-Core are already imported.

A pytest process starts one server when it first needs one. The server imports preload.py and forks a new process for
each job. A job is therefore as isolated as under `python`: it has its own interpreter state, environment, process
groups and Megatron globals. It may hang, abort or be killed without any effect on other jobs.

Differences from `python`: devices are CPUs, torch.compile does nothing (TORCHDYNAMO_DISABLE=1), and environment
variables that are read while torch or Megatron-Core is imported have no effect. Processes that a job spawns are forks.
Use `subprocess` where a test depends on one of these.
"""

import contextlib
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).parents[1]
_context = multiprocessing.get_context("forkserver")
_environment_lock = threading.Lock()


class PythonProcess:
    """A process that is forked from the server and runs `python ARGUMENTS`. Its output goes to files.

    Args:
        arguments: "-m" and a module, or a script; then its arguments.
        environment: variables to add to the environment of this process.
        folder: working directory; by default that of this process.
    """

    def __init__(
        self, arguments: Sequence[object], environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._files = tempfile.TemporaryDirectory()
        self._stdout, self._stderr = (Path(self._files.name) / name for name in ("stdout", "stderr"))
        variables = _start_server() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **(environment or {})}
        self._process = _context.Process(
            target=_run, args=(self.arguments, variables, str(folder or Path.cwd()), self._stdout, self._stderr)
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, -n if signal n ended the process, or None while it runs."""
        return self._process.exitcode

    @property
    def stdout(self) -> str:
        """Standard output so far, without the lines in which gloo of older versions of torch reports its peers."""
        text = self._stdout.read_text() if self._stdout.exists() else ""
        return re.sub(r"^\[Gloo\] .*\n?", "", text, flags=re.MULTILINE)

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._stderr.read_text() if self._stderr.exists() else ""

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes ready when the process ends, for `multiprocessing.connection.wait`."""
        return self._process.sentinel

    def wait(self, seconds: float) -> int:
        """Return the exit status, or raise subprocess.TimeoutExpired."""
        self._process.join(seconds)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.arguments, seconds, self.stdout, self.stderr)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """Kill the process, if it still runs, and the processes that it started. Delete its output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._files.cleanup()


@contextlib.contextmanager
def python_processes(jobs: Sequence[dict]) -> Iterator[list[PythonProcess]]:
    """Start one `PythonProcess` for each dict of its arguments. Kill the ones that still run at the end."""
    processes: list[PythonProcess] = []
    try:
        for job in jobs:
            processes.append(PythonProcess(**job))
        yield processes
    finally:
        for process in processes:
            process.close()


def run_python(
    arguments: Sequence[object],
    *,
    seconds: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Run `python ARGUMENTS` and return its status and output, as subprocess.run does with captured text.

    Raises:
        subprocess.TimeoutExpired: after `seconds`. The process is killed.
    """
    with python_processes([{"arguments": arguments, "environment": environment, "folder": folder}]) as (process,):
        process.wait(seconds)
        return subprocess.CompletedProcess(process.arguments, process.returncode, process.stdout, process.stderr)


def _start_server() -> dict[str, str]:
    """Start the server, if it does not run, and return the environment of this process.

    The server starts with other variables than this process has. Threads take turns: a thread that read the variables
    of the server would restore these, and torch.compile would do nothing in this process.
    """
    with _environment_lock:
        environment = dict(os.environ)
        paths = [str(TESTS), *filter(None, [environment.get("PYTHONPATH")])]
        variables = {
            "PYTHONPATH": os.pathsep.join(paths),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # the import would start processes, which break in a fork
        }
        _context.set_forkserver_preload(["support.preload"])
        with mock.patch.dict(os.environ, variables):
            forkserver.ensure_running()
        return environment


def _run(arguments: list[str], environment: dict[str, str], folder: str, stdout: Path, stderr: Path) -> None:
    """Do what `python ARGUMENTS` does, in the forked process."""
    os.setpgid(0, 0)
    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
        stream.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    warnings.simplefilter("ignore")
    run_program(arguments)


def run_program(arguments: Sequence[str]) -> None:
    """Do what `python ARGUMENTS` does, in this process. ARGUMENTS begin with "-m" and a module, or with a script."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
