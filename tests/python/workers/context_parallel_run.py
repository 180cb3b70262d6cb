"""Runs named checks of context parallelism on gloo; writes what went wrong, by check and rank, as JSON.

torchrun --nproc-per-node N context_parallel_run.py OUT.json CHECK..
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import context_parallel_accuracy
import context_parallel_refusals

TIMEOUT_SECONDS = 60


def failure(check: str) -> str:
    """Run a check on every rank and return what it raised here, "" for nothing."""
    module = context_parallel_refusals if check.startswith("refuses") else context_parallel_accuracy
    torch.manual_seed(0)  # the same numbers on every rank
    try:
        getattr(module, check)(dist.group.WORLD)
    except Exception:
        return traceback.format_exc()
    return ""


def main(out: str, checks: list[str]) -> None:
    """Run the checks in their order and stop after one that fails, as the ranks may be out of step then."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    failures = {}
    for check in checks:
        mine = failure(check)
        by_rank = [""] * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
        failures[check] = {rank: text for rank, text in enumerate(by_rank) if text}
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(failures))
        if failures[check]:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
