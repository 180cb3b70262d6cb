"""Run one rank of a group over gloo. Its ranks agree on one call. Then the last rank makes another call, or fails.

    context_parallel_new_calls.py SCENARIO TIMEOUT_SECONDS COMM

Prints the seconds until this rank's call ended, the error's type and its message. The caller sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT.
"""

import contextlib
import resource
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import megatron_sb as sb

START_SECONDS = 120  # for the rendezvous on a busy machine


def main(scenario: str, timeout_seconds: float, comm: str) -> None:
    """Make the same call on every rank, then different ones."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would delay the end
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_SECONDS))
    ranks, is_last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
    plan = sb.ContextParallelPlan(group, 64 * ranks)
    q, k, v = (torch.randn(1, 64, ranks, 64, requires_grad=True) for _ in range(3))

    def attend(dtype: torch.dtype = torch.float32, **options) -> torch.Tensor:
        return sb.context_parallel_attention(*(x.to(dtype) for x in (q, k, v)), plan=plan, comm=comm, **options)

    o = attend()
    dist.barrier()
    start = time.monotonic()
    try:
        if scenario == "dtype":
            attend(torch.bfloat16 if is_last else torch.float32)
        elif scenario == "no_grad":
            with torch.set_grad_enabled(not is_last):
                attend()
        elif scenario == "backward":
            attend(torch.bfloat16) if is_last else o.sum().backward()
        elif scenario == "late":
            if not is_last:
                time.sleep(2 * timeout_seconds)
                start = time.monotonic()
            attend(torch.bfloat16 if is_last else torch.float32)
        elif scenario == "new on every rank":
            attend(scale=0.5 if is_last else 0.25)
        elif scenario == "another known call":  # the ranks use each other's data without an error
            for scale in (0.25, 0.5):
                attend(scale=scale)
            attend(scale=0.5 if is_last else 0.25)
            attend(scale=0.75)
        elif scenario == "repeated":
            if is_last:
                with contextlib.suppress(ValueError):
                    attend(scale=float("inf"))
            assert torch.equal(attend(), o), "the other ranks must get the data of the repeated call"
            assert attend(scale=0.75).isfinite().all(), "the ranks must still be able to agree"
        print("no error", flush=True)
    except (RuntimeError, ValueError) as error:
        print(f"{time.monotonic() - start:.1f} {type(error).__name__} {error}", flush=True)
    if scenario == "new on every rank":
        assert torch.equal(attend(), o), "the plan must still work after the error"
        assert attend(scale=0.5).isfinite().all(), "the ranks must still be able to agree"
    wait_for_all_ranks(4 * timeout_seconds)


def wait_for_all_ranks(seconds: float) -> None:
    """Wait over the store: the end of a process would end the transfers of the other ranks before their timeout."""
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):  # rank 0 has the server of the store, and may end first
        store.add("ended", 1)
        while store.add("ended", 0) < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
