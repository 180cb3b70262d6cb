"""Contradictions between fields of a training configuration, each named with its values."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_sb.training.config.parameters import count_parameters
from megatron_sb.training.config.schema import (
    SoftmaxConfig,
    StageConfig,
    StickBreakingConfig,
    TrainingConfig,
)
from megatron_sb.training.config.types import ConfigError


def check(config: TrainingConfig) -> None:
    """Raise ConfigError for the first contradiction."""
    problems = (_list_problems, _model_problems, _attention_problems, _data_problems, _parallel_problems, _moe_problems)
    for find in problems:
        for problem in find(config):
            raise ConfigError(problem)
    for index, stage in enumerate(config.stages):
        for find in (_schedule_problems, _context_parallel_problems, _row_problems):
            for problem in find(config, stage, f"stages.{index}"):
                raise ConfigError(problem)


def needs_gpu(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """What a configuration asks for that a CPU does not have: the field with its value, and why."""
    model, parallel = config.model, config.parallel
    if model.precision == "bf16":
        yield "model.precision = 'bf16'", "its fp32 master weights are kept by Megatron's optimizer, which needs CUDA"
    if model.recompute != "none":
        yield f"model.recompute = {model.recompute!r}", "Megatron-Core saves and restores the GPU's generator"
    if model.moe is not None:
        yield f"model.moe.num_experts = {model.moe.num_experts}", "Megatron-Core's router and dispatchers need CUDA"
    if parallel.sequence_parallel:
        yield "parallel.sequence_parallel = True", "Megatron-Core forks the GPU's generator"


def _list_problems(config: TrainingConfig) -> Iterator[str]:
    stages = [stage.name for stage in config.stages]
    lists = {"stages": stages, "compare": config.compare}
    for name, attention in config.attention.items():
        if isinstance(attention, SoftmaxConfig):
            lists[f"attention.{name}.evaluated_scalings"] = attention.evaluated_scalings
    for path, names in lists.items():
        if not names:
            yield f"{path} = []: at least one is needed"
        if len(set(names)) != len(names):
            yield f"{path} = {list(names)!r}: names must differ"
    for name in config.compare:
        if name not in config.attention:
            known = list(config.attention)
            yield f"compare = {list(config.compare)!r}: {name!r} is not in attention, which has {known}"
    if config.initial_checkpoint is not None and len(config.compare) > 1:
        yield (
            f"initial_checkpoint = {config.initial_checkpoint!r} contradicts compare = {list(config.compare)}: it is "
            "one model's"
        )


def _model_problems(config: TrainingConfig) -> Iterator[str]:
    model = config.model
    if model.head_dim is None:
        yield (
            f"model.hidden_size = {model.hidden_size} must be a multiple of model.num_heads = {model.num_heads}, "
            "where model.head_dim is not given"
        )
        return
    if model.num_heads % model.num_kv_heads:
        yield f"model.num_heads = {model.num_heads} must be a multiple of model.num_kv_heads = {model.num_kv_heads}"
    if model.head_dim % 8 or model.head_dim > 256:
        yield (
            f"model.head_dim = {model.head_dim} (by default model.hidden_size / model.num_heads) must be a multiple of "
            "8 up to 256"
        )
    if config.parallel.device == "cpu":
        for field, why in needs_gpu(config):
            yield f"{field} contradicts parallel.device = 'cpu': {why}"


def _attention_problems(config: TrainingConfig) -> Iterator[str]:
    tensor = config.parallel.tensor_parallel_size
    for name in config.compare:
        attention, at = config.attention[name], f"attention.{name}"
        if isinstance(attention, StickBreakingConfig):
            yield from _logit_problems(config, attention, at)
            continue
        position = f"{at}.position = {attention.position!r}"
        if attention.position != "rope" and attention.evaluated_scalings != ("none",):
            yield f"{at}.evaluated_scalings = {list(attention.evaluated_scalings)} contradicts {position}: give [none]"
        if attention.position != "rope" and attention.rotary_base != SoftmaxConfig.rotary_base:
            yield f"{at}.rotary_base = {attention.rotary_base} contradicts {position}: no position is rotated"
        if attention.position in ("alibi", "fire") and tensor > 1:
            yield f"{position} contradicts parallel.tensor_parallel_size = {tensor}: its biases are not split"


def _logit_problems(config: TrainingConfig, attention: StickBreakingConfig, at: str) -> Iterator[str]:
    model, tensor, widest = config.model, config.parallel.tensor_parallel_size, 248
    if attention.forget_gate_loss > 0 and not attention.forget_gate:
        yield f"{at}.forget_gate_loss = {attention.forget_gate_loss} contradicts {at}.forget_gate = False"
    if attention.forget_gate and model.num_kv_heads < tensor:
        yield (
            f"{at}.forget_gate = True contradicts parallel.tensor_parallel_size = {tensor}: gates are cut by KV heads, "
            f"of which model.num_kv_heads = {model.num_kv_heads}"
        )
    if attention.logits == "euclidean" and model.head_dim and model.head_dim > widest:
        yield f"{at}.logits = 'euclidean' contradicts model.head_dim = {model.head_dim}: up to {widest} is allowed"


def _data_problems(config: TrainingConfig) -> Iterator[str]:
    yield from config.data.problems(config)
    expected = config.model.num_parameters
    total = count_parameters(config.model, config.attention[config.compare[0]], config.vocab_size).total
    if expected is not None and expected != total:
        yield f"model.num_parameters = {expected} contradicts the sizes of model, which make {total}"


def _parallel_problems(config: TrainingConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor_parallel_size
    if parallel.ranks % tensor:
        yield f"parallel.tensor_parallel_size = {tensor} must divide parallel.ranks = {parallel.ranks}"
    sizes = [("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)]
    if model.moe is None:  # experts are not split, they are spread by expert_parallel_size
        sizes.append(("ffn_hidden_size", model.ffn_hidden_size))
    for name, size in (*sizes, ("make_vocab_size_divisible_by", model.make_vocab_size_divisible_by)):
        if size % tensor:
            yield f"model.{name} = {size} must be a multiple of parallel.tensor_parallel_size = {tensor}"
    if parallel.sequence_parallel and tensor == 1:
        yield "parallel.sequence_parallel = True contradicts parallel.tensor_parallel_size = 1"
    if parallel.expert_parallel_size > 1 and model.moe is None:
        yield f"parallel.expert_parallel_size = {parallel.expert_parallel_size} contradicts model.moe = None"


def _moe_problems(config: TrainingConfig) -> Iterator[str]:
    moe, parallel = config.model.moe, config.parallel
    if moe is None:
        return
    expert = parallel.expert_parallel_size
    if moe.top_k > moe.num_experts:
        yield f"model.moe.top_k = {moe.top_k} exceeds model.moe.num_experts = {moe.num_experts}"
    if moe.load_balancing == "none" and moe.aux_loss_coefficient:
        yield (
            f"model.moe.aux_loss_coefficient = {moe.aux_loss_coefficient} contradicts model.moe.load_balancing = "
            "'none': give 0"
        )
    if moe.num_experts % expert:
        yield f"parallel.expert_parallel_size = {expert} must divide model.moe.num_experts = {moe.num_experts}"
    if parallel.ranks % expert:
        yield f"parallel.expert_parallel_size = {expert} must divide parallel.ranks = {parallel.ranks}"
    for name in ("hidden_size", "ffn_hidden_size") if moe.grouped_gemm else ():
        if getattr(config.model, name) % 8:
            yield f"model.{name} = {getattr(config.model, name)} must be a multiple of 8 with model.moe.grouped_gemm"
    if parallel.tensor_parallel_size > 1 and (expert == 1 or not parallel.sequence_parallel):
        yield (
            f"parallel.tensor_parallel_size = {parallel.tensor_parallel_size} with model.moe needs "
            "parallel.sequence_parallel = true and parallel.expert_parallel_size > 1"
        )


def _schedule_problems(config: TrainingConfig, stage: StageConfig, at: str) -> Iterator[str]:
    if stage.warmup_steps >= stage.steps:
        yield f"{at}.warmup_steps = {stage.warmup_steps} must be less than {at}.steps = {stage.steps}"
    if stage.schedule == "power" and stage.power_coefficient is None and stage.warmup_steps == 0:
        yield (
            f"{at}.schedule = 'power' contradicts {at}.warmup_steps = 0: without {at}.power_coefficient the power law "
            "starts where the warm-up ends"
        )
    if stage.power_coefficient is not None and stage.schedule != "power":
        yield f"{at}.power_coefficient = {stage.power_coefficient} contradicts {at}.schedule = {stage.schedule!r}"
    if stage.warmup_start_rate and stage.warmup_steps == 0:
        yield f"{at}.warmup_start_rate = {stage.warmup_start_rate} contradicts {at}.warmup_steps = 0"
    if stage.warmup_start_rate > stage.learning_rate:
        yield (f"{at}.warmup_start_rate = {stage.warmup_start_rate} exceeds {at}.learning_rate = {stage.learning_rate}")


def _context_parallel_problems(config: TrainingConfig, stage: StageConfig, at: str) -> Iterator[str]:
    parallel, size = config.parallel, stage.context_parallel_size
    groups = parallel.ranks // parallel.tensor_parallel_size
    if groups % size:
        by = f" / parallel.tensor_parallel_size = {groups}" if parallel.tensor_parallel_size > 1 else f" = {groups}"
        yield f"{at}.context_parallel_size = {size} must divide parallel.ranks{by}"
    if size > 1 and not any(map(config.breaks_sticks, config.compare)):
        yield (
            f"{at}.context_parallel_size = {size} contradicts compare = {list(config.compare)}: only stick-breaking "
            "attention runs with context parallelism"
        )
    levels = stage.hierarchical_context_parallel_sizes
    if levels and parallel.comm != "a2a+p2p":
        yield f"{at}.hierarchical_context_parallel_sizes = {list(levels)} contradicts parallel.comm = {parallel.comm!r}"
    if levels and (len(levels) != 2 or math.prod(levels) != size):
        yield (
            f"{at}.hierarchical_context_parallel_sizes = {list(levels)}: must be two sizes, a2a's and p2p's, whose "
            f"product is {at}.context_parallel_size = {size}"
        )
    if parallel.comm == "a2a+p2p" and size > 1 and not levels:
        yield f"parallel.comm = 'a2a+p2p' needs {at}.hierarchical_context_parallel_sizes"
    exchanging = {"a2a": size, "a2a+p2p": levels[0] if levels else 1}.get(parallel.comm, 1)
    heads, kv_heads = (n // parallel.tensor_parallel_size for n in (config.model.num_heads, config.model.num_kv_heads))
    if heads % exchanging or (kv_heads % exchanging and exchanging % kv_heads):
        yield (
            f"parallel.comm = {parallel.comm!r} exchanges heads between {exchanging} ranks in {at}: model.num_heads = "
            f"{config.model.num_heads} / parallel.tensor_parallel_size must be a multiple of them, and "
            f"model.num_kv_heads = {config.model.num_kv_heads} / parallel.tensor_parallel_size a multiple or a divisor"
        )


def _row_problems(config: TrainingConfig, stage: StageConfig, at: str) -> Iterator[str]:
    parallel = config.parallel
    multiple = config.row_multiple(stage)
    if stage.context_length % multiple:
        split = f" and parallel.tensor_parallel_size = {parallel.tensor_parallel_size}"
        yield (
            f"{at}.context_length = {stage.context_length} must be a multiple of {multiple}, "
            f"for {at}.context_parallel_size = {stage.context_parallel_size} and parallel.layout = {parallel.layout!r}"
            f"{split if parallel.sequence_parallel else ''}"
        )
    needed, padded = config.needed_pad_multiple(stage), config.pad_multiple(stage)
    if padded % needed or stage.context_length % padded:
        yield (
            f"{at}.pad_multiple = {padded} must be a multiple of {needed}, which the stage's ranks need, and divide "
            f"{at}.context_length = {stage.context_length}"
        )
    for model in config.compare:
        groups = config.data_parallel_size(model, stage)
        per_group = stage.rows_per_step // groups
        if stage.rows_per_step % groups:
            yield (
                f"{at}.rows_per_step = {stage.rows_per_step} must be a multiple of {groups}, the "
                f"data-parallel size of {model}"
            )
        if stage.rows_per_micro_batch is not None and per_group % stage.rows_per_micro_batch:
            yield (
                f"{at}.rows_per_micro_batch = {stage.rows_per_micro_batch} must divide {per_group}, "
                f"the rows of one data-parallel group of {model} ({at}.rows_per_step / {groups})"
            )
    yield from config.data.stage_problems(config, stage, at)
