"""Compare StickBreakingSelfAttention on sequences sharded over two ranks with whole sequences.

Runs on 2 ranks: `self_attention.py OUT.json`. Writes the differences as JSON.
"""

import contextlib
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_sb as sb

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.launch import end_worker

CHANNELS = 32
OFFSETS = (0, 4, 12, 24)
CASES = {
    "dense": {},
    "ring": {"comm": "p2p"},
    "contiguous": {"layout": "contiguous", "comm": "all_gather"},
    "balanced": {"layout": "balanced", "packed": True},
    "packed": {"packed": True},
    "plan": {"packed": True, "plan": True},
    "norm alone": {"remainder_bias": False},
    "gates": {"forget_gate": True, "forget_gate_loss": 10.0},
    "gates, plan": {"packed": True, "plan": True, "forget_gate": True, "forget_gate_loss": 10.0},
    "gates, unequal ranks": {"offsets": (0, 3), "forget_gate": True, "forget_gate_loss": 10.0},
    "gates, a rank without rows": {"offsets": (0, 1), "forget_gate": True, "forget_gate_loss": 10.0},
    "gates, unequal ranks, plan": {
        "offsets": (0, 2, 5),
        "packed": True,
        "plan": True,
        "forget_gate": True,
        "forget_gate_loss": 10.0,
    },
    "gates, shared sequence": {"offsets": (0, 3), "shared": True, "forget_gate": True, "forget_gate_loss": 10.0},
}


def difference(
    *,
    offsets: tuple[int, ...] = OFFSETS,
    packed: bool = False,
    plan: bool = False,
    shared: bool = False,
    remainder_bias: bool = True,
    forget_gate: bool = False,
    forget_gate_loss: float = 0.0,
    **options,
) -> dict[str, float]:
    """Return the norm of the difference of the output, and the largest one of all gradients summed over the ranks."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    switches = {"remainder_bias": remainder_bias, "head_norm": True}
    switches |= {"forget_gate": forget_gate, "forget_gate_loss": forget_gate_loss}
    whole = sb.StickBreakingSelfAttention(CHANNELS, 4, 2, **switches)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    own_group = None if plan or shared else group
    sharded = sb.StickBreakingSelfAttention(CHANNELS, 4, 2, **switches, cp_group=own_group, **options)
    sharded.load_state_dict(whole.state_dict())

    cu_seqlens = torch.tensor(offsets, dtype=torch.int32) if packed else None
    rows = offsets[-1]
    x, weight = (torch.randn(*((rows,) if packed else (2, rows)), CHANNELS) for _ in range(2))
    cut = {"dim": 0 if packed else 1, "layout": options.get("layout", "zigzag"), "cu_seqlens": cu_seqlens}
    call = {"plan": sb.ContextParallelPlan(group, cu_seqlens=cu_seqlens)} if plan else {"cu_seqlens": cu_seqlens}

    expected = whole(x, cu_seqlens=cu_seqlens)
    with sb.shared_sequence(sb.ContextParallelPlan(group, rows)) if shared else contextlib.nullcontext():
        out = sharded(sb.shard_sequence(x, group, **cut), **call)
    (expected * weight).sum().backward()
    (out * sb.shard_sequence(weight, group, **cut)).sum().backward()
    for parameter in sharded.parameters():
        dist.all_reduce(parameter.grad)
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    return {
        "out": (out - sb.shard_sequence(expected, group, **cut)).norm().item(),  # a rank may have no rows
        "gradients": torch.stack([(a.grad - b.grad).abs().max() for a, b in pairs]).max().item(),
        "parameters": len(list(sharded.parameters())),
    }


def main(out: str) -> None:
    """Write the differences of all cases."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {name: difference(**options) for name, options in CASES.items()}
    end_worker(out, found)


if __name__ == "__main__":
    main(sys.argv[1])
