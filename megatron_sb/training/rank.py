"""One rank of a job: its device, the process group, the run's directory, and the exit status."""

from __future__ import annotations

import datetime
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from megatron_sb.training import config as configuration
from megatron_sb.training.agreement import Found, fingerprint_of_files, reason_to_refuse
from megatron_sb.training.checkpoint import CheckpointDirectory, write_atomically
from megatron_sb.training.command import Command
from megatron_sb.training.config import ConfigError, TrainingConfig
from megatron_sb.training.directory import SEEN_SECONDS, check_is_marked, delete_unused, mark, prepare_directory
from megatron_sb.training.initial_checkpoint import check_initial_checkpoint
from megatron_sb.training.loop import Diverged, Interrupted, Job
from megatron_sb.training.profiler import ProfilerWindow
from megatron_sb.training.report import Report, hardware
from megatron_sb.training.supervisor import EXIT_FAILED, EXIT_REFUSED, say, when_parent_is_gone
from megatron_sb.validation import InputError, is_of_user, message_of

REFUSAL_SECONDS = 60.0  # longer than the start of ranks differs; a launcher ends the waiting ranks before


def run_rank(config: TrainingConfig, command: Command) -> NoReturn:
    """Run one rank and end the process.

    The process ends by `os._exit`: the static destructors of process groups may abort it otherwise.
    """
    # The supervisor starts each rank in its own session, so the process group of a rank is the rank and its helpers. A
    # rank must not continue without a supervisor.
    when_parent_is_gone(lambda: os.killpg(0, signal.SIGKILL))
    silence_warnings()
    try:
        status = _run(config, command)
    except Exception as error:  # the supervisor ends the other ranks
        # The progress bar, which is rank 0's, has not ended its line.
        print(f"\nrank {os.environ['RANK']} failed:{_describe(error)}", file=sys.stderr)
        status = EXIT_FAILED
    # Megatron-Core's checkpoints start helper processes, which os._exit would leave alive.
    for helper in multiprocessing.active_children():
        helper.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def choose_device(config: TrainingConfig) -> torch.device:
    """Return this rank's device.

    Raises:
        ConfigError: The number of ranks differs from parallel.ranks, or the configuration needs more GPUs, or a package
            that is not installed.
    """
    configuration.check_packages(config, config.compare)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    num_gpus = torch.cuda.device_count()
    wanted = config.parallel.device
    if int(os.environ["WORLD_SIZE"]) != config.parallel.ranks:
        raise ConfigError(
            f"parallel.ranks must be WORLD_SIZE = {os.environ['WORLD_SIZE']}, the number of started ranks, "
            f"got {config.parallel.ranks}"
        )
    missing = f"needs a GPU for each of the {local_ranks} ranks on this machine, which has {num_gpus}"
    if wanted == "cuda" and num_gpus < local_ranks:
        raise ConfigError(f"parallel.device = 'cuda' {missing}")
    if wanted != "cpu" and num_gpus >= local_ranks:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    for field, why in configuration.needs_gpu(config):
        raise ConfigError(f"{field} {missing}: {why}")
    return torch.device("cpu")


def refuse(reason: str) -> int:
    """Print why no rank of this machine can run, once for each machine. Return the exit status.

    A launcher ends all ranks when one has ended. So the other ranks wait for the one that prints.
    """
    if os.environ["LOCAL_RANK"] == "0":
        say(reason)
    else:
        time.sleep(REFUSAL_SECONDS)
    return EXIT_REFUSED


def _describe(error: BaseException) -> str:
    """Return a sentence for an error of the user's files or settings, otherwise the traceback."""
    if is_of_user(error):
        return f" {message_of(error)}"
    return f"\n{traceback.format_exc()}"


def silence_warnings() -> None:
    """Hide Megatron-Core's warnings about optional packages, and torch's about a CUDA toolkit without a GPU."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _run(config: TrainingConfig, command: Command) -> int:
    try:
        device = choose_device(config)
    except ConfigError as error:
        return refuse(f"{command.config_path}: {error}")
    _join_process_group(config, device)
    directory = report = job = fingerprint = refusal = None
    try:
        # The lock is held until the process ends.
        directory, _lock = _agree_on_directory(config, command.out, command.resume)
        report, job = _prepare(config, command, device, directory)
        fingerprint = job.fingerprint() | fingerprint_of_files(config, starts=not command.resume)
    except (InputError, OSError) as error:
        refusal = error
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, Found(configuration.flatten(config), fingerprint, refusal))
    if reason := reason_to_refuse(ranks):
        if dist.get_rank() == 0:
            if directory is not None and command.out is None and not command.resume:
                delete_unused(directory)
            say(f"{command.config_path}: {reason}")
        dist.barrier()  # a rank that ends first lets the launcher end rank 0, which must have printed the reason
        return EXIT_REFUSED
    if report:
        if not command.resume:
            write_atomically(directory / "config.yaml", configuration.to_yaml(config))
        record = {"description": job.describe(), "fingerprint": job.fingerprint()}
        write_atomically(directory / "data.json", json.dumps(record, indent=1))
        report.message(f"{config.parallel.ranks} ranks on {device.type}; {job.describe()}; writing to {directory}")
    return _train(job, report, command.to_resume(directory))


def _join_process_group(config: TrainingConfig, device: torch.device) -> None:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timeout = datetime.timedelta(seconds=config.parallel.timeout_seconds)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)


def _prepare(
    config: TrainingConfig, command: Command, device: torch.device, directory: Path
) -> tuple[Report | None, Job]:
    """Return the report, on rank 0 only, and the job."""
    report = profiler = None
    if dist.get_rank() == 0:
        report = Report(directory, config, hardware(device.type, config.parallel.ranks))
        profiler = ProfilerWindow(directory / "profile", *command.profiled)
    return report, Job(config, directory, device, report, profiler)


def _agree_on_directory(config: TrainingConfig, out: str | None, resume: bool) -> tuple[Path, IO | None]:
    """Let rank 0 choose, check and lock the run's directory. Every rank returns it, or raises rank 0's error.

    Another rank can run in another working directory, and must see the same directory.
    """
    answer: list[Any] = [None]
    directory, lock = None, None
    if dist.get_rank() == 0:
        try:
            directory, lock = _choose_directory(config, out, resume)
            answer = [(directory.absolute(), mark(lock))]
        except (InputError, OSError) as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    if directory is None:
        directory, token = answer[0]
        check_is_marked(directory, token, min(SEEN_SECONDS, config.parallel.timeout_seconds / 2))
    return directory, lock


def _choose_directory(config: TrainingConfig, out: str | None, resume: bool) -> tuple[Path, IO]:
    """Do what `prepare_directory` does, and check the checkpoints that the models start from."""
    if not resume:
        check_initial_checkpoint(config)
        return prepare_directory(config, out, resume)
    directory, lock = prepare_directory(config, out, resume)
    for model in config.compare:
        checkpoints = CheckpointDirectory(directory / model / "checkpoints", config.checkpoint.keep)
        if checkpoints.is_empty() or config.is_distilled:  # the teacher is read again
            check_initial_checkpoint(config)
        for sentence in checkpoints.restore_latest():
            say(sentence)
    return directory, lock


def _train(job: Job, report: Report | None, to_resume: str) -> int:
    """Run the job to its end and return the exit status. report: None on every rank but the first."""
    try:
        job.run()
        status, ending = 0, None
    except Interrupted as stop:
        number, where = stop.args
        status, ending = 128 + number, f"stopped by {number.name} {where}. Resume with: {to_resume}"
    except Diverged as end:
        status, ending = EXIT_FAILED, str(end)
    if report:
        if status == 0:
            report.draw()
            report.message(
                f"negative log-likelihood (nats per token) by context length\n{report.table()}\nsee "
                f"{report.out}/loss.png, {report.out}/nll_by_length.png"
            )
        report.close()
        if ending:
            say(ending)
    dist.destroy_process_group()
    return status
