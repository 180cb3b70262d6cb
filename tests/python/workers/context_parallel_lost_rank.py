"""One rank of a group in which the last rank is lost; prints what this rank ended with, and after how many seconds.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them (which would end all ranks when one is killed):
context_parallel_lost_rank.py SCENARIO TIMEOUT_SECONDS COMM
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import megatron_sb as sb

START_SECONDS = 120  # for the processes to find each other on a busy machine


def die() -> None:
    """End as the out-of-memory killer would end it."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(scenario: str, timeout_seconds: float, comm: str) -> None:
    """Lose the last rank before its second forward, in its backward, or by silence."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_SECONDS))
    victim = dist.get_rank() == dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
    dist.barrier()
    plan = sb.ContextParallelPlan(group, 64 * dist.get_world_size())
    q, k, v = (torch.randn(1, 64, 3, 16, requires_grad=True) for _ in range(3))
    o = sb.context_parallel_attention(q, k, v, plan=plan, comm=comm)
    dist.barrier()
    start = time.monotonic()
    try:
        if scenario == "killed in forward":
            if victim:
                die()
            sb.context_parallel_attention(q, k, v, plan=plan, comm=comm)
        elif scenario == "killed in backward":
            if victim:
                o.register_hook(lambda _: die())
            o.sum().backward()
        elif scenario == "never arrives":
            if victim:
                time.sleep(10 * timeout_seconds)
            sb.context_parallel_attention(q, k, v, plan=plan, comm=comm)
        print("finished", flush=True)
    except RuntimeError as error:
        print(f"{time.monotonic() - start:.1f} {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
    os._exit(0)
