"""Start the training runs of experiments as forks, in milliseconds instead of seconds."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from support.fork_server import PythonProcess
from support.jobs import FORKED_TRAIN

from megatron_sb.experiments import sweep


class _ForkedRun(PythonProcess):
    """A run of a sweep, with the methods of `subprocess.Popen` that the sweep uses."""

    def __init__(self, command: list[str], log: Path) -> None:
        super().__init__([*FORKED_TRAIN, *command[command.index("megatron_sb.training") + 1 :]])
        self._log = log

    def poll(self) -> int | None:
        """Return the exit status, or None while the run continues. Write the log when it has ended."""
        if self.returncode is not None:
            self._log.write_text(self.stdout + self.stderr)
        return self.returncode


@contextlib.contextmanager
def forked_runs() -> Iterator[None]:
    """Fork the supervisor and the rank of each run, instead of starting `python -m megatron_sb.training`."""
    runs: list[_ForkedRun] = []

    def start(config_path, trial, out, gpu, pipe) -> _ForkedRun:
        command = sweep._command(config_path, trial, out / trial.name)
        runs.append(_ForkedRun(command, out / f"{trial.name}.log"))
        return runs[-1]

    try:
        with mock.patch.object(sweep, "_start", start):
            yield
    finally:
        for run in runs:
            run.close()
