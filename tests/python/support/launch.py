"""Run the ranks of torch.distributed as processes."""

import contextlib
import functools
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from support.fork_server import PythonProcess, python_processes
from support.hosts import ON_HOST, Host

WORKERS = Path(__file__).parents[1] / "workers"
SEVERAL_MACHINES = Path(__file__).parent / "several_machines.sh"


def unused_port() -> int:
    """Return a port that no process listens on, for a command that takes a number.

    It is below the ports that the kernel gives to sockets without one, so only another caller of this function can
    take it in the meantime.
    """
    while True:
        port = random.randrange(20000, 28000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def rank_environments(num_ranks: int, seconds: float) -> Iterator[list[dict[str, str]]]:
    """Yield the environment variables of each rank of one host. The ranks meet at a store, which ends with the context.

    torchrun sets the same variables, but it kills all ranks if one is lost. `seconds` is the store's timeout.
    """
    # The store of torchrun's agent has the same role. The ranks connect to it, so no rank has to guess a port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    common = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    yield [_rank_variables(rank, num_ranks, num_ranks, "127.0.0.1", store.port) | common for rank in range(num_ranks)]


def _rank_variables(rank: int, num_ranks: int, per_host: int, address: str, port: int) -> dict[str, str]:
    """Return the environment variables of a rank, where each host has `per_host` of the ranks."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
    }


@contextlib.contextmanager
def started_ranks(
    num_ranks: int,
    arguments: list,
    seconds: float,
    folder: Path | None = None,
    hosts: Sequence[Host] = (),
    **environment: str,
) -> Iterator[list[PythonProcess]]:
    """Start `python ARGUMENTS` as ranks on CPUs, with the environment that torchrun gives them. Kill them at the end.

    The ranks are forks of a process that has torch and Megatron-Core imported; see fork_server.py. They are divided
    among the hosts.
    """
    if hosts:
        with python_processes(_jobs_on_hosts(num_ranks, arguments, folder, hosts, environment)) as ranks:
            yield ranks
        return
    with rank_environments(num_ranks, seconds) as variables:
        jobs = [{"arguments": arguments, "folder": folder, "environment": own | environment} for own in variables]
        with python_processes(jobs) as ranks:
            yield ranks


def _jobs_on_hosts(
    num_ranks: int, arguments: list, folder: Path | None, hosts: Sequence[Host], environment: dict[str, str]
) -> list[dict]:
    """Return the arguments of `PythonProcess` for each rank. Rank 0 has the store."""
    per_host, jobs = num_ranks // len(hosts), []
    for rank in range(num_ranks):
        host = hosts[rank // per_host]
        variables = _rank_variables(rank, num_ranks, per_host, hosts[0].address, 29500)
        variables |= {**host.environment, **environment}
        jobs.append({"arguments": [ON_HOST, host.name, *arguments], "folder": folder, "environment": variables})
    return jobs


def run_ranks(
    num_ranks: int,
    arguments: list,
    seconds: float,
    folder: Path | None = None,
    hosts: Sequence[Host] = (),
    **environment: str,
) -> str:
    """Run `python ARGUMENTS` as ranks on CPUs, divided among the hosts.

    Returns:
        The standard output of all ranks, rank 0 first.

    Raises:
        AssertionError: if a rank fails or runs longer than `seconds`. All ranks are killed. The message contains the
            output of the failed ranks.
    """
    with started_ranks(num_ranks, arguments, seconds, folder, hosts, **environment) as ranks:
        _wait_for_all(ranks, time.monotonic() + seconds)
        failed = {rank: process for rank, process in enumerate(ranks) if process.returncode != 0}
        assert not failed, f"{arguments[0]} failed:\n" + "\n".join(
            f"rank {rank} {'was still running' if process.returncode is None else f'ended with {process.returncode}'}:"
            f"\n{process.stdout[-2000:]}\n{process.stderr[-8000:]}"
            for rank, process in failed.items()
        )
        return "".join(process.stdout for process in ranks)


def _wait_for_all(ranks: list[PythonProcess], deadline: float) -> None:
    """Wait until all ranks have ended, one rank has failed, or the deadline has passed."""
    running = list(ranks)
    while running and time.monotonic() < deadline:
        connection.wait([process.sentinel for process in running], deadline - time.monotonic())
        if any(process.returncode for process in running):
            return
        running = [process for process in running if process.returncode is None]


def run_torchrun(
    num_ranks: int, arguments: list, seconds: float, folder: Path | None = None, **environment: str
) -> str:
    """Run `python ARGUMENTS` under torchrun and return its standard output.

    Raises:
        AssertionError: if a rank fails. The message contains the end of the output.
    """
    command, environment = torchrun_command(num_ranks, arguments, environment)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    errors = done.stderr.partition("torch.distributed.elastic.multiprocessing")[0]
    assert done.returncode == 0, f"{arguments[0]} failed:\n{done.stdout[-2000:]}\n{errors[-8000:]}"
    return done.stdout


def torchrun_command(num_ranks: int, arguments: list, environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `python ARGUMENTS` under torchrun, and its environment."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [*map(str, [*command, num_ranks, *arguments])], {**os.environ, "OMP_NUM_THREADS": "1", **environment}


def run_worker(script: str, num_ranks: int, out: Path, *arguments: str, device: str = "cpu", seconds: float = 300):
    """Run `workers/SCRIPT OUT ARGUMENTS..` on every rank and return the JSON that rank 0 wrote to OUT."""
    run = run_ranks if device == "cpu" else run_torchrun
    run(num_ranks, [WORKERS / script, out, *arguments], seconds)
    return json.loads(out.read_text())


def megatron_losses(
    script: Path,
    num_ranks: int,
    *flags: str,
    device: str,
    environment: dict[str, str] | None = None,
    hosts: Sequence[Host] = (),
) -> list[float]:
    """Run a Megatron training script with the launcher, in the script's folder, and return the losses that it logs.

    On CPUs the ranks are forked, unless the script's folder holds a Megatron of its own. `environment` adds variables.
    Forked ranks are divided among the hosts.
    """
    launcher, variables = megatron_launcher(device)
    variables |= environment or {}
    run = run_torchrun if device == "cuda" or (script.parent / "megatron").exists() else run_ranks
    options = {"hosts": hosts} if hosts else {}
    output = run(num_ranks, [*launcher, script, *flags], 300, script.parent, **options, **variables)
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]


@contextlib.contextmanager
def started_megatron(script: Path, num_ranks: int, *flags: str) -> Iterator[list[PythonProcess]]:
    """Start a Megatron training script with the launcher on CPUs, in the script's folder. Kill its ranks at the end."""
    launcher, variables = megatron_launcher("cpu")
    with started_ranks(num_ranks, [*launcher, script, *flags], 300, script.parent, **variables) as ranks:
        yield ranks


def megatron_launcher(device: str) -> tuple[list, dict[str, str]]:
    """Return the arguments of `python` before a Megatron training script, and environment variables."""
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONSAFEPATH": ""}  # "" is the default of users
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # Megatron compiles code with `python3`
    if device == "cuda":
        return ["-m", "megatron_sb.megatron.launch"], variables
    return [WORKERS / "megatron_on_cpu.py"], variables | {"TORCHDYNAMO_DISABLE": "1"}


def new_folder(path: Path) -> Path:
    """Create a folder on rank 0 and return it. Collective."""
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    return path


def end_worker(out: str, findings: dict) -> NoReturn:
    """Write the findings as JSON on rank 0, and end this rank."""
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(findings))
    end_rank()


def end_rank() -> NoReturn:
    """End a rank without running destructors. The destructors of gloo's threads sometimes abort the process."""
    dist.barrier()
    dist.destroy_process_group()
    for writer in multiprocessing.active_children():  # writers of checkpoints, which os._exit would leave running
        writer.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def failed_checks(num_ranks: int, device: str, checks: tuple[str, ...], out: Path, seconds: int) -> dict:
    """Run checks of workers/context_parallel_run.py. Return {check: {rank: traceback}} for each check that ran."""
    return run_worker("context_parallel_run.py", num_ranks, out, device, *checks, device=device, seconds=seconds)


def failures_on_cpus(
    checks: dict[int, tuple[str, ...]], folder: Path, seconds: int
) -> Callable[[int], dict[str, dict[str, str]]]:
    """Return a function of the number of ranks that runs their checks once. It returns {check: {rank: traceback}}."""

    @functools.cache
    def of(num_ranks: int) -> dict[str, dict[str, str]]:
        return failed_checks(num_ranks, "cpu", checks[num_ranks], folder / f"{num_ranks}_ranks.json", seconds)

    return of


def assert_passed(check: str, found: dict) -> None:
    """Assert that the check ran and passed on every rank."""
    assert check in found, f"{check} did not run, because {list(found)[-1]} failed"
    assert not found[check], "\n".join(f"rank {rank}:\n{text}" for rank, text in found[check].items())
