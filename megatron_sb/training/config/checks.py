"""Contradictions between fields of a training configuration."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Iterator, Sequence

from megatron_sb.options import MAX_HEAD_DIM_EUCLIDEAN, head_dim_problem
from megatron_sb.training.config.parameters import count_parameters
from megatron_sb.training.config.schema import (
    GatedDeltaNetConfig,
    LayerAttentionConfig,
    MixedAttentionConfig,
    SoftmaxAttentionConfig,
    StageConfig,
    StickBreakingAttentionConfig,
    TrainingConfig,
)
from megatron_sb.training.config.types import ConfigError


def check(config: TrainingConfig) -> None:
    """Check the fields of a configuration against each other.

    Checks run in groups. Later groups rely on what earlier groups have checked.

    Raises:
        ConfigError: Fields contradict each other. One line for each contradiction of the first group that has any.
    """
    groups = [
        find(config)
        for find in (
            _list_problems,
            _model_problems,
            _attention_problems,
            _data_problems,
            _parallel_problems,
            _moe_problems,
            _teacher_problems,
        )
    ]
    for index, stage in enumerate(config.stages):
        for find in (_schedule_problems, _context_parallel_problems, _row_problems):
            groups.append(find(config, stage, f"stages.{index}"))
    for group in groups:
        if problems := list(group):
            raise ConfigError("\n".join(problems))


def needs_gpu(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Yield (field and value, reason) for each field that needs a GPU."""
    model, parallel = config.model, config.parallel
    if model.precision == "bf16":
        yield "model.precision = 'bf16'", "Megatron's optimizer, which keeps the fp32 master weights, needs CUDA"
    if model.recompute != "none":
        yield f"model.recompute = {model.recompute!r}", "Megatron-Core saves and restores the GPU's generator"
    if model.offloaded_inputs:
        yield f"model.offloaded_inputs = {model.offloaded_inputs}", "there is no other memory to copy them to"
    if model.moe is not None:
        yield f"model.moe.num_experts = {model.moe.num_experts}", "Megatron-Core's router and dispatchers need CUDA"
    if parallel.sequence_parallel:
        yield "parallel.sequence_parallel = True", "Megatron-Core forks the GPU's generator"
    for name in _delta_nets(config, config.compare):
        yield f"attention.{name}.kind = 'gated_delta_net'", "its kernels are those of flash-linear-attention"


def check_packages(config: TrainingConfig, models: Sequence[str]) -> None:
    """Raise ConfigError if one of these models needs a package that is not installed."""
    for name in _delta_nets(config, models):
        entry = f"attention.{name}.kind = 'gated_delta_net'"
        if importlib.util.find_spec("fla") is None:
            raise ConfigError(
                f"{entry} needs flash-linear-attention, which is not installed. Run "
                "`pip install flash-linear-attention`."
            )
        if importlib.util.find_spec("tilelang") is None and (version := _triton_with_wrong_backward()):
            raise ConfigError(
                f"{entry} needs tilelang: the backward of flash-linear-attention is wrong with Triton {version} on "
                "this GPU. Run `pip install tilelang`."
            )


def _triton_with_wrong_backward() -> str | None:
    """Return the version of Triton if flash-linear-attention refuses it for gated delta nets on this machine's GPU."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    version = importlib.metadata.version("triton")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return version if (3, 4) <= numbers < (3, 7, 1) else None


def _delta_nets(config: TrainingConfig, models: Sequence[str]) -> list[str]:
    """Return the entries of attention that are gated delta nets in these models. Unknown names do not count."""
    found = []
    for model in models:
        attention = config.attention.get(model)
        names = attention.layers if isinstance(attention, MixedAttentionConfig) else (model,)
        found += [name for name in names if isinstance(config.attention.get(name), GatedDeltaNetConfig)]
    return list(dict.fromkeys(found))


def _list_problems(config: TrainingConfig) -> Iterator[str]:
    stages = [stage.name for stage in config.stages]
    lists = {"stages": stages, "compare": config.compare}
    for name, attention in config.attention.items():
        if isinstance(attention, SoftmaxAttentionConfig):
            lists[f"attention.{name}.evaluated_scalings"] = attention.evaluated_scalings
    for path, names in lists.items():
        if not names:
            yield f"{path} must have at least one item, got []"
        if len(set(names)) != len(names):
            yield f"{path} must have different names, got {list(names)!r}"
    for name in config.compare:
        if name not in config.attention:
            yield f"compare must name entries of attention, which are {list(config.attention)}, got {name!r}"
    if config.initial_attention is not None and config.initial_checkpoint is None:
        yield f"initial_attention = {config.initial_attention!r} contradicts initial_checkpoint = None"
    if config.initial_checkpoint is not None and len(config.compare) > 1:
        yield (
            f"initial_checkpoint = {config.initial_checkpoint!r} contradicts compare = {list(config.compare)}: a "
            "checkpoint holds one model"
        )


def _model_problems(config: TrainingConfig) -> Iterator[str]:
    model = config.model
    if model.head_dim is None:
        yield (
            f"model.hidden_size must be a multiple of model.num_heads = {model.num_heads}, got {model.hidden_size}. "
            "Or set model.head_dim."
        )
        return
    if model.num_heads % model.num_kv_heads:
        yield f"model.num_heads must be a multiple of model.num_kv_heads = {model.num_kv_heads}, got {model.num_heads}"
    if problem := head_dim_problem("model.head_dim", model.head_dim):
        yield f"{problem}. Its default is model.hidden_size / model.num_heads."
    yield from _memory_problems(config)
    if config.parallel.device == "cpu":
        for field, why in needs_gpu(config):
            yield f"{field} contradicts parallel.device = 'cpu': {why}"


def _memory_problems(config: TrainingConfig) -> Iterator[str]:
    model = config.model
    if model.recompute != "full":
        for field, default in (("recompute_layers", 1), ("offloaded_inputs", 0)):
            if (value := getattr(model, field)) != default:
                yield f"model.{field} = {value} needs model.recompute = 'full', got {model.recompute!r}"
    kept = -(-model.num_layers // model.recompute_layers)
    if model.offloaded_inputs > kept:
        yield (
            f"model.offloaded_inputs must be at most the number of inputs that are kept, model.num_layers / "
            f"model.recompute_layers = {kept}, got {model.offloaded_inputs}"
        )
    if model.tokens_at_once is not None:
        if model.moe is not None:
            yield (
                f"model.tokens_at_once = {model.tokens_at_once} contradicts model.moe: the balancing loss is that of "
                "all tokens"
            )
        if config.parallel.sequence_parallel:
            yield (
                f"model.tokens_at_once = {model.tokens_at_once} contradicts parallel.sequence_parallel: a part of the "
                "sequence is on each rank"
            )


def _attention_problems(config: TrainingConfig) -> Iterator[str]:
    for name in config.compare:
        attention = config.attention[name]
        if isinstance(attention, MixedAttentionConfig):
            yield from _mixed_problems(config, attention, f"attention.{name}")
        else:
            yield from _layer_problems(config, attention, f"attention.{name}")


def _layer_problems(config: TrainingConfig, attention: LayerAttentionConfig, path: str) -> Iterator[str]:
    if isinstance(attention, StickBreakingAttentionConfig):
        yield from _stick_breaking_problems(config, attention, path)
    elif isinstance(attention, GatedDeltaNetConfig):
        yield from _delta_net_problems(config, attention, path)
    else:
        yield from _softmax_problems(config, attention, path)


def _mixed_problems(config: TrainingConfig, attention: MixedAttentionConfig, path: str) -> Iterator[str]:
    names, num_layers = attention.layers, config.model.num_layers
    entries = {name: entry for name, entry in config.attention.items() if not isinstance(entry, MixedAttentionConfig)}
    unknown = [name for name in names if name not in entries]
    for name in unknown:
        yield f"{path}.layers must name entries of attention of other kinds, which are {list(entries)}, got {name!r}"
    if not names or num_layers % len(names):
        yield (
            f"{path}.layers must have a number of items that divides model.num_layers = {num_layers}, got {len(names)}"
        )
    if unknown:
        return
    rotary = {}
    for name in dict.fromkeys(names):
        entry = entries[name]
        if name not in config.compare:  # else it is checked anyway
            yield from _layer_problems(config, entry, f"attention.{name}")
        if isinstance(entry, SoftmaxAttentionConfig) and entry.position == "rope":
            rotary[name] = entry.evaluated_scalings
        if isinstance(entry, SoftmaxAttentionConfig) and entry.global_interval is not None:
            yield (
                f"attention.{name}.global_interval = {entry.global_interval} contradicts {path}.layers: there each "
                "layer has a name of its own"
            )
    with_logits = [name for name in names if not isinstance(entries[name], GatedDeltaNetConfig)]
    scales = {name: getattr(entries[name], "scale", None) for name in with_logits}
    if len(set(scales.values())) > 1:
        yield f"scale must be the same in all entries of {path}.layers, got {scales}"
    if len(set(rotary.values())) > 1:
        yield (
            f"evaluated_scalings must be the same in the entries with rotary positions of {path}.layers, got "
            f"{ {name: list(scalings) for name, scalings in rotary.items()} }"
        )


def _stick_breaking_problems(
    config: TrainingConfig, attention: StickBreakingAttentionConfig, path: str
) -> Iterator[str]:
    model, tensor = config.model, config.parallel.tensor_parallel_size
    if attention.forget_gate_loss > 0 and not attention.forget_gate:
        yield f"{path}.forget_gate_loss = {attention.forget_gate_loss} contradicts {path}.forget_gate = False"
    if attention.forget_gate and model.num_kv_heads < tensor:
        yield (
            f"{path}.forget_gate = True contradicts parallel.tensor_parallel_size = {tensor}: tensor parallelism "
            f"splits gates by KV head, and model.num_kv_heads = {model.num_kv_heads}"
        )
    if attention.logits == "euclidean" and model.head_dim > MAX_HEAD_DIM_EUCLIDEAN:
        yield (
            f"model.head_dim must be at most {MAX_HEAD_DIM_EUCLIDEAN} with {path}.logits = 'euclidean', "
            f"got {model.head_dim}"
        )


def _delta_net_problems(config: TrainingConfig, attention: GatedDeltaNetConfig, path: str) -> Iterator[str]:
    kind = f"{path}.kind = 'gated_delta_net'"
    if (tensor := config.parallel.tensor_parallel_size) > 1:
        yield f"{kind} contradicts parallel.tensor_parallel_size = {tensor}: its heads are not split"
    for index, stage in enumerate(config.stages):
        if (size := stage.context_parallel_size) > 1:
            yield f"{kind} contradicts stages.{index}.context_parallel_size = {size}: its state is not passed on"
        if stage.loss == "layers":
            yield f"{kind} contradicts stages.{index}.loss = 'layers': it has no core attention to compare"
    if not (config.model.head_dim * attention.expand_v).is_integer():
        yield (
            f"{path}.expand_v must give values a whole number of channels with model.head_dim = "
            f"{config.model.head_dim}, got {attention.expand_v}"
        )


def _softmax_problems(config: TrainingConfig, attention: SoftmaxAttentionConfig, path: str) -> Iterator[str]:
    tensor = config.parallel.tensor_parallel_size
    position = f"{path}.position = {attention.position!r}"
    if attention.position != "rope" and attention.evaluated_scalings != ("none",):
        yield (
            f"{path}.evaluated_scalings = {list(attention.evaluated_scalings)} contradicts {position}: only 'rope' has "
            "positions to scale. Set it to [none]."
        )
    if attention.position != "rope" and attention.rotary_base != SoftmaxAttentionConfig.rotary_base:
        yield f"{path}.rotary_base = {attention.rotary_base} contradicts {position}: only 'rope' reads it"
    if attention.global_interval is not None and (attention.position != "rope" or attention.window is None):
        yield (
            f"{path}.global_interval = {attention.global_interval} contradicts {position} and {path}.window = "
            f"{attention.window}: every so many layers, one has neither the rotary positions nor the window of the "
            "others"
        )
    yield from _dropped_problems(config, attention, path)
    if attention.forget_gate and attention.stable_mask_gamma is not None:
        yield (
            f"{path}.stable_mask_gamma = {attention.stable_mask_gamma} contradicts {path}.forget_gate = True: "
            "StableMask has no forget gates"
        )
    if attention.forget_gate and tensor > config.model.num_kv_heads:
        yield (
            f"{path}.forget_gate = True contradicts parallel.tensor_parallel_size = {tensor}: tensor parallelism "
            f"splits gates by KV head, and model.num_kv_heads = {config.model.num_kv_heads}"
        )
    if attention.position in ("alibi", "fire") and tensor > 1:
        yield (
            f"{position} contradicts parallel.tensor_parallel_size = {tensor}: tensor parallelism does not split its "
            "biases"
        )


def _dropped_problems(config: TrainingConfig, attention: SoftmaxAttentionConfig, path: str) -> Iterator[str]:
    stages = [stage.name for stage in config.stages]
    if attention.dropped_in is None:
        return
    if attention.dropped_in not in stages[1:]:
        yield f"{path}.dropped_in must name a stage after the first, one of {stages[1:]}, got {attention.dropped_in!r}"
    if attention.position != "rope" or attention.evaluated_scalings != ("none",):
        yield (
            f"{path}.dropped_in = {attention.dropped_in!r} needs {path}.position = 'rope' and "
            f"{path}.evaluated_scalings = [none], got {attention.position!r} and {list(attention.evaluated_scalings)}"
        )


def _data_problems(config: TrainingConfig) -> Iterator[str]:
    yield from config.data.problems(config)
    expected = config.model.num_parameters
    total = count_parameters(config.model, config.attention_of_layers(config.compare[0]), config.vocab_size).total
    if expected is not None and expected != total:
        yield f"model.num_parameters must be {total}, which follows from the other fields of model, got {expected}"


def _parallel_problems(config: TrainingConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor_parallel_size
    if parallel.ranks % tensor:
        yield f"parallel.tensor_parallel_size must divide parallel.ranks = {parallel.ranks}, got {tensor}"
    sizes = [("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)]
    if model.moe is None:  # tensor parallelism does not split the MLPs of experts
        sizes.append(("ffn_hidden_size", model.ffn_hidden_size))
    for name, size in (*sizes, ("make_vocab_size_divisible_by", model.make_vocab_size_divisible_by)):
        if size % tensor:
            yield f"model.{name} must be a multiple of parallel.tensor_parallel_size = {tensor}, got {size}"
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
        yield f"model.moe.top_k must be at most model.moe.num_experts = {moe.num_experts}, got {moe.top_k}"
    if moe.load_balancing == "none" and moe.aux_loss_coefficient:
        yield (
            f"model.moe.aux_loss_coefficient must be 0 with model.moe.load_balancing = 'none', "
            f"got {moe.aux_loss_coefficient}"
        )
    if moe.num_experts % expert:
        yield f"parallel.expert_parallel_size must divide model.moe.num_experts = {moe.num_experts}, got {expert}"
    if parallel.ranks % expert:
        yield f"parallel.expert_parallel_size must divide parallel.ranks = {parallel.ranks}, got {expert}"
    for name in ("hidden_size", "ffn_hidden_size") if moe.grouped_gemm else ():
        size = getattr(config.model, name)
        if size % 8:
            yield f"model.{name} must be a multiple of 8 with model.moe.grouped_gemm, got {size}"
    if parallel.tensor_parallel_size > 1 and (expert == 1 or not parallel.sequence_parallel):
        yield (
            f"parallel.tensor_parallel_size = {parallel.tensor_parallel_size} with model.moe needs "
            "parallel.sequence_parallel = true and parallel.expert_parallel_size > 1"
        )


def _teacher_problems(config: TrainingConfig) -> Iterator[str]:
    name = config.teacher
    if not config.is_distilled:
        if name is not None:
            yield f"teacher = {name!r} needs a stage with loss = 'logits' or 'layers', got 'tokens' in all stages"
        return
    field = next(f"stages.{i}.loss = {stage.loss!r}" for i, stage in enumerate(config.stages) if stage.loss != "tokens")
    if config.initial_checkpoint is None:
        yield f"{field} needs initial_checkpoint, which holds the teacher's weights, got None"
    teacher = config.attention.get(name)
    if not isinstance(teacher, SoftmaxAttentionConfig):
        softmax = [each for each, entry in config.attention.items() if isinstance(entry, SoftmaxAttentionConfig)]
        yield f"{field} needs teacher, an entry of attention with kind 'softmax', which are {softmax}, got {name!r}"
    else:
        if name not in config.compare:  # else it is checked anyway
            yield from _layer_problems(config, teacher, f"attention.{name}")
        held = config.initial_attention or config.attention[config.compare[0]].kind
        if held != "softmax":
            yield (
                f"teacher = {name!r} needs initial_attention = 'softmax', because the teacher has the weights of "
                f"initial_checkpoint, got {held!r}"
            )
    yield from _distilled_layout_problems(config, field)


def _distilled_layout_problems(config: TrainingConfig, field: str) -> Iterator[str]:
    model = config.model
    if config.parallel.ranks > 1:
        yield f"{field} contradicts parallel.ranks = {config.parallel.ranks}: one rank computes teacher and student"
    if model.moe is not None:
        yield f"{field} contradicts model.moe: the router's losses are those of the tokens"
    if all(stage.loss != "layers" for stage in config.stages):
        return
    if model.recompute != "none":
        yield f"loss = 'layers' contradicts model.recompute = {model.recompute!r}: it keeps the outputs of attention"
    if model.tokens_at_once is not None:
        yield f"loss = 'layers' contradicts model.tokens_at_once = {model.tokens_at_once}: MLPs are not trained"


def _schedule_problems(config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
    if stage.warmup_steps >= stage.steps:
        yield f"{path}.warmup_steps must be less than {path}.steps = {stage.steps}, got {stage.warmup_steps}"
    if stage.schedule == "power" and stage.power_coefficient is None and stage.warmup_steps == 0:
        yield (
            f"{path}.schedule = 'power' contradicts {path}.warmup_steps = 0: without {path}.power_coefficient the "
            "power law starts where the warm-up ends"
        )
    if stage.power_coefficient is not None and stage.schedule != "power":
        yield f"{path}.power_coefficient = {stage.power_coefficient} contradicts {path}.schedule = {stage.schedule!r}"
    if stage.warmup_start_rate and stage.warmup_steps == 0:
        yield f"{path}.warmup_start_rate = {stage.warmup_start_rate} contradicts {path}.warmup_steps = 0"
    if stage.warmup_start_rate > stage.learning_rate:
        yield (
            f"{path}.warmup_start_rate must be at most {path}.learning_rate = {stage.learning_rate}, "
            f"got {stage.warmup_start_rate}"
        )


def _context_parallel_problems(config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
    parallel, size = config.parallel, stage.context_parallel_size
    available = parallel.ranks // parallel.tensor_parallel_size
    if available % size:
        ranks = "parallel.ranks" + (" / parallel.tensor_parallel_size" if parallel.tensor_parallel_size > 1 else "")
        yield f"{path}.context_parallel_size must divide {ranks} = {available}, got {size}"
    levels = stage.hierarchical_context_parallel_sizes
    if levels and parallel.comm != "a2a+p2p":
        yield (
            f"{path}.hierarchical_context_parallel_sizes = {list(levels)} contradicts parallel.comm = {parallel.comm!r}"
        )
    if levels and (len(levels) != 2 or math.prod(levels) != size):
        yield (
            f"{path}.hierarchical_context_parallel_sizes must be the sizes of a2a and p2p, with the product "
            f"{path}.context_parallel_size = {size}, got {list(levels)}"
        )
    if parallel.comm == "a2a+p2p" and size > 1 and not levels:
        yield f"parallel.comm = 'a2a+p2p' needs {path}.hierarchical_context_parallel_sizes"
    exchanging = {"a2a": size, "a2a+p2p": levels[0] if levels else 1}.get(parallel.comm, 1)
    yield from _all_to_all_problems(config, exchanging, path)


def _all_to_all_problems(config: TrainingConfig, ranks: int, path: str) -> Iterator[str]:
    """Yield the problems of an all-to-all that exchanges heads between `ranks` ranks."""
    model, tensor = config.model, config.parallel.tensor_parallel_size
    heads, kv_heads = model.num_heads // tensor, model.num_kv_heads // tensor
    exchange = f"parallel.comm = {config.parallel.comm!r} exchanges heads between {ranks} ranks in {path}"
    if heads % ranks:
        yield (
            f"{exchange}: model.num_heads / parallel.tensor_parallel_size must be a multiple of {ranks}, got {heads}"
        )
    if kv_heads % ranks and ranks % kv_heads:
        yield (
            f"{exchange}: model.num_kv_heads / parallel.tensor_parallel_size must be a multiple or a divisor of "
            f"{ranks}, got {kv_heads}"
        )


def _row_problems(config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
    parallel = config.parallel
    multiple = config.row_multiple(stage)
    if stage.context_length % multiple:
        split = f" and parallel.tensor_parallel_size = {parallel.tensor_parallel_size}"
        yield (
            f"{path}.context_length must be a multiple of {multiple}, with {path}.context_parallel_size = "
            f"{stage.context_parallel_size} and parallel.layout = {parallel.layout!r}"
            f"{split if parallel.sequence_parallel else ''}, got {stage.context_length}"
        )
    needed, padded = config.needed_pad_multiple(stage), config.pad_multiple(stage)
    if padded % needed or stage.context_length % padded:
        yield (
            f"{path}.pad_multiple must be a multiple of {needed}, which the stage's ranks need, and divide "
            f"{path}.context_length = {stage.context_length}, got {padded}"
        )
    groups = config.data_parallel_size(stage)
    rows_per_group = stage.rows_per_step // groups
    if stage.rows_per_step % groups:
        yield (
            f"{path}.rows_per_step must be a multiple of {groups}, the data-parallel size, got {stage.rows_per_step}"
        )
    if stage.rows_per_micro_batch is not None and rows_per_group % stage.rows_per_micro_batch:
        yield (
            f"{path}.rows_per_micro_batch must divide {rows_per_group}, the rows of one data-parallel group "
            f"({path}.rows_per_step / {groups}), got {stage.rows_per_micro_batch}"
        )
    yield from config.data.stage_problems(config, stage, path)
