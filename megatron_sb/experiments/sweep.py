"""Run a configuration with several sets of overrides, several runs at a time.

Each run has its own folder and its own processes. Finished runs are not repeated; interrupted runs are resumed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_sb.processes import module_command
from megatron_sb.training.config import ConfigError, TrainingConfig, load_config
from megatron_sb.training.directory import hold, refuse_changes, refuse_results
from megatron_sb.training.supervisor import PARENT_PIPE, noting_signals, parent_pipe
from megatron_sb.validation import InputError, check_output_folder

POLL_SECONDS = 0.2
LOG_LINES_SHOWN = 15  # of a run that failed
UNFINISHED = 75  # exit status: the time limit has ended the command before all runs were finished


@dataclass(frozen=True)
class Trial:
    """One training run of a sweep. name: name of its folder. overrides: `dotted.field=value`."""

    name: str
    overrides: tuple[str, ...]

    def config(self, path: str | Path) -> TrainingConfig:
        """Return the configuration at `path` with the overrides. A ConfigError names the run.

        A value in the error can be that of this run alone, such as a share of the steps.
        """
        try:
            return load_config(path, self.overrides)
        except ConfigError as error:
            raise ConfigError(f"run {self.name}: {error}") from error


@dataclass(frozen=True)
class TimeLimit:
    """When a sweep stops by itself. Its runs save, and the same call resumes them.

    Attributes:
        end: value of time.monotonic() at which the runs are stopped.
        seconds_of_a_run: no run is started with less time left. Default 0.
    """

    end: float
    seconds_of_a_run: float = 0.0

    def is_over(self) -> bool:
        """Return whether the runs must stop."""
        return time.monotonic() > self.end

    def is_too_short(self) -> bool:
        """Return whether no further run may start."""
        return time.monotonic() + self.seconds_of_a_run > self.end


NO_LIMIT = TimeLimit(float("inf"))


class SweepStopped(Exception):
    """A run failed, or a signal or the time limit stopped the sweep. status: exit status of the command."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every experiment that sweeps."""
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time, distributed over the machine's GPUs (default: %(default)s)",
    )


def add_time_limit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `limit_of`."""
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="stop after this time with status 75; the same command resumes (default: none)",
    )
    parser.add_argument(
        "--run-time",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="start no run with less time left before --time-limit (default: %(default)s)",
    )


def limit_of(options: argparse.Namespace) -> TimeLimit:
    """Return the time limit of a command that starts now.

    Raises:
        ValueError: a time is negative or not a number.
    """
    for name, seconds in (("--time-limit", options.time_limit), ("--run-time", options.run_time)):
        if seconds is not None and not seconds >= 0:
            raise InputError(f"{name} must be at least 0 seconds, got {seconds}.")
    if options.time_limit is None:
        return NO_LIMIT
    return TimeLimit(time.monotonic() + options.time_limit, options.run_time)


def check_numbers(option: str, numbers: Iterable[float]) -> None:
    """Raise ValueError if two numbers agree in the six digits that folders of runs are named with."""
    named: dict[str, str] = {}
    for number in numbers:
        text = repr(number)
        if (other := named.setdefault(f"{number:g}", text)) != text:
            raise InputError(f"{option} must be numbers that differ in six digits, got {other} and {text}.")


def check_jobs(jobs: int, configs: Iterable[TrainingConfig]) -> None:
    """Raise ValueError unless runs of these configurations can be trained `jobs` at a time.

    Runs at a time have one GPU each. Those that need more would silently use the CPU.
    """
    if jobs < 1:
        raise InputError(f"--jobs must be at least 1, got {jobs}.")
    ranks = max((config.parallel.ranks for config in configs if config.parallel.device != "cpu"), default=1)
    if jobs > 1 and ranks > 1 and _count_gpus():
        raise InputError(
            f"parallel.ranks must be 1 with --jobs {jobs}, because each run then has one GPU, got {ranks}. Use "
            "--jobs 1, or parallel.device=cpu."
        )


def output_folder(options: argparse.Namespace) -> Path:
    """Return the output folder: --out, or runs/EXPERIMENT-CONFIG. For RUN/config.yaml, CONFIG is the name of RUN."""
    path = Path(options.config).absolute()
    if path.is_dir():
        raise InputError(f"CONFIG must be a configuration file, got the folder {options.config}.")
    name = path.parent.name if path.name == "config.yaml" else path.stem
    out = Path("runs") / f"{options.experiment}-{name}" if options.out is None else options.out
    check_output_folder("--out", out)
    return Path(out)


def train_all(
    config_path: str,
    trials: Sequence[Trial],
    out: Path,
    jobs: int = 1,
    limit: TimeLimit = NO_LIMIT,
    *,
    keep_checkpoints: bool = True,
) -> None:
    """Train every unfinished trial in out/NAME, with its output in out/NAME.log.

    A trial is finished when every model of its configuration has been evaluated after the last stage. After a
    signal of `supervisor.STOP_SIGNALS` the runs save and stop; the same call resumes them. A second signal stops them
    without saving.

    Args:
        config_path: configuration that the trials override.
        trials: the runs; their names must differ.
        out: folder of all runs.
        jobs: runs at a time. If it is more than 1, each run uses one GPU and its own share of the cores. Runs that
            share all cores would slow each other down.
        limit: when to stop. Default: when all runs are finished.
        keep_checkpoints: whether to keep the checkpoints of finished runs. Otherwise they are deleted as soon as a run
            is finished. Default True.

    Raises:
        ValueError: a configuration is invalid or differs from the one that out/NAME was started with, or another sweep
            writes to `out`. No run has been started.
        SweepStopped: a run failed, a signal arrived, or the time limit was reached. The other runs have saved, unless a
            second signal stopped them.
    """
    if len({trial.name for trial in trials}) < len(trials):
        raise InputError(f"trials must have different names, got {[trial.name for trial in trials]}.")
    configs = [_checked_config(config_path, trial, out) for trial in trials]
    check_jobs(jobs, configs)
    out.mkdir(parents=True, exist_ok=True)
    received: list[int] = []
    with (
        hold(out),
        parent_pipe() as pipe,
        noting_signals(received),
        tqdm(total=len(trials), desc=out.name, unit="run") as bar,
    ):
        pairs = zip(trials, configs, strict=True)
        unfinished = [trial for trial, config in pairs if not is_done(config, out / trial.name)]
        bar.update(len(trials) - len(unfinished))
        if not keep_checkpoints:
            for trial in set(trials) - set(unfinished):
                _delete_unless_kept(out / trial.name)
        runner = _Runner(config_path, out, jobs, pipe, received, bar, limit, keep_checkpoints)
        with ThreadPoolExecutor(jobs, initializer=runner.prepare_thread) as pool:
            futures = [pool.submit(runner.run, trial) for trial in unfinished]
            while wait(futures, timeout=POLL_SECONDS).not_done:
                pass  # Python handles signals in this thread between two waits.
        if runner.failures:
            raise runner.failures[0]
        if received:
            name = signal.Signals(received[0]).name
            raise SweepStopped(f"Stopped by {name}. Run the same command to resume.", 128 + received[0])
        if limit.is_too_short():
            left = [
                trial for trial, config in zip(trials, configs, strict=True) if not is_done(config, out / trial.name)
            ]
            if left:
                raise SweepStopped(
                    f"{len(left)} of {len(trials)} runs are not finished. Run the same command to resume.", UNFINISHED
                )


def is_done(config: TrainingConfig, folder: Path) -> bool:
    """Return whether the folder of a run has every model's evaluations after the last stage."""
    from megatron_sb.training.evaluate import read_result

    return all(
        read_result(folder, model, config.stages[-1], scaling) is not None
        for model in config.compare
        for scaling in config.evaluated_scalings(model)
    )


def check_unchanged(config: TrainingConfig, folder: Path) -> None:
    """Raise ValueError if the folder of a run was started with another configuration, or with an unknown one."""
    if (folder / "config.yaml").exists():
        refuse_changes(folder, config)
    else:
        refuse_results(folder)


def delete_checkpoints(folder: Path) -> None:
    """Delete the checkpoints of every model of a finished run."""
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)


def _delete_unless_kept(folder: Path) -> None:
    """Delete the checkpoints of a finished run, unless it was started by a call that keeps the ends of its stages."""
    if not load_config(folder / "config.yaml").checkpoint.stage_ends:
        delete_checkpoints(folder)


def evaluation_path(folder: Path, config: TrainingConfig, model: str, scaling: str = "none") -> Path:
    """Return the file of a model's evaluation after the last stage."""
    from megatron_sb.training.evaluate import result_path

    return result_path(folder, model, config.stages[-1], scaling)


def evaluation(folder: Path, config: TrainingConfig, model: str, scaling: str = "none") -> dict[str, Any]:
    """Read a model's evaluation after the last stage.

    Returns {"model", "stage", "trained_context", "scaling", "device", "results"}, with one result per context length.
    """
    from megatron_sb.training.evaluate import read_evaluation

    return read_evaluation(evaluation_path(folder, config, model, scaling))


class _Runner:
    """Runs trials in worker threads. Each thread has one run at a time, its own GPU and its own share of the cores."""

    def __init__(
        self,
        config_path: str,
        out: Path,
        jobs: int,
        pipe: int,
        received_signals: list[int],
        progress: tqdm,
        limit: TimeLimit,
        keep_checkpoints: bool,
    ) -> None:
        self.failures: list[Exception] = []
        self._config_path, self._out, self._jobs, self._pipe = config_path, out, jobs, pipe
        self._received_signals, self._progress, self._limit = received_signals, progress, limit
        self._keep_checkpoints = keep_checkpoints
        self._num_gpus = _count_gpus() if jobs > 1 else 0
        self._indices = itertools.count()
        self._thread = threading.local()

    def prepare_thread(self) -> None:
        """Assign a GPU to the calling thread and restrict it to its cores. Its processes inherit the cores."""
        index = next(self._indices)
        self._thread.gpu = index % self._num_gpus if self._num_gpus else None
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[index :: self._jobs] or [cores[index % len(cores)]])  # 0: only this thread

    def run(self, trial: Trial) -> None:
        """Run a trial until it ends. Forward stop requests to it, and append its failure to `failures`."""
        if self._num_stop_requests() or self._limit.is_too_short():
            return
        try:
            process = _start(self._config_path, trial, self._out, self._thread.gpu, self._pipe)
        except OSError as error:
            self.failures.append(error)
            return
        num_sent = 0
        while process.poll() is None:
            if num_sent < self._num_stop_requests():
                process.send_signal(signal.SIGINT)
                num_sent += 1
            time.sleep(POLL_SECONDS)
        if process.returncode == 0:
            self._progress.update()
            self._finish(trial)
        elif num_sent == 0:
            self.failures.append(_failure(trial, process.returncode, self._out))

    def _finish(self, trial: Trial) -> None:
        if self._keep_checkpoints:
            return
        try:
            delete_checkpoints(self._out / trial.name)
        except OSError as error:
            self.failures.append(error)

    def _num_stop_requests(self) -> int:
        """Return how many signals each run should receive: 1 to save and stop, 2 to stop without saving."""
        return min(2, max(len(self._received_signals), bool(self.failures), self._limit.is_over()))


def _checked_config(config_path: str, trial: Trial, out: Path) -> TrainingConfig:
    """Return the trial's configuration. Raise ValueError if its folder was started with another or an unknown one."""
    config = trial.config(config_path)
    check_unchanged(config, out / trial.name)
    return config


def _command(config_path: str, trial: Trial, folder: Path) -> list[str]:
    """Return the command that starts or resumes a run."""
    command = [*module_command("megatron_sb.training"), config_path, *trial.overrides, "--out", str(folder)]
    return [*command, "--resume"] if (folder / "config.yaml").exists() else command


def _start(config_path: str, trial: Trial, out: Path, gpu: int | None, pipe: int) -> subprocess.Popen:
    """Start a run. gpu: index among the visible GPUs, None for all. pipe: see `supervisor.parent_pipe`."""
    command = _command(config_path, trial, out / trial.name)
    environment = os.environ | {PARENT_PIPE: str(pipe)}
    if gpu is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible else str(gpu)
    with (out / f"{trial.name}.log").open("ab") as log:
        # A run has its own session and does not receive Ctrl-C. The sweep forwards it exactly once.
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, pass_fds=(pipe,), start_new_session=True
        )


def _failure(trial: Trial, status: int, out: Path) -> SweepStopped:
    log = out / f"{trial.name}.log"
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:])
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return SweepStopped(f"{trial.name} {how}. The end of {log}:\n{tail}", 128 - status if status < 0 else status)


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
