"""Starting a job: the command that starts its own ranks and watches them, and what each rank does first and last.

`main` is either. Under torchrun (RANK and WORLD_SIZE are set) the process is a rank; otherwise it starts
`parallel.ranks` processes on this machine, each of them this module's `main` again, and ends them all when one dies.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from torch.distributed import TCPStore

from megatron_sb.ops.library import module_command
from megatron_sb.training import config as configuration
from megatron_sb.training.config import ConfigError, TrainingConfig
from megatron_sb.training.directory import prepare_directory
from megatron_sb.training.profiler import ProfilerWindow

EXIT_FAILED = 1
EXIT_REFUSED = 2
STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
GRACE_SECONDS = 10.0  # after one rank has died, for the others to say why they end
POLL_SECONDS = 0.1
PARENT_PIPE = "MEGATRON_SB_PARENT_PIPE"


@dataclass(frozen=True)
class Command:
    """What a rank was told on its command line, as `main` takes it. profiled: first and last step, 0 for none."""

    config_path: str
    overrides: tuple[str, ...]
    out: str | None
    resume: bool
    profiled: tuple[int, int]

    def to_go_on(self, directory: Path) -> str:
        """What a user types to go on with the run in `directory`; under torchrun, what its ranks are to run."""
        rest = ["--out", str(directory), "--resume"]
        if PARENT_PIPE not in os.environ:
            return "torchrun ... -m megatron_sb.training " + shlex.join([self.config_path, *self.overrides, *rest])
        changes = [f"--set={override}" for override in self.overrides]
        return "megatron-sb train " + shlex.join([self.config_path, *changes, *rest])


def main(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    out: str | None = None,
    resume: bool = False,
    profile: str | None = None,
) -> int:
    """Train as the configuration says; the exit status.

    overrides: `dotted.field=value`. out: the run's directory (default: runs/NAME-TIME). resume: go on with that run
    (default: the newest runs/NAME-*). profile: "FIRST:LAST", steps of each stage that rank 0 runs under torch's
    profiler, which writes RUN/profile/MODEL.STAGE.json.
    Status 0: done. 1: a rank failed, or training diverged. 2: the configuration or the directory was refused.
    128 + signal: stopped and saved.
    Under torchrun it does not return: a rank ends its process.
    """
    try:
        config = configuration.load_config(config_path, overrides)
        window = ProfilerWindow.parse(profile, max(stage.steps for stage in config.stages)) if profile else (0, 0)
    except (ValueError, OSError) as error:
        _say(f"{config_path}: {error}")
        return EXIT_REFUSED
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        run_rank(config, Command(config_path, tuple(overrides), out, resume, window))
    arguments = [config_path, *overrides, *(["--out", out] if out else []), *(["--resume"] if resume else [])]
    arguments += ["--profile", profile] if profile else []
    return start_ranks(config, [*module_command("megatron_sb.training"), *arguments])


def start_ranks(config: TrainingConfig, command: list[str]) -> int:
    """Run `command` once per rank and wait for all; the job's exit status.

    When one dies the others get GRACE_SECONDS and are killed. SIGINT and SIGTERM are passed on once, so that the ranks
    save; a second one kills. Where a process that started this one with PARENT_PIPE is gone, it is as after SIGINT.
    """
    num_ranks = config.parallel.ranks
    threads = config.parallel.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // num_ranks)
    # The ranks meet at a store of this process, as under torchrun: a port that is only looked up for rank 0 to listen
    # on can be another job's by then.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": threads,
    }
    received: list[int] = []
    ranks: list[subprocess.Popen] = []
    with parent_pipe() as pipe, noting_signals(received):
        _when_parent_is_gone(lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            for rank in range(num_ranks):
                own = {PARENT_PIPE: pipe, "RANK": rank, "LOCAL_RANK": rank}
                environment = {**os.environ, **{name: str(value) for name, value in (common | own).items()}}
                # A session of its own: Ctrl-C reaches this process alone, which passes it on exactly once.
                ranks.append(subprocess.Popen(command, env=environment, pass_fds=(pipe,), start_new_session=True))
            return _watch(ranks, received, config.parallel.timeout_seconds)
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):  # with the helpers that Megatron-Core's checkpoints start
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def parent_pipe() -> Iterator[int]:
    """The end to read of a pipe that is never written to. Processes that are started with it, in PARENT_PIPE, see it
    close when this one is gone: its other end is open here alone, and only inside.
    """
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


@contextlib.contextmanager
def noting_signals(received: list[int]) -> Iterator[None]:
    """SIGINT and SIGTERM are appended to `received` and do nothing else."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(ranks: list[subprocess.Popen], received: list[int], timeout_seconds: float) -> int:
    """Wait until all ranks have ended, one has failed, or a stop took too long."""
    deadline = None
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0, *STOP_CODES)), None)
        if failed is not None:
            return _report_failure(ranks, failed, received)
        if None not in codes:
            return max(codes)
        if received and deadline is None:
            deadline = time.monotonic() + timeout_seconds
            _say(f"{signal.Signals(received[0]).name}: saving after this step (once more to end at once)")
            for process in ranks:
                process.send_signal(received[0])
        if len(received) > 1 or (deadline and time.monotonic() > deadline):
            _say(
                "told twice" if len(received) > 1 else f"not stopped in parallel.timeout_seconds = {timeout_seconds:g}"
            )
            _say("ending all ranks without saving")
            return 128 + received[0]
        time.sleep(POLL_SECONDS)


def _report_failure(ranks: list[subprocess.Popen], rank: int, received: list[int]) -> int:
    """Say which rank ended how, and give the others GRACE_SECONDS to say why they do; the job's status."""
    code = ranks[rank].returncode
    refused = code == EXIT_REFUSED  # all ranks refuse together, and one of them says why
    if not refused:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        when = " before it could save" if received else ""
        _say(
            f"rank {rank} (process {ranks[rank].pid}) {how}{when}; ending the job. --resume goes on from the last save"
        )
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if refused:
        return EXIT_REFUSED
    return 128 + received[0] if received else EXIT_FAILED


def _say(text: str) -> None:
    print(f"megatron-sb train: {text}", file=sys.stderr, flush=True)


def run_rank(config: TrainingConfig, command: Command) -> NoReturn:
    """Be one rank of a job; ends the process (static destructors of process groups may abort it otherwise)."""
    # In a session of its own (start_ranks), and not to train on unwatched.
    _when_parent_is_gone(lambda: os.killpg(0, signal.SIGKILL))
    quieten()
    try:
        status = _run_rank(config, command)
    except Exception:  # the traceback is the message; the launcher ends the other ranks
        print(f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", file=sys.stderr)
        status = EXIT_FAILED
    for helper in multiprocessing.active_children():  # Megatron-Core's checkpoints leave some, which os._exit forgets
        helper.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_rank(config: TrainingConfig, command: Command) -> int:
    import torch
    import torch.distributed as dist

    from megatron_sb.training.checkpoint import write_aside
    from megatron_sb.training.loop import Diverged, Interrupted, Job
    from megatron_sb.training.report import Report, hardware

    rank = int(os.environ["RANK"])
    try:
        device = _choose_device(config)
    except ConfigError as error:
        if os.environ["LOCAL_RANK"] == "0":
            _say(f"{command.config_path}: {error}")
        return EXIT_REFUSED
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=config.parallel.timeout_seconds),
    )
    refusals: list[Exception | None] = [None] * dist.get_world_size()
    refusal = None
    try:
        directory, _lock = _agree_on_directory(config, command.out, command.resume)  # held until the process ends
        report = Report(directory, config, hardware(device.type, config.parallel.ranks)) if rank == 0 else None
        profiler = ProfilerWindow(directory / "profile", *command.profiled) if rank == 0 else None
        job = Job(config, directory, device, report, profiler)
    except (ValueError, OSError) as error:
        refusal = error
    dist.all_gather_object(refusals, refusal)
    if any(refusals):
        if rank == 0:
            _say(f"{command.config_path}: {next(filter(None, refusals))}")
        return EXIT_REFUSED
    if report:
        if not command.resume:
            write_aside(directory / "config.yaml", configuration.to_yaml(config))
        report.message(f"{config.parallel.ranks} ranks on {device.type}; {job.describe()}; writing to {directory}")
    try:
        job.run()
    except Interrupted as stop:
        number, where = stop.args
        if report:
            report.close()
            _say(f"stopped by {number.name} {where}. Go on with: {command.to_go_on(directory)}")
        dist.destroy_process_group()
        return 128 + number
    except Diverged as end:
        if report:
            report.close()
            _say(str(end))
        dist.destroy_process_group()
        return EXIT_FAILED
    if report:
        report.draw()
        report.message(
            f"negative log-likelihood (nats per token) by context length\n{report.table()}\nsee "
            f"{directory}/loss.png, {directory}/nll_by_length.png"
        )
        report.close()
    dist.destroy_process_group()
    return 0


def _choose_device(config: TrainingConfig) -> Any:
    import torch

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    num_gpus = torch.cuda.device_count()
    wanted = config.parallel.device
    if int(os.environ["WORLD_SIZE"]) != config.parallel.ranks:
        raise ConfigError(
            f"parallel.ranks = {config.parallel.ranks}, but WORLD_SIZE = {os.environ['WORLD_SIZE']} ranks were started"
        )
    if wanted == "cuda" and num_gpus < local_ranks:
        raise ConfigError(
            f"parallel.device = 'cuda' needs a GPU for each of the {local_ranks} ranks on this machine; it has "
            f"{num_gpus}"
        )
    if wanted != "cpu" and num_gpus >= local_ranks:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    for field, why in configuration.needs_gpu(config):
        raise ConfigError(
            f"{field} needs a GPU for each of the {local_ranks} ranks on this machine ({why}); it has {num_gpus}"
        )
    return torch.device("cpu")


def _agree_on_directory(config: TrainingConfig, out: str | None, resume: bool) -> tuple[Path, IO | None]:
    """Rank 0 chooses and checks the run's directory, and has its lock; every rank gets it, or what was raised."""
    import torch.distributed as dist

    answer: list[Any] = [None]
    lock = None
    if dist.get_rank() == 0:
        try:
            directory, lock = prepare_directory(config, out, resume)
            answer = [directory]
        except (ValueError, OSError) as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0], lock


def _when_parent_is_gone(act: Callable[[], None]) -> None:
    """Where the process that started this one is gone (killed, say), so is its end of the pipe."""
    if PARENT_PIPE not in os.environ:
        return
    descriptor = int(os.environ[PARENT_PIPE])

    def wait() -> None:
        os.read(descriptor, 1)
        act()

    threading.Thread(target=wait, daemon=True).start()


def quieten() -> None:
    """Megatron-Core tells of every optional package that is absent, torch of a CUDA toolkit without a GPU."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
