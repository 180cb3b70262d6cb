"""Trains a configuration with several sets of overrides, each in a folder and processes of its own, several at a time;
what is done stays done, and what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_sb.ops.library import module_command
from megatron_sb.training.config import TrainingConfig, load_config
from megatron_sb.training.directory import hold, refuse_changes
from megatron_sb.training.supervisor import PARENT_PIPE, noting_signals, parent_pipe

POLL_SECONDS = 0.2
LINES_OF_LOG = 15  # shown of a run that failed


@dataclass(frozen=True)
class Trial:
    """One training run of a sweep. name: its folder's. overrides: `dotted.field=value`."""

    name: str
    overrides: tuple[str, ...]


class SweepStopped(Exception):
    """A run of the sweep failed, or the sweep was told to stop; status: what the command ends with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every experiment that sweeps."""
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, spread over the machine's GPUs (default 1)"
    )


def output_folder(options: argparse.Namespace) -> Path:
    """Where an experiment writes: --out, or runs/EXPERIMENT-CONFIG; a run's config.yaml goes by the run's name."""
    path = Path(options.config).absolute()
    if path.is_dir():
        raise ValueError(f"{options.config} is a folder; a configuration file is allowed")
    name = path.parent.name if path.name == "config.yaml" else path.stem
    out = Path(options.out or Path("runs") / f"{options.experiment}-{name}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out is {str(out)!r}, a file; a folder, new or of this experiment, is allowed")
    return out


def train_all(config_path: str, trials: Sequence[Trial], out: Path, jobs: int = 1) -> None:
    """Train every trial that is not done, `jobs` at a time, in out/NAME, its output in out/NAME.log.

    A trial is done when every model of its configuration has been evaluated after the last stage. SIGINT and SIGTERM
    let the runs save and stop, a second one ends them without; the same call goes on from there. Where jobs > 1, each
    run sees one GPU, by turns, and its share of the cores: threads that each take all of them wait for each other.
    Raises ValueError for a configuration that is refused, also because out/NAME was begun with another one, and where
    another sweep trains in `out`, before anything runs; SweepStopped when a run fails or a signal has come, once the
    others have saved.
    """
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}; 1 or more is allowed")
    if len({trial.name for trial in trials}) < len(trials):
        raise ValueError(f"trials are {[trial.name for trial in trials]}; their names must differ")
    configs = [_checked(config_path, trial, out) for trial in trials]
    out.mkdir(parents=True, exist_ok=True)
    num_gpus = _count_gpus() if jobs > 1 else 0
    slots: list[tuple[Trial, subprocess.Popen] | None] = [None] * jobs
    received: list[int] = []
    with (
        hold(out),
        parent_pipe() as pipe,
        noting_signals(received),
        tqdm(total=len(trials), desc=out.name, unit="run") as bar,
    ):
        try:
            found = zip(trials, configs, strict=True)
            waiting = [trial for trial, config in found if not is_done(config, out / trial.name)]
            bar.update(len(trials) - len(waiting))
            while waiting or any(slots):
                for index, slot in enumerate(slots):
                    if slot is None and waiting:
                        trial = waiting.pop(0)
                        gpu = index % num_gpus if num_gpus else None
                        with _on_share_of_cores(index, jobs):
                            slots[index] = trial, _start(config_path, trial, out, gpu, pipe)
                    elif slot is not None and slot[1].poll() is not None:
                        slots[index] = None
                        if slot[1].returncode:
                            raise _failure(slot[0], slot[1].returncode, out)
                        bar.update()
                if received:
                    name = signal.Signals(received[0]).name
                    raise SweepStopped(f"stopped by {name}; the same command goes on", 128 + received[0])
                time.sleep(POLL_SECONDS)
        finally:
            _stop([slot[1] for slot in slots if slot], received)


def is_done(config: TrainingConfig, folder: Path) -> bool:
    """Whether every model's evaluations after the last stage are in the folder of a run."""
    return all(
        evaluation_path(folder, config, model, scaling).exists()
        for model in config.compare
        for scaling in config.evaluated_scalings(model)
    )


def evaluation_path(folder: Path, config: TrainingConfig, model: str, scaling: str = "none") -> Path:
    """The file of a model's evaluation after the last stage."""
    from megatron_sb.training.evaluate import result_path

    return result_path(folder, model, config.stages[-1], scaling)


def evaluation(folder: Path, config: TrainingConfig, model: str, scaling: str = "none") -> dict[str, Any]:
    """A model's evaluation after the last stage, as `Report.evaluation` wrote it: {"model", "stage", "trained_context",
    "scaling", "device", "results" (one entry per context length)}.
    """
    path = evaluation_path(folder, config, model, scaling)
    return json.loads(path.read_text(encoding="utf-8"))


def newest_checkpoint(folder: Path, model: str) -> Path:
    """The newest checkpoint of a model in the folder of a run. Raises FileNotFoundError where there is none."""
    root = folder / model / "checkpoints"
    try:
        return root / (root / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise FileNotFoundError(f"{root} holds no checkpoint (no file 'latest')") from None


def _checked(config_path: str, trial: Trial, out: Path) -> TrainingConfig:
    """The trial's configuration; raises ValueError where its folder was begun with another."""
    config = load_config(config_path, trial.overrides)
    folder = out / trial.name
    if (folder / "config.yaml").exists():
        refuse_changes(folder, config)
    return config


def _command(config_path: str, trial: Trial, folder: Path) -> list[str]:
    """Starts or goes on with one run."""
    command = [*module_command("megatron_sb.training"), config_path, *trial.overrides, "--out", str(folder)]
    return [*command, "--resume"] if (folder / "config.yaml").exists() else command


def _start(config_path: str, trial: Trial, out: Path, gpu: int | None, pipe: int) -> subprocess.Popen:
    """pipe: `supervisor.parent_pipe`'s."""
    command = _command(config_path, trial, out / trial.name)
    environment = os.environ | {PARENT_PIPE: str(pipe)}
    if gpu is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible else str(gpu)
    with (out / f"{trial.name}.log").open("ab") as log:
        # A session of its own: Ctrl-C reaches this process alone, which passes it on exactly once.
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, pass_fds=(pipe,), start_new_session=True
        )


@contextlib.contextmanager
def _on_share_of_cores(index: int, jobs: int) -> Iterator[None]:
    """What is started inside runs on every jobs-th core from index on, or on one where there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[index::jobs] or [cores[index % len(cores)]])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _failure(trial: Trial, status: int, out: Path) -> SweepStopped:
    log = out / f"{trial.name}.log"
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_OF_LOG:])
    return SweepStopped(f"{trial.name} ended with status {status}; the end of {log}:\n{tail}", abs(status))


def _stop(processes: list[subprocess.Popen], received: list[int]) -> None:
    """Let runs save and end, and where a second signal comes, end without. Their launchers bound how long it takes."""
    told = 0
    while any(process.poll() is None for process in processes):
        if told < max(1, min(len(received), 2)):
            told += 1
            for process in processes:
                process.send_signal(signal.SIGINT)
        time.sleep(POLL_SECONDS)


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
