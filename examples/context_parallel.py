"""Split one sequence over two processes, and compare outputs and gradients with those of one process.

The tensors are in float64 on the CPU and no key is skipped, so the only differences are rounding errors. For CUDA
tensors, use the backend "nccl" and float32, bfloat16 or float16.

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

import os

import torch
import torch.distributed as dist

import megatron_sb as sb


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("Start this example with torchrun: torchrun --nproc-per-node 2 examples/context_parallel.py")
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    torch.manual_seed(0)  # the same numbers on every rank
    q, k, v = (torch.randn(1, 2048, 4, 64, dtype=torch.float64) for _ in range(3))

    plan = sb.ContextParallelPlan(group, seq_len=2048)  # make one for each batch and use it in all layers
    local = [sb.shard_sequence(x, group).requires_grad_() for x in (q, k, v)]
    out = sb.unshard_sequence(sb.context_parallel_attention(*local, plan=plan, mass_threshold=0.0), group)
    out.square().sum().backward()

    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    want = sb.stickbreaking_attention(*whole, mass_threshold=0.0)
    want.square().sum().backward()
    # Every rank computes the loss of the whole output, and gradients are those of the sum of all losses. Divide by the
    # number of ranks to get the gradient of one loss.
    dk = local[1].grad / dist.get_world_size()
    error_o = float((out - want).detach().abs().max())
    error_dk = float((dk - sb.shard_sequence(whole[1].grad, group)).abs().max())
    print(
        f"rank {dist.get_rank()}: {local[0].shape[1]} of 2048 tokens, error of out {error_o:.1e}, of dk {error_dk:.1e}"
    )
    assert error_o < 1e-12 and error_dk < 1e-12

    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that exits normally


if __name__ == "__main__":
    main()
