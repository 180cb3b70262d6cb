"""Compare training steps of Megatron-Core models with Transformer Engine's layers: tokens/s and memory.

python benchmarks/megatron_training.py configs/dense_1b.yaml --lengths 4096 16384 65536
python benchmarks/megatron_training.py configs/dense_350m.yaml --dry-run    # toy sizes without a GPU: tries the script
torchrun --nproc-per-node 4 benchmarks/megatron_training.py configs/dense_1b.yaml --context-parallel 4

The contenders are models with the same layers, which share their weights, gradients and optimizer. They differ in the
core attention: stick-breaking without positions, or Transformer Engine's softmax after its fused rotary embedding. The
kernels of softmax are cuDNN's, which Transformer Engine prefers on Hopper, or those of a flash-attn package.

As in training.py, the weights are changed so that logits are about --logit. With -11 nothing is skipped; the share of
skipped tiles is counted and printed. The contenders take turns by steps: forward, backward and update at a learning
rate of 0. A time is the median over a contender's steps; with several GPUs a step takes as long as on the slowest one.

With context parallelism, sequences are split in zigzag order. Stick-breaking chooses its mode itself ("auto"); softmax
uses Transformer Engine's context parallelism, in each mode of --cp-comm. Without --context-parallel, GPUs that no other
option uses are data-parallel. With --experts every layer is a mixture of experts: each has the MLP of CONFIG.yaml, a
token goes to two, and a random router loads all equally.

The fused kernels need a complete cuDNN. If Transformer Engine finds another one than torch's, set CUDNN_HOME to the
folder nvidia/cudnn beside the folder torch, and LD_PRELOAD to its lib/libcudnn.so.9. If LD_LIBRARY_PATH is set, put
that folder lib first in it, and all of its libcudnn*.so.9 into LD_PRELOAD.
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
from itertools import islice
from unittest import mock

import torch
import torch.distributed as dist
from arguments import seconds, whole_number
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from timing import machine, mixed_orders, on_gpu, synchronize
from training import TRIED_TOKENS, add_common_arguments, mean_logits, one_line_errors, shift_logits

from megatron_sb import shard_sequence
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
TOP_K = 2  # experts of a token
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


def parallelism(options: argparse.Namespace) -> dict:
    """Return the fields of TransformerConfig for the layout of the ranks and for experts."""
    fields = {
        "tensor_model_parallel_size": options.tensor_parallel,
        "sequence_parallel": options.tensor_parallel > 1 and on_gpu(),
        "context_parallel_size": options.context_parallel,
        "expert_model_parallel_size": options.expert_parallel,
        "expert_tensor_parallel_size": 1,
    }
    if options.experts == 0:
        return fields
    return fields | {
        "num_moe_experts": options.experts,
        "moe_router_topk": TOP_K,
        "moe_router_load_balancing_type": "none",
        "moe_router_force_load_balancing": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


def transformer_config(sizes: ModelConfig, options: argparse.Namespace) -> TransformerConfig:
    """Return the configuration of all contenders. `Contenders` changes recompute_granularity and cp_comm_type."""
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
        **parallelism(options),
    )


def peer_of(contender: str) -> str:
    """Return the key of PEERS of a softmax contender, whose name may go on with a mode of context parallelism."""
    return contender.partition(",")[0]


def build_model(config: TransformerConfig, training: TrainingConfig, contender: str, longest: int) -> GPTModel:
    """Build the model of a contender. On a CPU all have local layers with stick-breaking: there softmax needs a GPU."""
    softmax = contender != STICKS and on_gpu()
    experts = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    make_spec = get_gpt_layer_with_transformer_engine_spec if on_gpu() else get_gpt_layer_local_spec
    spec = make_spec(**experts, **({} if on_gpu() else LOCAL))
    deterministic = peer_of(contender) == "flash-deterministic"
    variables = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0" if deterministic else "1"}
    with mock.patch.dict(os.environ, variables):  # the layers read it when they are built
        model = GPTModel(
            config,
            spec if softmax else with_stickbreaking(spec, cp_comm="auto"),
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
    if contender == STICKS or not on_gpu():
        yield
        return
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    with mock.patch.dict(os.environ, PEERS[peer_of(contender)]):
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
        options: the command line.

    Attributes:
        names: of the contenders, in the order of their turns. Those of softmax under context parallelism end with its
            mode.
        mean_logits: the smallest and the largest mean logit of a layer.
    """

    def __init__(self, training: TrainingConfig, options: argparse.Namespace) -> None:
        comms = options.cp_comm if options.context_parallel > 1 else [None]
        softmax = {f"{peer}, {comm}" if comm else peer: comm for peer in options.peers for comm in comms}
        self.names = [STICKS, *softmax]
        self._config = transformer_config(training.model, options)
        torch.manual_seed(1)
        if on_gpu():
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        self._models: dict[str, GPTModel] = {}
        for name in self.names:
            self._config.cp_comm_type = softmax.get(name)  # the layers read it when they are built
            model = build_model(self._config, training, name, max(options.lengths))
            if self._models:
                share_parameters(self._models[STICKS], model)
            self._models[name] = model
        self.recompute(False)
        few = random_rows(options, options.context_parallel * TRIED_TOKENS, training.vocab_size)[0]
        shift_logits(self._models[STICKS], options.logit, lambda: self._loss(STICKS, few))
        with torch.no_grad(), mean_logits(self._models[STICKS]) as logits:
            self._loss(STICKS, few)
        self.mean_logits = [min(logits), max(logits)]
        backend = MegatronBackend if on_gpu() else TorchBackend
        self._backend = backend(self._models[STICKS], training.optimizer)

    def recompute(self, layers: bool) -> None:
        """Choose whether every layer is recomputed in the backward. Megatron-Core reads it in each forward."""
        self._config.recompute_granularity = "full" if layers else None

    def _loss(self, name: str, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of this rank's part of whole rows."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        group = parallel_state.get_context_parallel_group()
        local = [shard_sequence(x, group) for x in (tokens, positions, tokens.roll(-1, 1))]
        return self._models[name](*local[:2], None, labels=local[2]).mean()

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
    def skipped_share(self, tokens: torch.Tensor) -> float | None:
        """Return the share of the tiles that the attention's backward skips, over all layers.

        Under context parallelism they are not counted, and the result is None.
        """
        if self._config.context_parallel_size > 1:
            return None
        with observed(self._models[STICKS], tokens.device) as counts:
            self._loss(STICKS, tokens)
        return (counts.skipped.sum() / counts.tiles.sum()).item()


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64, device="cuda" if on_gpu() else "cpu")
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def take_turns(contenders: Contenders, batches: list[torch.Tensor], seconds: float) -> dict[str, Timings]:
    """Run a step of each contender in each round, for about `seconds` after WARM_ROUNDS untimed rounds.

    The order differs from round to round, in the same way on all ranks.
    """
    found = {name: Timings() for name in contenders.names}
    for round_number, order in enumerate(islice(mixed_orders(found), WARM_ROUNDS + MOST_ROUNDS)):
        for name in order:
            timings = found[name]
            if on_gpu():
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            begin = time.perf_counter()
            loss = contenders.step(name, batches)
            synchronize()
            second = slowest(time.perf_counter() - begin)
            if round_number >= WARM_ROUNDS:
                timings.seconds.append(second)
            timings.loss = loss.item()
            if on_gpu():
                timings.gib = max(timings.gib, torch.cuda.max_memory_allocated() / 2**30)
                timings.kernels = used_kernels() if name != STICKS else ""
        taken = [timings.seconds for timings in found.values()]
        if len(taken[0]) >= LEAST_ROUNDS and sum(map(sum, taken)) > seconds:
            break
    return found


def random_rows(options: argparse.Namespace, length: int, vocab_size: int) -> list[torch.Tensor]:
    """Draw the micro-batches of a step of this data-parallel rank, of random tokens (rows, length)."""
    device = "cuda" if on_gpu() else "cpu"
    generator = torch.Generator(device).manual_seed(parallel_state.get_data_parallel_rank())
    rows = max(1, options.tokens_at_once // length)
    count = max(1, options.tokens // (rows * length))
    return [torch.randint(vocab_size, (rows, length), generator=generator, device=device) for _ in range(count)]


def measure(options: argparse.Namespace, training: TrainingConfig) -> Iterator[dict]:
    """Yield a row for each length and contender."""
    contenders = Contenders(training, options)
    data_parallel = parallel_state.get_data_parallel_world_size()
    for length in options.lengths:
        recompute = on_gpu() and length >= options.recompute_from
        contenders.recompute(recompute)
        torch.compiler.reset()  # jobs have one length; torch stops to compile a function after several shapes
        batches = random_rows(options, length, training.vocab_size)
        skipped = contenders.skipped_share(batches[0])
        found = take_turns(contenders, batches, options.seconds)
        for name, timings in found.items():
            second, tokens = statistics.median(timings.seconds), data_parallel * sum(rows.numel() for rows in batches)
            yield {
                "contender": name,
                "kernels": timings.kernels,
                "length": length,
                "rows_at_once": len(batches[0]),
                "tokens": tokens,
                "recompute": recompute,
                "mean_logits": contenders.mean_logits,
                "skipped": skipped if name == STICKS else None,
                "tokens_per_second": tokens / second,
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
    if row["contender"] != STICKS:
        return f"{line}, ours is {row['ours_faster']:.3f} times as fast, {row['kernels']}"
    low, high = row["mean_logits"]
    line += f", layers' mean logits {low:.1f} to {high:.1f}"
    return line if row["skipped"] is None else f"{line}, {row['skipped']:.1%} of the tiles skipped"


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
    add("--seconds", type=seconds, default=20.0, help="seconds of all timed steps of a length (default: %(default)s)")
    add(
        "--tensor-parallel",
        type=whole_number(1),
        default=1,
        help="ranks that share heads and MLPs (default: %(default)s)",
    )
    add("--context-parallel", type=whole_number(1), default=1, help="ranks that share a row (default: %(default)s)")
    add(
        "--expert-parallel", type=whole_number(1), default=1, help="ranks that share the experts (default: %(default)s)"
    )
    add(
        "--experts",
        type=whole_number(0),
        default=0,
        help="experts of each layer; 0 is a dense model (default: %(default)s)",
    )
    comms = ["p2p", "all_gather", "a2a"]
    add("--cp-comm", nargs="+", choices=comms, default=["p2p", "a2a"], help="of softmax (default: %(default)s)")
    add("--dry-run", action="store_true", help="toy sizes and local layers, without a GPU and Transformer Engine")
    return parser.parse_args(arguments)


def check_layout(options: argparse.Namespace) -> None:
    """End the script if the ranks of torchrun cannot have the layout."""
    ranks = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    for names, size in (
        ("--tensor-parallel times --context-parallel", options.tensor_parallel * options.context_parallel),
        ("--expert-parallel", options.expert_parallel),
    ):
        if ranks % size:
            raise SystemExit(f"{names} must divide the number of ranks of torchrun, {ranks}, got {size}.")


def config_of(options: argparse.Namespace) -> TrainingConfig:
    """Return the configuration, of toy sizes in a dry run."""
    toy = [*(f"model.{value}" for value in DRY_RUN), f"data.vocab_size={DRY_RUN_VOCAB_SIZE}"] if options.dry_run else []
    fixed = [f"parallel.device={'cuda' if on_gpu() else 'cpu'}", "compare=[stick_breaking]"]
    return load_config(options.config, [*fixed, *toy, *options.set], any_layout=True)


def main(arguments: list[str] | None = None) -> None:
    """Measure all contenders and lengths on the GPUs of this host."""
    options = parse(arguments)
    if on_gpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    elif not options.dry_run:
        raise SystemExit("megatron_training.py needs a GPU. Use --dry-run to try it without one.")
    elif options.experts > 0:
        raise SystemExit("--experts needs a GPU: Megatron-Core's router puts its weights there.")
    check_layout(options)
    with one_line_errors():
        training = config_of(options)
    install_stand_ins()  # without Transformer Engine
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu() else "gloo", **alone)
    parallel_state.initialize_model_parallel(
        options.tensor_parallel,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    is_first = dist.get_rank() == 0
    here = machine() | versions()
    if is_first:
        print(here, flush=True)
    rows = []
    for row in measure(options, training):
        rows.append(row)
        if not is_first:
            continue
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
