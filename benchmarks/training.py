"""Training steps of stick-breaking models beside softmax ones: tokens/s, model TFLOP/s, memory.

python benchmarks/training.py configs/dense_1b.yaml --lengths 4096 16384 65536

Both models are the trainer's own, with the same sizes, optimizer and rows of random tokens, a row one document: they
differ in the core attention (softmax: cuDNN through torch, after rotary embeddings fused by torch.compile). A time is
the median over steps on one GPU: forward, backward and update. The first length is measured again at the end, "again",
to show how far the machine drifts.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from timing import machine

from megatron_sb.config import TrainingConfig, load_config
from megatron_sb.megatron.engine import Engine
from megatron_sb.training.data import PackedBatch
from megatron_sb.training.throughput import model_flops

WARM_STEPS = 3
MODELS = ("stick_breaking", "softmax_rope")


def random_rows(length: int, tokens: int, vocab_size: int, rows_at_once: int) -> list[PackedBatch]:
    """Micro-batches of `tokens` random tokens together, a row a document of `length`."""
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(tokens // (length * rows_at_once)):
        drawn = generator.integers(vocab_size, size=length * rows_at_once + 1)
        bounds = np.arange(0, length * rows_at_once + 1, length, dtype=np.int32)
        batches.append(PackedBatch(drawn[:-1], drawn[1:], np.ones(len(drawn) - 1, dtype=bool), bounds))
    return batches


def step_seconds(engine: Engine, batches: list[PackedBatch], tokens: int, seconds: float) -> list[float]:
    """Seconds of each step, after WARM_STEPS untimed ones."""
    taken: list[float] = []
    for step in range(WARM_STEPS + 100):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.train_step(batches, tokens, 1e-4)
        torch.cuda.synchronize()
        if step >= WARM_STEPS:
            taken.append(time.perf_counter() - begin)
        if len(taken) >= 3 and sum(taken) > seconds:
            break
    return taken


def measure(options: argparse.Namespace, config: TrainingConfig, model: str, lengths: list[int]) -> Iterator[dict]:
    """Lines of the table, of one model: the lengths, then the first of them again."""
    device = torch.device("cuda")
    engine = Engine(config, model, config.stages[0], config.vocab_size, device)
    for length, note in [*((length, "") for length in lengths), (lengths[0], "again")]:
        tokens = max(options.tokens, length)
        batches = random_rows(length, tokens, config.vocab_size, max(1, options.tokens_at_once // length))
        torch.cuda.reset_peak_memory_stats()
        times = step_seconds(engine, batches, tokens, options.seconds)
        second = statistics.median(times)
        flops = model_flops(config, config.vocab_size, [batch.cu_seqlens for batch in batches])
        yield {
            "model": model,
            "length": length,
            "note": note,
            "recompute": config.model.recompute,
            "tokens_per_second": tokens / second,
            "spread": (max(times) - min(times)) / second,
            "model_tflops": flops / second / 1e12,
            "gib": torch.cuda.max_memory_allocated() / 2**30,
        }
    engine.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """Measure what was asked for on one GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="over the file's")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384, 65536])
    parser.add_argument("--recompute-from", type=int, default=65536, help="lengths that recompute every layer")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step")
    parser.add_argument("--tokens-at-once", type=int, default=16384, help="of a micro-batch, or one row")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seconds", type=float, default=5.0, help="of timed steps in a cell, three steps at least")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    here = machine()
    print(here, flush=True)
    rows = []
    for recompute in ("none", "full"):
        lengths = [length for length in options.lengths if (length >= options.recompute_from) == (recompute == "full")]
        overrides = ["parallel.ranks=1", "parallel.device=cuda", "compare=[stick_breaking]", *options.set]
        config = load_config(options.config, [*overrides, f"model.recompute={recompute}"])
        for model in options.models if lengths else ():
            for row in measure(options, config, model, lengths):
                rows.append(row)
                print(
                    f"{row['length']:6d} {row['note']:5s} {model:14s} recompute {recompute}: "
                    f"{row['tokens_per_second']:9,.0f} tokens/s, {row['model_tflops']:4.0f} model TFLOP/s, "
                    f"{row['gib']:5.1f} GiB, spread {row['spread']:.1%}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(
            json.dumps({"machine": here, "arguments": vars(options) | {"json": None}, "rows": rows}, indent=1)
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
