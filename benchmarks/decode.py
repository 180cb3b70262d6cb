"""Compare decoding against a KV cache, one query per sequence, with torch's attention on one GPU.

GB/s count all keys and values in the cache, even those that a kernel skips. "full" inputs have logits around -11, so no
stick is used up. With "randn" inputs a stick is used up after about 30 keys, and older keys need not be read. A time is
the median over rounds in which the contenders take turns, each with a cold L2 cache. All of them read the same cache
(b, s, h_kv, d). torch runs FlashAttention for bf16 and fp16, and its memory-efficient attention for fp32. These
compute softmax attention, so their output differs.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from arguments import whole_number
from attention import FULL_LOGIT, shift_logits
from table import table_main
from timing import DRY_RUN_FACTOR, Call, on_gpu, take_turns
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron_sb import stickbreaking_attention_with_kvcache

HEADS = ((32, 32, 128), (12, 12, 128), (32, 8, 128), (24, 24, 64))  # query heads, KV heads, head_dim
LENGTHS = (4096, 16384, 65536, 131072)
BATCHES = (1, 32)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARE_OF_MEMORY = 0.85  # of the free memory, for a cache
BLOCK_SIZE = 64


class Cache:
    """Memory for the largest cache. Every row of the table uses a part of it."""

    def __init__(self, most_elements: int, dtype: torch.dtype) -> None:
        self._memory = torch.empty(2, most_elements, dtype=dtype, device="cuda" if on_gpu() else "cpu")

    def draw(self, kind: str, batch: int, length: int, h: int, h_kv: int, d: int) -> list[Tensor]:
        """Draw q (b, 1, h, d), and k and v (b, length, h_kv, d), from a fixed seed. kind: "full" or "randn"."""
        generator = torch.Generator(self._memory.device).manual_seed(0)
        count = batch * length * h_kv * d
        k, v = (part[:count].view(batch, length, h_kv, d).normal_(generator=generator) for part in self._memory)
        q = torch.empty(batch, 1, h, d, dtype=k.dtype, device=k.device).normal_(generator=generator)
        if kind == "full":
            shift_logits(q, k, FULL_LOGIT)
        return [q, k, v]


def calls_of(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Return the calls of all contenders. "paged" is "ours" with a block table over the same cache."""
    batch, length = k.shape[:2]
    seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    pages = [x.view(batch * length // BLOCK_SIZE, BLOCK_SIZE, *x.shape[2:]) for x in (k, v)]
    table = torch.arange(len(pages[0]), dtype=torch.int32, device=q.device).view(batch, -1)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    groups = [q.transpose(1, 2).unflatten(1, (k.shape[2], -1)).flatten(2, 3), *heads_first[1:]]  # (b, h_kv, group, d)

    def ours():
        return stickbreaking_attention_with_kvcache(q, k, v, cache_seqlens=seqlens)

    def paged():
        return stickbreaking_attention_with_kvcache(q, *pages, cache_seqlens=seqlens, block_table=table)

    def flash():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(*heads_first, enable_gqa=q.shape[2] != k.shape[2])

    def efficient():
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]):  # the latter on CPUs
            return scaled_dot_product_attention(*groups)

    return {"ours": ours, "paged": paged, "torch": efficient if q.dtype == torch.float32 else flash}


def measure(cache: Cache, kind: str, batch: int, length: int, heads: tuple[int, int, int], seconds: float) -> dict:
    """Measure milliseconds and GB/s of every contender, and how many times faster than torch's attention "ours" is."""
    h, h_kv, d = heads
    q, k, v = cache.draw(kind, batch, length, *heads)
    ms = take_turns(calls_of(q, k, v), seconds=seconds)
    held = k.nbytes + v.nbytes
    return {
        "inputs": kind,
        "shape": f"b={batch} h={h}:{h_kv} d={d} keys={length}",
        "bytes": held,
        "ms": ms,
        "gbytes_per_s": {name: held / value / 1e6 for name, value in ms.items()},
        "times_faster": {name: ms["torch"] / ms[name] for name in ("ours", "paged")},
    }


def line(row: dict) -> str:
    """Format a row of the table."""
    times = " | ".join(f"{ms:.4f} ({row['gbytes_per_s'][name]:.0f})" for name, ms in row["ms"].items())
    faster = " | ".join(f"{row['times_faster'][name]:.2f}x" for name in ("ours", "paged"))
    return f"| {row['shape']} | {row['inputs']} | {times} | {faster} |"


def rows_that_fit(lengths: list[int], dtype: torch.dtype) -> list[tuple[int, int, tuple[int, int, int]]]:
    """Return (batch, length, heads) of the rows that fit in memory."""
    free = torch.cuda.mem_get_info()[0] * SHARE_OF_MEMORY if on_gpu() else 2**30
    rows = [(batch, length, heads) for heads in HEADS for batch in BATCHES for length in lengths]
    return [(b, s, heads) for b, s, heads in rows if 2 * dtype.itemsize * b * s * heads[1] * heads[2] <= free]


def rows(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the rows of every shape that fits in memory, with both kinds of inputs."""
    blocks = [length // BLOCK_SIZE for length in options.lengths]
    dtype = DTYPES[options.dtype]
    chosen = rows_that_fit([BLOCK_SIZE * (n if on_gpu() else max(1, n // DRY_RUN_FACTOR)) for n in blocks], dtype)
    if not chosen:
        raise SystemExit(f"--lengths must have a length whose cache fits in memory, got {options.lengths}")
    cache = Cache(max(b * s * heads[1] * heads[2] for b, s, heads in chosen), dtype)
    for batch, length, heads in chosen:
        for kind in ("full", "randn"):
            yield measure(cache, kind, batch, length, heads, options.seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of queries and cache (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number(BLOCK_SIZE, multiple=BLOCK_SIZE),
        default=list(LENGTHS),
        help=f"keys in the cache, multiples of {BLOCK_SIZE} (default: %(default)s)",
    )


def main(args: list[str] | None = None) -> None:
    """Measure every row that fits and print the table."""
    heads = ["shape", "inputs", "ours ms (GB/s)", "ours, paged", "torch", "ours faster", "paged faster"]
    table_main(__doc__, args, heads, rows, line, 0.15, add_arguments)


if __name__ == "__main__":
    sys.exit(main())
