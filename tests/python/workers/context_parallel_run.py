"""Run named checks of context parallelism and write the failures, by check and rank, as JSON.

    context_parallel_run.py OUT.json DEVICE CHECK..

Exact answers that other runs can use are kept in the folder of OUT.json.
DEVICE is cpu, with gloo, or cuda, with NCCL and a GPU for each rank. With SB_RANKS_PER_HOST=n in the environment, NCCL
treats every n consecutive ranks as a host and connects hosts over sockets of this machine. Hosts share GPUs if there
are too few.
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
import context_parallel_bytes
import context_parallel_gpus
import context_parallel_models
import context_parallel_refusals
import context_parallel_softmax

MODULES = (
    context_parallel_accuracy,
    context_parallel_bytes,
    context_parallel_models,
    context_parallel_refusals,
    context_parallel_gpus,
    context_parallel_softmax,
)

TIMEOUT_SECONDS = 60


def failure(check: str) -> str:
    """Run a check and return the traceback of this rank, or "" if it passed."""
    (function,) = {getattr(module, check) for module in MODULES if hasattr(module, check)}
    torch.manual_seed(0)  # the same numbers on every rank
    try:
        function(dist.group.WORLD)
    except Exception:
        return traceback.format_exc()
    return ""


def start(device: str) -> None:
    """Initialise the process group, and make `device` the default of new tensors."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    if ranks_per_host := int(os.environ.get("SB_RANKS_PER_HOST", "0")):
        host = int(os.environ["RANK"]) // ranks_per_host
        os.environ |= {"NCCL_HOSTID": f"host{host}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)


def main(out: str, device: str, checks: list[str]) -> None:
    """Run the checks in order. Stop after a failure, because the ranks may be out of step."""
    start(device)
    context_parallel_accuracy.answers_folder = Path(out).parent
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
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
