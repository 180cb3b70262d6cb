"""Context parallelism under torchrun and gloo: many checks in one launch, each reported by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKERS = Path(__file__).parents[1] / "workers"
TIMEOUT_SECONDS = 240

EVERYTHING = (
    "same_answer_as_one_rank",
    "options_are_passed_on",
    "repeats_bit_for_bit",
    "subgroups",
    "a_plan_serves_many_calls",
    "strides_are_taken_as_they_are",
    "autocast",
    "gradients_of_one_result",
    "shard_and_unshard",
    "refuses_lengths_that_do_not_divide",
    "refuses_bad_offsets",
    "refuses_ranks_that_disagree",
    "refuses_bad_calls",
    "refuses_wrong_groups",
    "refuses_a_second_derivative",
)
CHECKS = {
    2: ("same_answer_as_one_rank", "groups_of_one_rank", "shard_and_unshard", "refuses_ranks_that_disagree"),
    3: ("same_answer_as_one_rank_in_short", "shard_and_unshard"),
    4: EVERYTHING,
    8: ("same_answer_as_one_rank_in_short", "refuses_ranks_that_disagree"),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What went wrong at a number of ranks: {check: {rank: traceback}}; one launch for each number."""
    launched = {}

    def of(num_ranks: int) -> dict[str, dict[str, str]]:
        if num_ranks not in launched:
            out = tmp_path_factory.mktemp("context_parallel") / "failures.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
            command += [str(WORKERS / "context_parallel_run.py"), str(out), *CHECKS[num_ranks]]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
            assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
            launched[num_ranks] = json.loads(out.read_text())
        return launched[num_ranks]

    return of


@pytest.mark.parametrize(("num_ranks", "check"), [(n, check) for n, checks in CHECKS.items() for check in checks])
def test_on_gloo(failures, num_ranks, check):
    """Each check passes on every rank."""
    found = failures(num_ranks)
    assert check in found, f"not reached: a check before it failed: {list(found)[-1]}"
    assert not found[check], "\n".join(f"rank {rank}:\n{text}" for rank, text in found[check].items())
