"""Compare training steps of Megatron-Core models with Transformer Engine's layers: tokens/s and memory.

python benchmarks/megatron_training.py configs/dense_1b.yaml --lengths 4096 16384 65536
python benchmarks/megatron_training.py configs/dense_350m.yaml --dry-run    # toy sizes without a GPU: tries the script

The contenders are models with the same layers, which share their weights, gradients and optimizer. They differ in the
core attention: stick-breaking without positions, or Transformer Engine's softmax after its fused rotary embedding. The
kernels of softmax are cuDNN's, which Transformer Engine prefers on Hopper, or those of a flash-attn package.

As in training.py, the weights are changed so that logits are about --logit. With -11 nothing is skipped; the share of
skipped tiles is counted and printed. The contenders take turns by steps: forward, backward and update at a learning
rate of 0. A time is the median over a contender's steps on one GPU.

The fused kernels need a complete cuDNN. If Transformer Engine finds another one than torch's, set CUDNN_HOME to the
folder nvidia/cudnn beside the folder torch, and LD_PRELOAD to its lib/libcudnn.so.9.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from timing import machine, on_gpu
from training import add_common_arguments, mean_logits, shift_logits, try_model

from megatron_sb.megatron import install_stand_ins, with_stickbreaking
from megatron_sb.megatron.statistics import observed
from megatron_sb.training.config import ModelConfig, TrainingConfig, load_config
from megatron_sb.training.engine.backends import MegatronBackend, TorchBackend

STICKS = "stick-breaking"
# The variables with which Transformer Engine chooses its kernels, for each softmax contender.
CUDNN = {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
FLASH = {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"}
PEERS = {"cudnn": CUDNN, "flash": FLASH, "flash-deterministic": FLASH}
WARM_ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 1, 3, 30
LOCAL = {"normalization": "RMSNorm"}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DRY_RUN = [
    *("num_layers=2", "hidden_size=32", "num_heads=2", "num_kv_heads=2", "head_dim=16", "ffn_hidden_size=64"),
    *("num_parameters=null", "precision=fp32"),
]
DRY_RUN_VOCAB_SIZE = 512  # as many as try_model uses


@dataclass
class Timings:
    """Measurements of one contender at one length.

    Attributes:
        seconds: of each step.
        loss: of the last step. Contenders with the same attention have the same loss.
        gib: peak of the allocated memory.
        kernels: the softmax kernels that ran; "" for stick-breaking.
    """

    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0
    gib: float = 0.0
    kernels: str = ""


def transformer_config(sizes: ModelConfig) -> TransformerConfig:
    """Return the configuration of all contenders. `Contenders.recompute` changes its recompute_granularity."""
    fused = on_gpu()
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        num_query_groups=sizes.num_kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.ffn_hidden_size,
        init_method_std=sizes.init_std,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not fused,
        bf16=fused,
        params_dtype=torch.bfloat16 if fused else torch.float32,
        gradient_accumulation_fusion=False,  # needs Apex in the output layer
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        cross_entropy_loss_fusion=fused,
        cross_entropy_fusion_impl="te",
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **FULL_RECOMPUTE,
    )


def build_model(config: TransformerConfig, training: TrainingConfig, contender: str, longest: int) -> GPTModel:
    """Build the model of a contender. On a CPU all have local layers with stick-breaking: there softmax needs a GPU."""
    softmax = contender in PEERS and on_gpu()
    spec = get_gpt_layer_with_transformer_engine_spec() if on_gpu() else get_gpt_layer_local_spec(**LOCAL)
    variables = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0" if contender == "flash-deterministic" else "1"}
    with mock.patch.dict(os.environ, variables):  # the layers read it when they are built
        model = GPTModel(
            config,
            spec if softmax else with_stickbreaking(spec),
            training.model.padded_vocab_size(training.vocab_size),
            longest,
            position_embedding_type="rope" if softmax else "none",
            share_embeddings_and_output_weights=training.model.tie_word_embeddings,
        )
    # The dtype is that of the norms too, as in Megatron's scripts.
    return model.to(device="cuda" if on_gpu() else "cpu", dtype=config.params_dtype)


def share_parameters(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Replace the parameters of `target` by those of `source`, which must have the same names."""
    names = [name for name, _ in source.named_parameters()]
    different = {*names} ^ {name for name, _ in target.named_parameters()}
    if different:
        raise ValueError(f"source and target must have the same parameters, got different ones: {sorted(different)}.")
    for name in names:
        owner, _, own_name = name.rpartition(".")
        setattr(target.get_submodule(owner), own_name, source.get_parameter(name))


@contextlib.contextmanager
def kernels_of(contender: str) -> Iterator[None]:
    """Make Transformer Engine choose the kernels of a contender in the block."""
    if contender not in PEERS or not on_gpu():
        yield
        return
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    with mock.patch.dict(os.environ, PEERS[contender]):
        _attention_backends["backend_selection_requires_update"] = True  # else the last choice stays
        yield


def used_kernels() -> str:
    """Return the kernels that Transformer Engine chose last."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    if _attention_backends["use_flash_attention"]:
        return f"flash-attn {_attention_backends['flash_attention_backend']}"
    if _attention_backends["use_fused_attention"]:
        return f"cuDNN, sub-backend {int(_attention_backends['fused_attention_backend'])}"
    return "unfused"


class Contenders:
    """Models that share weights, gradients and one optimizer. The model of STICKS is always among them.

    Args:
        training: sizes and vocabulary.
        peers: keys of PEERS.
        longest: tokens of the longest row.
        logit: mean logit of the changed weights.

    Attributes:
        names: of the contenders, in the order of their turns.
        mean_logits: the smallest and the largest mean logit of a layer.
    """

    def __init__(self, training: TrainingConfig, peers: list[str], longest: int, logit: float) -> None:
        self.names = [STICKS, *peers]
        self._config = transformer_config(training.model)
        torch.manual_seed(1)
        if on_gpu():
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        self._models: dict[str, GPTModel] = {}
        for name in self.names:
            model = build_model(self._config, training, name, longest)
            if self._models:
                share_parameters(self._models[STICKS], model)
            self._models[name] = model
        self.recompute(False)
        shift_logits(self._models[STICKS], logit)
        with torch.no_grad(), mean_logits(self._models[STICKS]) as logits:
            try_model(self._models[STICKS])
        self.mean_logits = [min(logits), max(logits)]
        backend = MegatronBackend if on_gpu() else TorchBackend
        self._backend = backend(self._models[STICKS], training.optimizer)

    def recompute(self, layers: bool) -> None:
        """Choose whether every layer is recomputed in the backward. Megatron-Core reads it in each forward."""
        self._config.recompute_granularity = "full" if layers else None

    def _loss(self, name: str, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self._models[name](tokens, positions, None, labels=tokens.roll(-1, 1)).mean()

    def step(self, name: str, batches: list[torch.Tensor]) -> torch.Tensor:
        """Train a contender on micro-batches of tokens (rows, length) and return their mean loss."""
        total = torch.zeros((), device=batches[0].device)
        with kernels_of(name):
            for index, tokens in enumerate(batches):
                with self._backend.accumulate(last=index == len(batches) - 1):
                    loss = self._loss(name, tokens) / len(batches)
                    loss.backward()
                total += loss.detach()
        self._backend.step(0.0)
        return total

    @torch.no_grad()
    def skipped_share(self, tokens: torch.Tensor) -> float:
        """Return the share of the tiles that the attention's backward skips, over all layers."""
        with observed(self._models[STICKS], tokens.device) as counts:
            self._loss(STICKS, tokens)
        return (counts[0].skipped / counts[0].tiles).item()


def _synchronize() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def take_turns(contenders: Contenders, batches: list[torch.Tensor], seconds: float) -> dict[str, Timings]:
    """Run a step of each contender in each round, for about `seconds` after WARM_ROUNDS untimed rounds."""
    found = {name: Timings() for name in contenders.names}
    for round_number in range(WARM_ROUNDS + MOST_ROUNDS):
        for name, timings in found.items():
            if on_gpu():
                torch.cuda.reset_peak_memory_stats()
            _synchronize()
            begin = time.perf_counter()
            loss = contenders.step(name, batches)
            _synchronize()
            if round_number >= WARM_ROUNDS:
                timings.seconds.append(time.perf_counter() - begin)
            timings.loss = loss.item()
            if on_gpu():
                timings.gib = max(timings.gib, torch.cuda.max_memory_allocated() / 2**30)
                timings.kernels = used_kernels() if name in PEERS else ""
        taken = [timings.seconds for timings in found.values()]
        if len(taken[0]) >= LEAST_ROUNDS and sum(map(sum, taken)) > seconds:
            break
    return found


def random_rows(options: argparse.Namespace, length: int, vocab_size: int) -> list[torch.Tensor]:
    """Draw the micro-batches of a step, of random tokens (rows, length)."""
    device = "cuda" if on_gpu() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    rows = max(1, options.tokens_at_once // length)
    count = max(1, options.tokens // (rows * length))
    return [torch.randint(vocab_size, (rows, length), generator=generator, device=device) for _ in range(count)]


def measure(options: argparse.Namespace, training: TrainingConfig) -> Iterator[dict]:
    """Yield a row for each length and contender."""
    contenders = Contenders(training, options.peers, max(options.lengths), options.logit)
    for length in options.lengths:
        recompute = on_gpu() and length >= options.recompute_from
        contenders.recompute(recompute)
        torch.compiler.reset()  # jobs have one length; torch stops to compile a function after several shapes
        batches = random_rows(options, length, training.vocab_size)
        skipped = contenders.skipped_share(batches[0])
        found = take_turns(contenders, batches, options.seconds)
        for name, timings in found.items():
            second = statistics.median(timings.seconds)
            yield {
                "contender": name,
                "kernels": timings.kernels,
                "length": length,
                "rows_at_once": len(batches[0]),
                "tokens": sum(tokens.numel() for tokens in batches),
                "recompute": recompute,
                "mean_logits": contenders.mean_logits,
                "skipped": skipped if name == STICKS else None,
                "tokens_per_second": sum(tokens.numel() for tokens in batches) / second,
                "ours_faster": second / statistics.median(found[STICKS].seconds),
                "seconds": timings.seconds,
                "loss": timings.loss,
                "gib": timings.gib,
            }


def described(row: dict) -> str:
    """Return a line about a row."""
    spread = (max(row["seconds"]) - min(row["seconds"])) / statistics.median(row["seconds"])
    line = (
        f"{row['length']:6d} {row['contender']:20s} {row['tokens_per_second']:9,.0f} tokens/s, "
        f"{len(row['seconds'])} steps, spread {spread:.1%}, loss {row['loss']:.5f}, "
        f"{row['gib']:5.1f} GiB"
    )
    if row["recompute"]:
        line += ", recomputed"
    if row["skipped"] is None:
        return f"{line}, ours is {row['ours_faster']:.3f} times as fast, {row['kernels']}"
    low, high = row["mean_logits"]
    return f"{line}, layers' mean logits {low:.1f} to {high:.1f}, {row['skipped']:.1%} of the tiles skipped"


def versions() -> dict[str, str]:
    """Return versions of the packages that matter."""
    import megatron.core

    found = {"megatron-core": megatron.core.__version__}
    if on_gpu():
        import transformer_engine_torch

        found["cudnn of transformer-engine"] = str(transformer_engine_torch.get_cudnn_version())
    for name in ("transformer-engine", "flash-attn", "flash-attn-3", "flash-attn-4"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_arguments(parser)
    add = parser.add_argument
    add("--peers", nargs="+", choices=PEERS, default=["cudnn"], help="softmax contenders (default: %(default)s)")
    add("--seconds", type=float, default=20.0, help="seconds of all timed steps of a length (default: %(default)s)")
    add("--dry-run", action="store_true", help="toy sizes and local layers, without a GPU and Transformer Engine")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all contenders and lengths on one GPU."""
    options = parse(arguments)
    if on_gpu():
        torch.cuda.set_device(0)
    elif not options.dry_run:
        raise SystemExit("megatron_training.py needs a GPU. Use --dry-run to try it without one.")
    install_stand_ins()  # without Transformer Engine
    dist.init_process_group("nccl" if on_gpu() else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    toy = [*(f"model.{value}" for value in DRY_RUN), f"data.vocab_size={DRY_RUN_VOCAB_SIZE}"] if options.dry_run else []
    device = "cuda" if on_gpu() else "cpu"
    fixed = ["parallel.ranks=1", f"parallel.device={device}", "compare=[stick_breaking]"]
    training = load_config(options.config, [*fixed, *toy, *options.set])
    here = machine() | versions()
    print(here, flush=True)
    rows = []
    for row in measure(options, training):
        rows.append(row)
        print(described(row), flush=True)
        if options.json:
            about = {name: str(value) for name, value in vars(options).items() if name != "json"}
            options.json.write_text(json.dumps({"machine": here, "arguments": about, "rows": rows}, indent=1))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
