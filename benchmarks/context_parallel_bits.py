"""Compare the bits of context parallelism with "a2a" on 1, 2, 4 and 8 ranks: attention, and a model of two layers.

The ranks are forked on the CPUs of this machine, over gloo. Nothing is timed. The table has the first digits of SHA-256
hashes: of whole outputs and gradients, of the logits of a model, and of its losses in 20 steps of training. Training
sums gradients over the rows of a rank first, so these losses differ in the last bits.

python benchmarks/context_parallel_bits.py
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from forked_ranks import run_forked
from torch.nn.functional import cross_entropy

import megatron_sb as sb
from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM

ROWS, HEADS, HEAD_DIM = 1024, 16, 32
DOCUMENTS = torch.tensor([0, 100, 101, 700, 1000], dtype=torch.int32)  # 24 rows belong to none
SIZES = (1, 2, 4, 8)
STEPS = 20


def digest(*tensors: torch.Tensor) -> str:
    """Return the first digits of the hash of the bytes of tensors."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:10]


def attention(group, dtype: torch.dtype, documents: torch.Tensor | None, layout: str) -> str:
    """Return the hash of o, mass, dq, dk and dv of the whole sequence. The heads are grouped in pairs."""
    generator = torch.Generator().manual_seed(0)
    batch = () if documents is not None else (1,)
    shapes = [(*batch, ROWS, heads, HEAD_DIM) for heads in (HEADS, HEADS // 2, HEADS // 2, HEADS)]
    whole = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    plan = sb.ContextParallelPlan(group, ROWS, documents, layout)
    cut = {"layout": layout, "cu_seqlens": documents}
    q, k, v, do = (sb.shard_sequence(x, group, len(batch), **cut) for x in whole)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, mass = sb.context_parallel_attention(*leaves, plan=plan, comm="a2a", return_mass=True)
    gradients = torch.autograd.grad(o, leaves, do)
    gathered = [sb.unshard_sequence(x.detach(), group, len(batch), **cut) for x in (o, *gradients)]
    return digest(*gathered, sb.unshard_sequence(mass.detach(), group, 1 + len(batch), **cut))


def model(group) -> tuple[str, list[float]]:
    """Return the hash of the logits before training, and the losses of STEPS steps of SGD."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    decoder = StickBreakingForCausalLM(StickBreakingConfig(**sizes, num_attention_heads=8, initializer_range=0.1))
    ids = torch.randint(257, (STEPS, 1, ROWS))
    logits, losses = "", []
    for tokens in ids:
        plan = sb.ContextParallelPlan(group, ROWS)
        labels = tokens.roll(-1, dims=1)
        with sb.shared_sequence(plan, tokens, labels, comm="a2a") as (local, local_labels):
            found = decoder(local).logits
            gradients = torch.autograd.grad(
                cross_entropy(found[0], local_labels[0], reduction="sum") / ROWS, list(decoder.parameters())
            )
        whole = sb.unshard_sequence(found.detach(), group)
        logits = logits or digest(whole)
        losses.append(cross_entropy(whole[0], labels[0]).item())
        with torch.no_grad():
            for parameter, gradient in zip(decoder.parameters(), gradients, strict=True):
                dist.all_reduce(gradient, group=group)
                parameter -= 0.1 * gradient
    return logits, losses


def measure() -> None:
    """Compute the rows of the table on every number of ranks. Rank 0 prints them."""
    dist.init_process_group("gloo")
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    cases = {
        f"attention, {str(dtype).removeprefix('torch.')}, {'packed' if documents is not None else 'dense'}, {layout}": (
            dtype,
            documents,
            layout,
        )
        for dtype in (torch.float32, torch.bfloat16)
        for documents in (None, DOCUMENTS)
        for layout in ("zigzag", "contiguous", "balanced")
    }
    table: dict[str, dict[int, str]] = {}
    losses = {}
    for size, group in groups.items():
        if dist.get_rank() < size:
            for name, case in cases.items():
                table.setdefault(name, {})[size] = attention(group, *case)
            table.setdefault("logits of the model", {})[size], losses[size] = model(group)
        dist.barrier()
    if dist.get_rank() == 0:
        print_table(table, losses)
    dist.destroy_process_group()


def print_table(table: dict[str, dict[int, str]], losses: dict[int, list[float]]) -> None:
    """Print the hashes in Markdown, then the largest difference of a loss from that of one rank."""
    table[f"losses of {STEPS} steps"] = {
        size: digest(torch.tensor(found, dtype=torch.float64)) for size, found in losses.items()
    }
    print("| ranks |", " | ".join(map(str, SIZES)), "|")
    print("| --- |" + " --- |" * len(SIZES))
    for name, hashes in table.items():
        print("|", " | ".join([name, *(hashes[size] for size in SIZES)]), "|")
    for size, found in losses.items():
        largest = max(abs(x - y) / y for x, y in zip(found, losses[1], strict=True))
        print(f"{size} ranks: losses {found[0]:.6f} to {found[-1]:.6f}, largest relative difference {largest:.1e}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    run_forked(measure, SIZES[-1])
