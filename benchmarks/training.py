"""Training steps of stick-breaking models beside softmax ones: tokens/s, model TFLOP/s, memory.

python benchmarks/training.py configs/dense_1b.yaml --lengths 4096 16384 65536

Both models are the trainer's own, with the same sizes, weights, optimizer and rows of random tokens, each a document:
they differ in the core attention (softmax: cuDNN through torch, after rotary embeddings fused by torch.compile). Random
weights would make logits of about 0, with which a stick is used up after some dozens of keys; they are changed so that
logits are about --logit, and with -11 nothing is skipped (0: random weights). What is skipped is counted and shown. A
time is the median over steps on one GPU: forward, backward and update, at a learning rate of 0. The first length is
measured again at the end, "again", to show how far the machine drifts.
"""

import argparse
import contextlib
import gc
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from timing import machine

from megatron_sb.training.config import TrainingConfig, load_config
from megatron_sb.training.data import PackedBatch
from megatron_sb.training.engine import engine as engine_module
from megatron_sb.training.throughput import model_flops

WARM_STEPS = 3
QUIET = 0.25  # of their random part is left in shifted queries and keys
COMMON = 2.0  # what all embeddings have in common, in standard deviations of what they have not
TRIED_TOKENS = 512  # in which weights are changed, and logits looked at
MODELS = ("stick_breaking", "softmax_rope")


@torch.no_grad()
def shift_logits(model: GPTModel, logit: float) -> None:
    """Make the logits of all layers about `logit` (at most 0), whatever the tokens are.

    All embeddings get a part in common, and are made large beside what layers add to them. Queries read that part with
    one sign and keys with the other, by weights that depend on how much of it a layer sees: so layers are changed in a
    forward.
    """
    embedding = model.embedding.word_embeddings.weight
    embedding /= embedding.std()
    embedding += COMMON
    config = model.config
    head_dim, groups = config.kv_channels, config.num_query_groups
    wanted = math.sqrt(-logit / math.sqrt(head_dim))  # in each place of a query, and less it of a key

    def change(module: torch.nn.Module, args: tuple) -> None:
        by_head = module.weight.view(groups, -1, head_dim, config.hidden_size)  # query heads, a key, a value head
        by_head[:, :-1] *= QUIET
        step = wanted / args[0].float().mean().item() / config.hidden_size
        by_head[:, :-2] += step
        by_head[:, -2] -= step

    hooks = [layer.self_attention.linear_qkv.register_forward_pre_hook(change) for layer in model.decoder.layers]
    tokens = torch.arange(TRIED_TOKENS, device=embedding.device)
    bounds = torch.tensor([0, TRIED_TOKENS], dtype=torch.int32, device=embedding.device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=TRIED_TOKENS,
        max_seqlen_kv=TRIED_TOKENS,
    )
    model(tokens[None], None, None, packed_seq_params=packed)
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def mean_logits(model: GPTModel) -> Iterator[list[float]]:
    """Collects the mean logit of each layer's first forward inside."""
    found: list[float] = []

    def look(module, args, kwargs) -> None:
        query, key = (x.detach().float().mean(1) for x in args[:2])  # (t, h, d) -> the mean head, as all have the same
        products = query[::7] @ key[::7].T / math.sqrt(query.shape[-1])
        found.append(products.mean().item())

    layers = model.decoder.layers
    hooks = [layer.self_attention.core_attention.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def shifted_weights(logit: float) -> Iterator[list[GPTModel]]:
    """Engines made inside have shifted logits, before their optimizer copies the weights. Yields their models."""
    backend = engine_module.MegatronBackend
    models: list[GPTModel] = []

    def with_shift(model: GPTModel, *args):
        if logit:
            shift_logits(model, logit)
        models.append(model)
        return backend(model, *args)

    with mock.patch.object(engine_module, "MegatronBackend", with_shift):
        yield models


def random_rows(length: int, tokens: int, vocab_size: int, rows_at_once: int) -> list[PackedBatch]:
    """Micro-batches of at most `tokens` random tokens together, a row a document of `length`."""
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(tokens // (length * rows_at_once)):
        drawn = generator.integers(vocab_size, size=length * rows_at_once + 1)
        bounds = np.arange(0, length * rows_at_once + 1, length, dtype=np.int32)
        batches.append(PackedBatch(drawn[:-1], drawn[1:], np.ones(len(drawn) - 1, dtype=bool), bounds))
    return batches


def step_seconds(engine: engine_module.Engine, batches: list[PackedBatch], tokens: int, seconds: float) -> list[float]:
    """Seconds of each step, after WARM_STEPS untimed ones."""
    taken: list[float] = []
    for step in range(WARM_STEPS + 100):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.train_step(batches, tokens, 0.0)
        torch.cuda.synchronize()
        if step >= WARM_STEPS:
            taken.append(time.perf_counter() - begin)
        if len(taken) >= 3 and sum(taken) > seconds:
            break
    return taken


def skipped_share(engine: engine_module.Engine, batches: list[PackedBatch], tokens: int) -> float:
    """Of the tiles of the attention's backward, over all layers."""
    engine.train_step(batches, tokens, 0.0, observe=True)
    counts = engine.attention_counts
    return (counts.skipped / counts.tiles).item()


def busiest(engine: engine_module.Engine, batches: list[PackedBatch], tokens: int, count: int) -> list[str]:
    """The kernels that take most of a step: milliseconds, launches, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.train_step(batches, tokens, 0.0)
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels)
    lines = [f"{k.self_device_time_total / 1e3:10.2f} {k.count:6d}  {k.key[:100]}" for k in kernels[:count]]
    return [f"{total / 1e3:10.2f} ms in all", *lines]


def measure(options: argparse.Namespace, config: TrainingConfig, model: str, lengths: list[int]) -> Iterator[dict]:
    """Lines of the table, of one model: the lengths, then, after several, the first of them again."""
    device = torch.device("cuda")
    with shifted_weights(options.logit) as models:
        engine = engine_module.Engine(config, model, config.stages[0], config.vocab_size, device)
    with mean_logits(models[0]) as logits:
        engine.train_step(random_rows(TRIED_TOKENS, TRIED_TOKENS, config.vocab_size, 1), TRIED_TOKENS, 0.0)
    for length, note in [*((length, "") for length in lengths), *([(lengths[0], "again")] if lengths[1:] else [])]:
        rows_at_once = max(1, options.tokens_at_once // length)
        batches = random_rows(length, max(options.tokens, length * rows_at_once), config.vocab_size, rows_at_once)
        tokens = sum(len(batch.tokens) for batch in batches)
        torch.cuda.reset_peak_memory_stats()
        times = step_seconds(engine, batches, tokens, options.seconds)
        second = statistics.median(times)
        for line in busiest(engine, batches, tokens, options.kernels) if options.kernels and not note else ():
            print(line, flush=True)
        flops = model_flops(config, model, config.vocab_size, [batch.cu_seqlens for batch in batches])
        yield {
            "model": model,
            "length": length,
            "note": note,
            "recompute": config.model.recompute,
            "mean_logits": [min(logits), max(logits)],
            "skipped": skipped_share(engine, batches, tokens) if model == "stick_breaking" else None,
            "tokens_per_second": tokens / second,
            "spread": (max(times) - min(times)) / second,
            "model_tflops": flops / second / 1e12,
            "gib": torch.cuda.max_memory_allocated() / 2**30,
        }
    engine.close()
    del engine, models
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """Measure what was asked for on one GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="over the file's")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384, 65536])
    parser.add_argument("--recompute-from", type=int, default=65536, help="lengths that recompute every layer")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, at most, or one micro-batch")
    parser.add_argument("--tokens-at-once", type=int, default=16384, help="of a micro-batch, or one row")
    parser.add_argument("--logit", type=float, default=-11.0, help="what logits are about; at most 0")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seconds", type=float, default=5.0, help="of timed steps in a cell, three steps at least")
    parser.add_argument("--kernels", type=int, default=0, help="show so many of a step's kernels, by their time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
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
                    f"{row['gib']:5.1f} GiB, spread {row['spread']:.1%}, layers' mean logits "
                    f"{row['mean_logits'][0]:.1f} to {row['mean_logits'][1]:.1f}"
                    + (f", {row['skipped']:.1%} skipped" if row["skipped"] is not None else ""),
                    flush=True,
                )
                if options.json:
                    arguments = vars(options) | {"json": None}
                    options.json.write_text(
                        json.dumps({"machine": here, "arguments": arguments, "rows": rows}, indent=1)
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
