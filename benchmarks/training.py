"""Compare training steps of stick-breaking models with those of softmax models: tokens/s, model TFLOP/s, memory.

python benchmarks/training.py configs/dense_1b.yaml --lengths 4096 16384 65536

Both models are the trainer's, with the same sizes, weights, optimizer and rows. A row is one document of random tokens.
The models differ in the core attention. Softmax runs cuDNN through torch, after rotary embeddings fused by
torch.compile.

With random weights logits are about 0, and a stick is used up after some dozens of keys. The script therefore changes
the weights so that logits are about --logit. With -11 nothing is skipped; 0 keeps the random weights. The share of
skipped tiles is counted and printed. A time is the median over steps on one GPU: forward, backward and update at a
learning rate of 0. At the end the first length is measured again ("again"), which shows the drift of the machine.
"""

import argparse
import contextlib
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from timing import machine

from megatron_sb.megatron.gates import normalized
from megatron_sb.training.config import TrainingConfig, load_config
from megatron_sb.training.data import PackedBatch
from megatron_sb.training.engine import engine as engine_module
from megatron_sb.training.throughput import model_flops

QUIET = 0.25  # factor of the random part of shifted queries and keys
COMMON = 2.0  # common part of all embeddings, in standard deviations of the rest
TRIED_TOKENS = 512  # tokens of the forwards that change weights and measure logits
MODELS = ("stick_breaking", "softmax_rope")


@torch.no_grad()
def shift_logits(model: GPTModel, logit: float, forward: Callable[[], object]) -> None:
    """Change the weights so that the logits of all layers are about `logit` (at most 0) for any tokens.

    All embeddings get a common part, and become large compared with what layers add to them. Queries read the common
    part with one sign and keys with the other. The weights for this depend on the size of the common part in the input
    of a layer, so `forward`, which must run the model on any tokens, changes the layers one after another.
    Tensor-parallel ranks change their own heads.
    """
    embedding = model.embedding.word_embeddings.weight
    embedding /= embedding.std()
    embedding += COMMON
    config = model.config
    head_dim = config.kv_channels
    groups = config.num_query_groups // config.tensor_model_parallel_size
    wanted = math.sqrt(-logit / math.sqrt(head_dim))  # added to each channel of a query, subtracted from a key's

    def change(module: torch.nn.Module, args: tuple) -> None:
        # Dimension 1: the query heads of a KV head, its key, its value.
        by_head = module.weight.view(groups, -1, head_dim, config.hidden_size)
        by_head[:, :-1] *= QUIET
        step = wanted / normalized(args[0], module).float().mean().item() / config.hidden_size
        by_head[:, :-2] += step
        by_head[:, -2] -= step

    hooks = [layer.self_attention.linear_qkv.register_forward_pre_hook(change) for layer in model.decoder.layers]
    forward()
    for hook in hooks:
        hook.remove()


def try_model(model: GPTModel) -> None:
    """Run a forward of one document of TRIED_TOKENS tokens."""
    device = model.embedding.word_embeddings.weight.device
    tokens = torch.arange(TRIED_TOKENS, device=device)
    bounds = torch.tensor([0, TRIED_TOKENS], dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=TRIED_TOKENS,
        max_seqlen_kv=TRIED_TOKENS,
    )
    model(tokens[None], None, None, packed_seq_params=packed)


@contextlib.contextmanager
def mean_logits(model: GPTModel) -> Iterator[list[float]]:
    """Collect the mean logit of each layer in forwards inside the context. Yields the growing list."""
    found: list[float] = []

    def measure_logits(module, args, kwargs) -> None:
        # (t, h, d) or (s, b, h, d) -> mean over heads, which are alike
        query, key = (x.detach().float().flatten(0, -3).mean(1) for x in args[:2])
        products = query[::7] @ key[::7].T / math.sqrt(query.shape[-1])
        found.append(products.mean().item())

    layers = model.decoder.layers
    cores = [layer.self_attention.core_attention for layer in layers]
    hooks = [core.register_forward_pre_hook(measure_logits, with_kwargs=True) for core in cores]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def shifted_weights(logit: float) -> Iterator[list[GPTModel]]:
    """Shift the logits of engines made inside the context, before their optimizer copies the weights.

    Yields the list of their models.
    """
    backend = engine_module.MegatronBackend
    models: list[GPTModel] = []

    def with_shift(model: GPTModel, *args):
        if logit:
            shift_logits(model, logit, lambda: try_model(model))
        models.append(model)
        return backend(model, *args)

    with mock.patch.object(engine_module, "MegatronBackend", with_shift):
        yield models


def random_rows(length: int, tokens: int, vocab_size: int, rows_at_once: int) -> list[PackedBatch]:
    """Draw micro-batches with at most `tokens` random tokens in total. A row is one document of `length` tokens."""
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(tokens // (length * rows_at_once)):
        drawn = generator.integers(vocab_size, size=length * rows_at_once + 1)
        bounds = np.arange(0, length * rows_at_once + 1, length, dtype=np.int32)
        batches.append(PackedBatch(drawn[:-1], drawn[1:], np.ones(len(drawn) - 1, dtype=bool), bounds))
    return batches


def step_seconds(
    engine: engine_module.Engine, batches: list[PackedBatch], tokens: int, options: argparse.Namespace
) -> list[float]:
    """Return the seconds of each step, after --warm-steps untimed steps."""
    taken: list[float] = []
    for step in range(options.warm_steps + 100):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.train_step(batches, tokens, 0.0)
        torch.cuda.synchronize()
        if step >= options.warm_steps:
            taken.append(time.perf_counter() - begin)
        if len(taken) >= options.least_steps and sum(taken) > options.seconds:
            break
    return taken


def skipped_share(engine: engine_module.Engine, batches: list[PackedBatch], tokens: int) -> float:
    """Return the share of the tiles that the attention's backward skips, over all layers."""
    engine.train_step(batches, tokens, 0.0, observe=True)
    counts = engine.attention_counts
    return (counts.skipped / counts.tiles).item()


def busiest(engine: engine_module.Engine, batches: list[PackedBatch], tokens: int, count: int) -> list[str]:
    """Return lines with the kernels that take most of a step: milliseconds, launches, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.train_step(batches, tokens, 0.0)
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels)
    lines = [f"{k.self_device_time_total / 1e3:10.2f} {k.count:6d}  {k.key[:100]}" for k in kernels[:count]]
    return [f"{total / 1e3:10.2f} ms in all", *lines]


def measure(options: argparse.Namespace, config: TrainingConfig, model: str, lengths: list[int]) -> Iterator[dict]:
    """Yield the rows of one model: every length, and if there are several, the first one again."""
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
        times = step_seconds(engine, batches, tokens, options)
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


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that megatron_training.py has, too."""
    add = parser.add_argument
    add("config", metavar="CONFIG.yaml", help="configuration of megatron-sb train, of which the sizes are used")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of the file; repeatable")
    lengths = [4096, 16384, 65536]
    add("--lengths", nargs="+", type=int, default=lengths, help="tokens of a row (default: %(default)s)")
    add("--recompute-from", type=int, default=65536, help="recompute every layer from here on (default: %(default)s)")
    add("--tokens", type=int, default=65536, help="tokens of a step, at least a micro-batch (default: %(default)s)")
    add(
        "--tokens-at-once",
        type=int,
        default=16384,
        help="tokens of a micro-batch, at least a row (default: %(default)s)",
    )
    add("--logit", type=float, default=-11.0, help="mean logit, at most 0 (default: %(default)s)")
    add("--json", type=Path, help="file for all measurements (default: none)")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_arguments(parser)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=MODELS, help="models to measure (default: both)")
    add("--seconds", type=float, default=5.0, help="seconds of timed steps (default: %(default)s)")
    add("--least-steps", type=int, default=3, help="timed steps, also if they take longer (default: %(default)s)")
    add("--warm-steps", type=int, default=3, help="steps before the timed ones (default: %(default)s)")
    add("--kernels", type=int, default=0, help="number of slowest kernels to print (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Measure the requested models and lengths on one GPU."""
    options = parse()
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
