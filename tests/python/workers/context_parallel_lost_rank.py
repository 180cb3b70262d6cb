"""Run one rank of a group. The last rank of the group is lost, or rejects a call that the others make.

    context_parallel_lost_rank.py SCENARIO TIMEOUT_SECONDS COMM gloo|nccl

Prints the seconds until this rank's call ended and the error it raised. The caller sets RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT and starts the ranks itself, because torchrun kills all ranks when one is lost.
"""

import os
import resource
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import megatron_sb as sb

START_SECONDS = 120  # for the rendezvous on a busy machine


def die() -> None:
    """End this process as the out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def finish(device: torch.device) -> None:
    """Wait for all kernels on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(scenario: str, timeout_seconds: float, comm: str, backend: str) -> None:
    """Lose the last rank before its second forward or in its backward, or let it arrive late or reject its call."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would delay the end
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", int(os.environ["RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=START_SECONDS))
    ranks, victim = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
    dist.barrier()
    plan = sb.ContextParallelPlan(group, 64 * ranks)
    dtype = torch.float32 if backend == "gloo" else torch.bfloat16
    q, k, v = (torch.randn(1, 64, ranks, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    o = sb.context_parallel_attention(q, k, v, plan=plan, comm=comm)
    dist.barrier()
    finish(device)
    print(f"ready at {time.time():.1f}", file=sys.stderr, flush=True)
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
        elif scenario == "rejects":
            sb.context_parallel_attention(q, k, v, plan=plan, comm=comm, **({"mass_threshold": 1.5} if victim else {}))
        finish(device)
        print("finished", flush=True)
    except (RuntimeError, ValueError) as error:
        print(f"{time.monotonic() - start:.1f} {error}", flush=True)
    if scenario == "rejects" and victim:
        time.sleep(10 * timeout_seconds)  # this process stays alive, so that only the timeout ends the others


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
    os._exit(0)
