"""Ranks that make different calls get errors that name what differs, and no process is killed."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.launch import started_ranks
from support.messages import mentions

WORKER = Path(__file__).parents[1] / "workers" / "context_parallel_new_calls.py"
TIMEOUT_SECONDS = 5
START_SECONDS = 120
MARGIN_SECONDS = 3 * TIMEOUT_SECONDS  # the machine may be busy
DTYPES = "q's dtype rank Float BFloat16"
# The asking rank names the pass if the other rank has answered in time, else what is new.
PASSES = "pass rank backward forward"


@pytest.mark.parametrize(
    ("scenario", "cases", "expected"),
    [
        ("dtype", ((2, "p2p"), (2, "all_gather"), (2, "a2a"), (3, "p2p")), DTYPES),
        ("no_grad", ((2, "p2p"), (2, "all_gather")), "gradients rank yes no"),
        ("backward", ((2, "p2p"), (2, "a2a")), PASSES),
        ("late", ((2, "p2p"),), DTYPES),
        ("new on every rank", ((2, "p2p"), (3, "all_gather")), "scale rank 0.25 0.5"),
        ("another known call", ((2, "p2p"), (3, "a2a")), "disagree order of earlier calls rank 0"),
    ],
)
def test_every_rank_raises_an_error_that_names_what_differs(scenario, cases, expected):
    """The cases run at the same time, because the ranks mostly wait for the timeout."""
    with ExitStack() as stack:
        groups = []
        for num_ranks, comm in cases:
            arguments = [WORKER, scenario, TIMEOUT_SECONDS, comm]
            groups.append((comm, stack.enter_context(started_ranks(num_ranks, arguments, START_SECONDS))))
        for comm, ranks in groups:
            for rank, process in enumerate(ranks):
                where = f"{comm}, rank {rank} of {len(ranks)}"
                assert process.wait(START_SECONDS) == 0, f"{where}:\n{process.stdout}\n{process.stderr[-4000:]}"
                is_new = expected == PASSES and rank == len(ranks) - 1 and re.search(mentions(DTYPES), process.stdout)
                assert is_new or re.search(mentions(expected), process.stdout), f"{where}: {process.stdout}"
                seconds = float(process.stdout.split()[0])
                limit = TIMEOUT_SECONDS if scenario == "new on every rank" else TIMEOUT_SECONDS + MARGIN_SECONDS
                assert seconds < limit, f"{where}: {process.stdout}"


def test_a_rejected_call_may_be_repeated():
    """The last rank repeats a call with a valid argument. The other ranks do not notice, and all agree on new calls."""
    for num_ranks, comm in ((2, "p2p"), (3, "a2a")):
        arguments = [WORKER, "repeated", TIMEOUT_SECONDS, comm]
        with started_ranks(num_ranks, arguments, START_SECONDS) as ranks:
            for rank, process in enumerate(ranks):
                assert process.wait(START_SECONDS) == 0, f"{comm}, rank {rank}:\n{process.stderr[-4000:]}"
                assert process.stdout == "no error\n", f"{comm}, rank {rank}: {process.stdout}"
