"""A rank that is killed, or never comes: the others end with a message, within the group's time-out."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "workers" / "context_parallel_lost_rank.py"
NUM_RANKS = 3
TIMEOUT_SECONDS = 5
START_SECONDS = 120
# Beyond the group's time-out: a rank may wait for one that itself waits, and the machine may be busy.
MARGIN_SECONDS = 3 * TIMEOUT_SECONDS


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("scenario", "comm"),
    [
        ("killed in forward", "p2p"),
        ("killed in backward", "p2p"),
        ("killed in backward", "all_gather"),
        ("killed in backward", "a2a"),
        ("never arrives", "p2p"),
    ],
)
def test_a_lost_rank_ends_the_others(scenario, comm):
    """Without torchrun, which would kill all ranks."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(NUM_RANKS),
    }
    command = [sys.executable, str(WORKER), scenario, str(TIMEOUT_SECONDS), comm]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        for rank, process in enumerate(ranks[:-1]):
            out, err = process.communicate(timeout=START_SECONDS)
            assert process.returncode == 0, f"rank {rank}:\n{err[-4000:]}"
            seconds, _, message = out.strip().partition(" ")
            assert message.startswith(f"context parallelism, rank {rank} of {NUM_RANKS}: "), out
            assert " failed: " in message, out
            assert float(seconds) < TIMEOUT_SECONDS + MARGIN_SECONDS, out
        if scenario != "never arrives":
            assert ranks[-1].wait(timeout=START_SECONDS) == -signal.SIGKILL
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
