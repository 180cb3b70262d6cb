"""Compare training steps of stick-breaking models with those of softmax models: tokens/s, model TFLOP/s, memory.

python benchmarks/training.py configs/dense_1b.yaml --lengths 4096 16384 65536
python benchmarks/training.py RUN/config.yaml --checkpoint RUN/MODEL/checkpoints    # trained weights, real text

Both models are the trainer's, with the same sizes, weights, optimizer and rows. A row is one document of random tokens.
The models differ in the core attention. Softmax runs cuDNN or FlashAttention-2 through torch, after rotary embeddings
fused by torch.compile.

With random weights logits are about 0, and a stick is used up after some dozens of keys. The script therefore changes
the weights so that logits are about --logit. With -11 nothing is skipped; 0 keeps the random weights. The share of
skipped tiles is counted and printed. A time is the median over steps on one GPU: forward, backward and update at a
learning rate of 0. At the end the first length is measured again ("again"), which shows the drift of the machine.

With --checkpoint, rows are held-out text of the run, the same for all models: the beginnings of documents that are
longer than a row, or consecutive documents joined into one sequence if no document is so long. The model of the
checkpoint is measured with its trained weights, and again with changed weights, so that every tile is computed. Softmax
has the trained weights too. It computes every tile with any weights.
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from arguments import at_most_0, seconds, whole_number
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from report import output_file
from timing import machine, on_gpu, synchronize
from torch.nn.attention import SDPBackend

from megatron_sb.baselines.softmax import kernels
from megatron_sb.megatron.core_attention import StickBreakingCoreAttention
from megatron_sb.megatron.gates import normalized
from megatron_sb.training.checkpoint import check_whole, load, newest_checkpoint
from megatron_sb.training.config import TrainingConfig, load_config
from megatron_sb.training.data import PackedBatch, pack
from megatron_sb.training.documents import Subset, load_corpus
from megatron_sb.training.engine import engine as engine_module
from megatron_sb.training.loading import on_one_rank
from megatron_sb.training.throughput import model_flops
from megatron_sb.validation import is_of_user, message_of

QUIET = 0.25  # factor of the random part of shifted queries and keys
COMMON = 2.0  # common part of all embeddings, in standard deviations of the rest
TRIED_TOKENS = 512  # tokens of the forwards that change weights and measure logits
MODELS = ("stick_breaking", "softmax_rope")
SOFTMAX_KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Contender:
    """What is measured in turn.

    Attributes:
        model: a name in config.attention.
        weights: "changed" to logits of --logit, or "trained".
        kernels: of softmax, a key of SOFTMAX_KERNELS. "" for stick-breaking.
    """

    model: str
    weights: str
    kernels: str = ""

    @property
    def name(self) -> str:
        """The model, and in short what distinguishes it from the contenders with the same model."""
        return f"{self.model}, {self.kernels or self.weights}"


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
    tokens = torch.arange(TRIED_TOKENS, device=device) % model.vocab_size
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
    """Collect the mean logit of each layer in forwards inside the context. Yields the growing list.

    The mean is over all pairs of a query and a key, and over heads. It does not include reach and rotations.
    """
    found: list[float] = []

    def measure_logits(module, args, kwargs) -> None:
        # (t, h, d) or (s, b, h, d) -> (rows, h, d), with a key for each query head
        query, key = (x.detach().float().flatten(0, -3) for x in args[:2])
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logit = (query.mean(0) * key.mean(0)).sum(-1).mean()  # the mean of the products of all pairs
        scale = query.shape[-1] ** -0.5
        if isinstance(module, StickBreakingCoreAttention):
            scale = module.scale
            if module.options.logits == "euclidean":  # -|q - k|^2
                logit = 2 * logit - sum(x.square().sum(-1).mean() for x in (query, key))
        found.append(scale * logit.item())

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
    name = "MegatronBackend" if on_gpu() else "TorchBackend"
    backend = getattr(engine_module, name)
    models: list[GPTModel] = []

    def with_shift(model: GPTModel, *args):
        if logit:
            shift_logits(model, logit, lambda: try_model(model))
        models.append(model)
        return backend(model, *args)

    with mock.patch.object(engine_module, name, with_shift):
        yield models


class RandomRows:
    """Rows of random tokens. Each is one document.

    Attributes:
        kind: describes the rows.
    """

    kind = "random tokens"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def micro_batches(self, length: int, count: int, rows_at_once: int) -> list[PackedBatch]:
        """Return `count` micro-batches with `rows_at_once` rows of `length` tokens each."""
        generator = np.random.default_rng(0)
        batches = []
        for _ in range(count):
            drawn = generator.integers(self._vocab_size, size=length * rows_at_once + 1)
            bounds = np.arange(0, length * rows_at_once + 1, length, dtype=np.int32)
            batches.append(PackedBatch(drawn[:-1], drawn[1:], np.ones(len(drawn) - 1, dtype=bool), bounds))
        return batches


class TextRows:
    """Rows of held-out text. Attention sees each row as one document. The methods are those of `RandomRows`.

    Attributes:
        kind: describes the rows of the last call.
    """

    kind = ""

    def __init__(self, documents: Subset) -> None:
        self._documents = documents

    def micro_batches(self, length: int, count: int, rows_at_once: int) -> list[PackedBatch]:
        """See `RandomRows`. The chosen documents are spread evenly over all that are long enough."""
        num_rows = count * rows_at_once
        long_enough = np.flatnonzero(self._documents.lengths > length)
        if len(long_enough):
            chosen = long_enough[np.arange(num_rows) * len(long_enough) // num_rows]
            rows = [self._documents.read(int(document), 0, length + 1) for document in chosen]
            self.kind = f"beginnings of {len(set(chosen.tolist()))} documents"
        else:
            rows = list(itertools.islice(self._joined(length), num_rows))
            self.kind = "joined documents"
        return [pack(rows[at : at + rows_at_once], 1, 0) for at in range(0, num_rows, rows_at_once)]

    def _joined(self, length: int) -> Iterator[np.ndarray]:
        """Yield `length` + 1 tokens of consecutive documents each. After the last document comes the first."""
        tokens = np.empty(0, dtype=np.int64)
        for document in itertools.cycle(range(len(self._documents))):
            text = self._documents.read(document, 0, int(self._documents.lengths[document]))
            tokens = np.concatenate([tokens, text])
            while len(tokens) > length:
                yield tokens[: length + 1]
                tokens = tokens[length:]


def step_seconds(
    engine: engine_module.Engine, batches: list[PackedBatch], tokens: int, options: argparse.Namespace
) -> list[float]:
    """Return the seconds of each step, after --warm-steps untimed steps."""
    taken: list[float] = []
    for step in range(options.warm_steps + 100):
        synchronize()
        begin = time.perf_counter()
        engine.train_step(batches, tokens, 0.0)
        synchronize()
        if step >= options.warm_steps:
            taken.append(time.perf_counter() - begin)
        if len(taken) >= options.least_steps and sum(taken) > options.seconds:
            break
    return taken


def skipped_share(engine: engine_module.Engine, batches: list[PackedBatch]) -> float:
    """Return the share of the tiles that are skipped, over all layers and rows."""
    skipped = tiles = 0.0
    for batch in batches:  # a step observes its first micro-batch only
        engine.train_step([batch], len(batch.tokens), 0.0, observe=True)
        counts = engine.attention_counts
        skipped, tiles = skipped + counts.skipped.sum().item(), tiles + counts.tiles.sum().item()
    return skipped / tiles


def busiest(engine: engine_module.Engine, batches: list[PackedBatch], tokens: int, count: int) -> list[str]:
    """Return lines with the kernels that take most of a step: milliseconds, launches, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.train_step(batches, tokens, 0.0)
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels)
    lines = [f"{k.self_device_time_total / 1e3:10.2f} {k.count:6d}  {k.key[:100]}" for k in kernels[:count]]
    return [f"{total / 1e3:10.2f} ms in all", *lines]


@contextlib.contextmanager
def opened(
    options: argparse.Namespace, config: TrainingConfig, contender: Contender
) -> Iterator[tuple[engine_module.Engine, GPTModel]]:
    """Yield an engine of the contender, and its model. Inside the context, softmax uses the contender's kernels."""
    device = torch.device("cuda" if on_gpu() else "cpu")
    backends = [SOFTMAX_KERNELS[contender.kernels]] if contender.kernels else kernels.CUDA_BACKENDS
    with mock.patch.object(kernels, "CUDA_BACKENDS", backends):
        with shifted_weights(options.logit if contender.weights == "changed" else 0.0) as models:
            stage = replace(config.stages[-1], loss="tokens")  # without a teacher
            engine = engine_module.Engine(config, contender.model, stage, config.vocab_size, device)
        if contender.weights == "trained":
            load(engine, options.checkpoint)
        try:
            yield engine, models.pop()
        finally:
            engine.close()


def measure(
    options: argparse.Namespace,
    config: TrainingConfig,
    contender: Contender,
    lengths: list[int],
    rows: RandomRows | TextRows,
) -> Iterator[dict]:
    """Yield the measurements of one contender: every length, and if there are several, the first one again."""
    with opened(options, config, contender) as (engine, model):
        with mean_logits(model) as logits:
            engine.train_step(rows.micro_batches(TRIED_TOKENS, 1, 1), TRIED_TOKENS, 0.0)
        for length, note in [*((n, "") for n in lengths), *([(lengths[0], "again")] if lengths[1:] else [])]:
            torch.compiler.reset()  # jobs have one length; torch stops to compile a function after several shapes
            rows_at_once = max(1, options.tokens_at_once // length)
            batches = rows.micro_batches(length, max(1, options.tokens // (length * rows_at_once)), rows_at_once)
            tokens = sum(len(batch.tokens) for batch in batches)
            if on_gpu():
                torch.cuda.reset_peak_memory_stats()
            times = step_seconds(engine, batches, tokens, options)
            second = statistics.median(times)
            gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu() else 0.0  # before skipped_share
            for line in busiest(engine, batches, tokens, options.kernels) if options.kernels and not note else ():
                print(line, flush=True)
            flops = model_flops(config, contender.model, config.vocab_size, [batch.cu_seqlens for batch in batches])
            yield {
                "model": contender.model,
                "weights": contender.weights,
                "kernels": contender.kernels,
                "length": length,
                "note": note,
                "rows": f"{tokens // length} of {rows.kind}",
                "recompute": config.model.recompute,
                "mean_logits": [min(logits), max(logits)],
                "skipped": None if contender.kernels else skipped_share(engine, batches),
                "tokens_per_second": tokens / second,
                "spread": (max(times) - min(times)) / second,
                "model_tflops": flops / second / 1e12,
                "gib": gib,
            }


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the script with one line in place of a traceback for an error of the user's files or settings."""
    try:
        yield
    except Exception as error:
        if not is_of_user(error):
            raise
        raise SystemExit(message_of(error)) from None


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that megatron_training.py has, too."""
    add = parser.add_argument
    add("config", metavar="CONFIG.yaml", help="configuration of megatron-sb train, of which the sizes are used")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of the file; repeatable")
    lengths = [4096, 16384, 65536]
    add("--lengths", nargs="+", type=whole_number(1), default=lengths, help="tokens of a row (default: %(default)s)")
    add(
        "--recompute-from",
        type=whole_number(0),
        default=65536,
        help="recompute every layer from here on (default: %(default)s)",
    )
    add(
        "--tokens",
        type=whole_number(1),
        default=65536,
        help="tokens of a step, at least a micro-batch (default: %(default)s)",
    )
    add(
        "--tokens-at-once",
        type=whole_number(1),
        default=16384,
        help="tokens of a micro-batch, at least a row (default: %(default)s)",
    )
    add("--logit", type=at_most_0, default=-11.0, help="mean logit, at most 0 (default: %(default)s)")
    add("--json", type=output_file, help="file for all measurements (default: none)")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_arguments(parser)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=MODELS,
        default=MODELS,
        help="models to measure; stick_breaking stands for the model of --checkpoint (default: both)",
    )
    add(
        "--softmax",
        nargs="+",
        choices=SOFTMAX_KERNELS,
        default=["cudnn"],
        help="kernels of softmax: cuDNN's, or FlashAttention-2 (default: %(default)s)",
    )
    add(
        "--checkpoint",
        type=Path,
        metavar="RUN/MODEL/checkpoints[/NAME]",
        help="trained weights of the run RUN, whose RUN/config.yaml is CONFIG.yaml: a checkpoint, or the newest one "
        "of a model (default: none, random tokens and changed weights)",
    )
    add("--seconds", type=seconds, default=5.0, help="seconds of timed steps (default: %(default)s)")
    add(
        "--least-steps",
        type=whole_number(1),
        default=3,
        help="timed steps, also if they take longer (default: %(default)s)",
    )
    add("--warm-steps", type=whole_number(0), default=3, help="steps before the timed ones (default: %(default)s)")
    add("--kernels", type=whole_number(0), default=0, help="number of slowest kernels to print (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.kernels and not on_gpu():
        parser.error("--kernels needs a GPU: the kernels of a GPU are printed")
    return options


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Return what to measure, one after the other. options.checkpoint, if there is one, names a single checkpoint."""
    trained = options.checkpoint is not None
    found = []
    if "stick_breaking" in options.models:
        model = options.checkpoint.parent.parent.name if trained else "stick_breaking"
        found += [Contender(model, weights) for weights in (["trained"] if trained else []) + ["changed"]]
    if "softmax_rope" in options.models:
        weights = "trained" if trained else "changed"
        found += [Contender("softmax_rope", weights, each) for each in options.softmax]
    return found


def parts_of(options: argparse.Namespace) -> list[tuple[TrainingConfig, list[int]]]:
    """Return configurations on one rank with their lengths: without recomputation, and with it."""
    overrides = [f"parallel.device={'cuda' if on_gpu() else 'cpu'}", "compare=[stick_breaking]", *options.set]
    parts = []
    for recompute in ("none", "full"):
        lengths = [n for n in options.lengths if (on_gpu() and n >= options.recompute_from) == (recompute == "full")]
        if lengths:
            of_part = [*overrides, f"model.recompute={recompute}"]
            parts.append((on_one_rank(load_config(options.config, of_part, any_layout=True)), lengths))
    return parts


def described(row: dict) -> str:
    """Return a line about a measurement."""
    name = Contender(row["model"], row["weights"], row["kernels"]).name
    line = (
        f"{row['length']:6d} {row['note']:5s} {name:23s} recompute {row['recompute']}: "
        f"{row['tokens_per_second']:9,.0f} tokens/s, {row['model_tflops']:4.0f} model TFLOP/s, "
        f"{row['gib']:5.1f} GiB, spread {row['spread']:.1%}, layers' mean logits "
        f"{row['mean_logits'][0]:.1f} to {row['mean_logits'][1]:.1f}, {row['rows']}"
    )
    return line if row["skipped"] is None else f"{line}, {row['skipped']:.1%} skipped"


def main(arguments: list[str] | None = None) -> None:
    """Measure the requested models and lengths on one GPU. Without a GPU, the times are those of a CPU."""
    options = parse(arguments)
    with one_line_errors():
        if options.checkpoint is not None:
            if not (options.checkpoint / "progress.json").exists():
                options.checkpoint = newest_checkpoint(options.checkpoint)
            check_whole(options.checkpoint)
        parts = parts_of(options)
        config, _ = parts[0]
        rows = TextRows(load_corpus(config).validation) if options.checkpoint else RandomRows(config.vocab_size)
    if on_gpu():
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu() else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    here = machine()
    print(here, flush=True)
    found = []
    for config, lengths in parts:
        for contender in contenders(options):
            for row in measure(options, config, contender, lengths, rows):
                found.append(row)
                print(described(row), flush=True)
                if options.json:
                    about = vars(options) | {"json": None, "checkpoint": options.checkpoint and str(options.checkpoint)}
                    options.json.write_text(json.dumps({"machine": here, "arguments": about, "rows": found}, indent=1))
            gc.collect()  # the engine of this contender
            if on_gpu():
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
