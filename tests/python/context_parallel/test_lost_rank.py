"""A rank that is killed, never comes or refuses its call: the others end with a message, in the group's time-out."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "workers" / "context_parallel_lost_rank.py"
NUM_RANKS = 3
TIMEOUT_SECONDS = 5
NCCL_TIMEOUT_SECONDS = 15  # the first call makes the communicator
NCCL_MARGIN_SECONDS = 45
# For which the watchdog waits, four times, for others to write down what was under way; 15000 unless told.
NCCL_DUMP_MILLISECONDS = 1000
START_SECONDS = 120
# Beyond the group's time-out: a rank may wait for one that itself waits, and the machine may be busy.
MARGIN_SECONDS = 3 * TIMEOUT_SECONDS


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def ranks_of(num_ranks: int, scenario: str, seconds: int, comm: str, backend: str):
    """The processes of the ranks; without torchrun, which would kill all of them."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
    }
    if backend == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = str(NCCL_DUMP_MILLISECONDS)
    command = [sys.executable, str(WORKER), scenario, str(seconds), comm, backend]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(num_ranks)
    ]
    try:
        yield ranks
        if scenario.startswith("killed"):
            assert ranks[-1].wait(timeout=START_SECONDS) == -signal.SIGKILL
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("scenario", "comm"),
    [
        ("killed in forward", "p2p"),
        ("killed in backward", "p2p"),
        ("killed in backward", "all_gather"),
        ("killed in backward", "a2a"),
        ("never arrives", "p2p"),
        ("refuses", "p2p"),
        ("refuses", "all_gather"),
        ("refuses", "a2a"),
    ],
)
def test_a_lost_rank_ends_the_others(scenario, comm):
    """With an error that can be caught and names the rank and what it waited for."""
    with ranks_of(NUM_RANKS, scenario, TIMEOUT_SECONDS, comm, "gloo") as ranks:
        for rank, process in enumerate(ranks[:-1]):
            out, err = process.communicate(timeout=START_SECONDS)
            assert process.returncode == 0, f"rank {rank}:\n{err[-4000:]}"
            seconds, _, message = out.strip().partition(" ")
            assert message.startswith(f"context parallelism, rank {rank} of {NUM_RANKS}: "), out
            assert " failed: " in message, out
            assert float(seconds) < TIMEOUT_SECONDS + MARGIN_SECONDS, out
        if scenario == "refuses":
            assert "mass_threshold is 1.5" in ranks[-1].stdout.readline()


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("scenario", "comm"),
    [("killed in forward", "all_gather"), ("killed in backward", "p2p"), ("never arrives", "a2a"), ("refuses", "p2p")],
)
def test_a_lost_rank_ends_the_others_over_nccl(scenario, comm):
    """With torch's watchdog, which ends the process and says what timed out: kernels of NCCL cannot be called back."""
    with ranks_of(2, scenario, NCCL_TIMEOUT_SECONDS, comm, "nccl") as ranks:
        out, err = ranks[0].communicate(timeout=START_SECONDS)
        seconds = time.time() - float(re.search(r"^ready at ([0-9.]+)$", err, re.MULTILINE).group(1))
        assert "finished" not in out, out
        assert ranks[0].returncode != 0, f"{out}\n{err[-4000:]}"
        assert "Watchdog caught collective operation timeout" in err, f"{out}\n{err[-4000:]}"
        assert f"Timeout(ms)={NCCL_TIMEOUT_SECONDS * 1000}" in err, err[-4000:]
        assert seconds < NCCL_TIMEOUT_SECONDS + NCCL_MARGIN_SECONDS, f"{seconds:.0f} s\n{err[-4000:]}"
    print(f"{scenario}, {comm}: ended with {ranks[0].returncode} after {seconds:.0f} s")
