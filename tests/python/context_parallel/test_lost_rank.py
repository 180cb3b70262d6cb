"""A rank dies, never arrives or rejects its call: the other ranks end with a message within the group's timeout."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.fork_server import PythonProcess
from support.launch import rank_environments, started_ranks
from support.messages import mentions

WORKER = Path(__file__).parents[1] / "workers" / "context_parallel_lost_rank.py"
NUM_RANKS = 3
TIMEOUT_SECONDS = 5
NCCL_TIMEOUT_SECONDS = 15  # the first call makes the communicator
NCCL_MARGIN_SECONDS = 45
# The watchdog waits this long, four times, for other ranks to dump their collectives. Its default is 15000.
NCCL_DUMP_MILLISECONDS = 1000
START_SECONDS = 120
# Added to the group's timeout: a rank may wait for one that itself waits, and the machine may be busy.
MARGIN_SECONDS = 3 * TIMEOUT_SECONDS


@contextmanager
def gloo_ranks(scenario: str, comm: str):
    """Start NUM_RANKS ranks on CPUs."""
    arguments = [WORKER, scenario, TIMEOUT_SECONDS, comm, "gloo"]
    with started_ranks(NUM_RANKS, arguments, START_SECONDS) as ranks:
        yield ranks
        if scenario.startswith("killed"):
            assert ranks[-1].wait(START_SECONDS) == -signal.SIGKILL


@contextmanager
def nccl_ranks(num_ranks: int, scenario: str, comm: str):
    """Start ranks on GPUs."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(NCCL_DUMP_MILLISECONDS)}
    command = [sys.executable, str(WORKER), scenario, str(NCCL_TIMEOUT_SECONDS), comm, "nccl"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with rank_environments(num_ranks, START_SECONDS) as variables:
        ranks = [subprocess.Popen(command, env=common | own, **pipes) for own in variables]
        try:
            yield ranks
            if scenario.startswith("killed"):
                assert ranks[-1].wait(timeout=START_SECONDS) == -signal.SIGKILL
        finally:
            for process in ranks:
                process.kill()
                process.communicate()


def wait_for_output(process: PythonProcess) -> str:
    """Return what a process that keeps running has printed, once it has printed a line."""
    deadline = time.monotonic() + START_SECONDS
    while "\n" not in process.stdout and time.monotonic() < deadline:
        time.sleep(0.05)
    return process.stdout


def assert_others_raised(ranks: list[PythonProcess]) -> None:
    """Assert that all ranks except the last raised an error that names the rank, within the timeout and a margin."""
    for rank, process in enumerate(ranks[:-1]):
        assert process.wait(START_SECONDS) == 0, f"rank {rank}:\n{process.stderr[-4000:]}"
        seconds, _, message = process.stdout.strip().partition(" ")
        assert re.search(mentions(f"rank {rank} {NUM_RANKS} failed"), message), process.stdout
        assert float(seconds) < TIMEOUT_SECONDS + MARGIN_SECONDS, process.stdout


@pytest.mark.parametrize(
    ("scenario", "comms"),
    [
        ("killed in forward", ("p2p",)),
        ("killed in backward", ("p2p", "all_gather", "a2a")),
        ("never arrives", ("p2p",)),
        ("rejects", ("p2p", "all_gather", "a2a")),
    ],
)
def test_other_ranks_raise_an_error(scenario, comms):
    """The error can be caught. The modes run at the same time, because the ranks mostly wait for the timeout."""
    with ExitStack() as stack:
        groups = [stack.enter_context(gloo_ranks(scenario, comm)) for comm in comms]
        for ranks in groups:
            assert_others_raised(ranks)
            if scenario == "rejects":
                for process in ranks[:-1]:
                    assert re.search(mentions("rejected rank 2 mass_threshold 1.5"), process.stdout), process.stdout
                assert re.search(mentions("mass_threshold 1.5"), wait_for_output(ranks[-1]))


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("scenario", "comm"),
    [("killed in forward", "all_gather"), ("killed in backward", "p2p"), ("never arrives", "a2a"), ("rejects", "p2p")],
)
def test_the_watchdog_ends_other_ranks_over_nccl(scenario, comm):
    """NCCL kernels cannot be interrupted, so torch's watchdog ends the process. Its message names the timeout."""
    with nccl_ranks(2, scenario, comm) as ranks:
        out, err = ranks[0].communicate(timeout=START_SECONDS)
        seconds = time.time() - float(re.search(r"^ready at ([0-9.]+)$", err, re.MULTILINE).group(1))
        assert "finished" not in out, out
        assert ranks[0].returncode != 0, f"{out}\n{err[-4000:]}"
        assert "Watchdog caught collective operation timeout" in err, f"{out}\n{err[-4000:]}"
        assert f"Timeout(ms)={NCCL_TIMEOUT_SECONDS * 1000}" in err, err[-4000:]
        assert seconds < NCCL_TIMEOUT_SECONDS + NCCL_MARGIN_SECONDS, f"{seconds:.0f} s\n{err[-4000:]}"
    print(f"{scenario}, {comm}: ended with {ranks[0].returncode} after {seconds:.0f} s")
