"""The parallel layouts of a job on a number of GPUs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator

from megatron_sb.training.config import ConfigError, ModelConfig, StageConfig, TrainingConfig
from megatron_sb.training.config.checks import check
from megatron_sb.training.config.types import Section

RECOMPUTES = ("none", "full")
ONLY_WITH_FULL_RECOMPUTE = ("recompute_layers", "offloaded_inputs")  # fields of ModelConfig
GPUS_OF_A_HOST = 8  # tensor parallelism stays within a host


@dataclasses.dataclass(frozen=True)
class Layout:
    """How GPUs divide a stage.

    Attributes:
        tensor: GPUs that share the heads, MLPs and vocabulary of every layer. With more than one, sequence parallelism
            also splits the rows of norms and residuals.
        context: GPUs that share a row.
        data: groups of tensor * context GPUs that train on different rows.
        expert: GPUs that the experts are distributed over; 1 without experts.
        rows_at_once: rows of a micro-batch.
        recompute: model.recompute of the configuration: "none", "selective" or "full".
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    rows_at_once: int = 1
    recompute: str = "none"

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.context * self.data


def find_layouts(config: TrainingConfig, stage: StageConfig, gpus: int) -> Iterator[Layout]:
    """Yield every layout of a stage with which the trainer accepts the whole configuration, see `with_layout`.

    All numbers of GPUs for one purpose divide `gpus`. The rows of a micro-batch are powers of two, and all rows of a
    data-parallel rank.

    Args:
        config: the job's configuration; its own layout does not matter.
        stage: one of config.stages.
        gpus: number of GPUs.
    """
    for tensor in _divisors(gpus):
        if tensor > GPUS_OF_A_HOST:
            break
        for context in _divisors(gpus // tensor):
            data = gpus // tensor // context
            if stage.rows_per_step % data:
                continue
            for expert in _divisors(tensor * context * data) if config.model.moe else (1,):
                layouts = [Layout(tensor, context, data, expert, recompute=recompute) for recompute in RECOMPUTES]
                accepted = [layout for layout in layouts if why_rejected(config, stage, layout) is None]
                for rows in _rows_at_once(stage.rows_per_step // data):
                    for layout in accepted:
                        yield dataclasses.replace(layout, rows_at_once=rows)


def why_rejected(config: TrainingConfig, stage: StageConfig, layout: Layout) -> str | None:
    """Return why the trainer rejects the configuration in a layout of a stage, one line each, or None."""
    try:
        check(with_layout(config, stage, layout))
    except ConfigError as error:
        return str(error)
    return None


def model_in_layout(config: TrainingConfig, layout: Layout) -> ModelConfig:
    """Return the model in a layout. Tensor parallelism may pad the vocabulary."""
    multiple = math.lcm(config.model.make_vocab_size_divisible_by, layout.tensor)
    model = dataclasses.replace(config.model, recompute=layout.recompute, make_vocab_size_divisible_by=multiple)
    if layout.recompute != "full":
        model = dataclasses.replace(model, **{name: getattr(ModelConfig, name) for name in ONLY_WITH_FULL_RECOMPUTE})
    if model.padded_vocab_size(config.vocab_size) != config.model.padded_vocab_size(config.vocab_size):
        model = dataclasses.replace(model, num_parameters=None)
    return model


def with_layout(config: TrainingConfig, stage: StageConfig, layout: Layout) -> TrainingConfig:
    """Return the configuration in a layout of one stage. The other stages change where the layout requires it.

    The attention chooses its own communication (parallel.comm = "auto"). Another stage gets the largest divisor of its
    context_parallel_size with which the layout can split its rows. If there is none, it gets the nearest other size.

    Args:
        config: the job's configuration.
        stage: one of config.stages.
        layout: the layout of this stage. The trainer may reject it, see `why_rejected`.
    """
    parallel = dataclasses.replace(
        config.parallel,
        ranks=layout.gpus,
        device="cuda" if config.parallel.device == "cpu" else config.parallel.device,
        tensor_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        expert_parallel_size=layout.expert,
        comm="auto",
    )
    wanted = dataclasses.replace(config, model=model_in_layout(config, layout), parallel=parallel)
    stages = [
        dataclasses.replace(
            _with_context_parallel_size(wanted, each, layout.context), rows_per_micro_batch=layout.rows_at_once
        )
        if each == stage
        else _fitting(wanted, each)
        for each in config.stages
    ]
    return dataclasses.replace(wanted, stages=tuple(stages))


def _fitting(config: TrainingConfig, stage: StageConfig) -> StageConfig:
    """Return a stage that the parallel layout of the configuration can run: unchanged if possible."""
    available = config.parallel.ranks // config.parallel.tensor_parallel_size
    sizes = _divisors(available)
    sizes.sort(key=lambda size: (stage.context_parallel_size % size != 0, abs(stage.context_parallel_size - size)))
    for size in sizes:
        changed = _with_context_parallel_size(config, stage, size)
        groups = config.data_parallel_size(changed)
        if stage.rows_per_step % groups == 0 and stage.context_length % config.row_multiple(changed) == 0:
            if stage.rows_per_micro_batch is None:
                return changed
            rows = math.gcd(stage.rows_per_micro_batch, stage.rows_per_step // groups)
            return dataclasses.replace(changed, rows_per_micro_batch=rows)
    return _with_context_parallel_size(config, stage, sizes[0])  # no size fits, and `check` says why


def _with_context_parallel_size(config: TrainingConfig, stage: StageConfig, size: int) -> StageConfig:
    """Return a stage with a context_parallel_size. It keeps its pad_multiple if this is valid with the size."""
    changed = dataclasses.replace(stage, context_parallel_size=size, hierarchical_context_parallel_sizes=())
    padded = config.pad_multiple(changed)
    if padded % config.needed_pad_multiple(changed) or stage.context_length % padded:
        changed = dataclasses.replace(changed, pad_multiple=None)
    return changed


def overrides(config: TrainingConfig, index: int, layout: Layout) -> list[str]:
    """Return the `field=value` that change a configuration to a layout of stages[index], see `with_layout`.

    Example:
        >>> from megatron_sb.planning.layouts import Layout, overrides
        >>> from megatron_sb.training.config import load_config
        >>> overrides(load_config("configs/dense_1b.yaml"), 0, Layout(context=2, data=4, rows_at_once=4))
        ['stages.0.context_parallel_size=2']
    """
    wanted = with_layout(config, config.stages[index], layout)
    changes = [*_changes("parallel", config.parallel, wanted.parallel), *_changes("model", config.model, wanted.model)]
    for number, (old, new) in enumerate(zip(config.stages, wanted.stages, strict=True)):
        changes += _changes(f"stages.{number}", old, new)
    return changes


def changes_of_other_stages(config: TrainingConfig, index: int, layout: Layout) -> dict[str, list[str]]:
    """Return the `field=value` that a layout of stages[index] changes in each other stage that changes, by its name."""
    wanted = with_layout(config, config.stages[index], layout)
    pairs = [pair for number, pair in enumerate(zip(config.stages, wanted.stages, strict=True)) if number != index]
    return {old.name: _changes("", old, new) for old, new in pairs if old != new}


def _changes(path: str, old: Section, new: Section) -> list[str]:
    """Return `path.field=value` for each field that differs. The values are YAML."""
    fields = [(field.name, getattr(old, field.name), getattr(new, field.name)) for field in dataclasses.fields(old)]
    prefix = f"{path}." if path else ""
    return [f"{prefix}{name}={json.dumps(after).strip(chr(34))}" for name, before, after in fields if before != after]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _rows_at_once(rows: int) -> list[int]:
    """Return the sizes of micro-batches that divide the rows of a data-parallel rank."""
    return sorted({2**n for n in range(rows.bit_length()) if rows % 2**n == 0} | {rows})
