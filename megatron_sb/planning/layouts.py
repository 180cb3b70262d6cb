"""The parallel layouts of a job on a number of GPUs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from megatron_sb.training.config import ConfigError, StageConfig, TrainingConfig
from megatron_sb.training.config.checks import check

RECOMPUTES = ("none", "full")
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
    """Yield every layout of a stage that the trainer accepts.

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
                if not _is_accepted(config, stage, Layout(tensor, context, data, expert)):
                    continue
                for rows in _rows_at_once(stage.rows_per_step // data):
                    for recompute in RECOMPUTES:
                        yield Layout(tensor, context, data, expert, rows, recompute)


def with_layout(config: TrainingConfig, stage: StageConfig, layout: Layout) -> TrainingConfig:
    """Return the configuration with one stage, in a layout. Tensor parallelism may pad the vocabulary."""
    changed = dataclasses.replace(
        stage,
        context_parallel_size=layout.context,
        rows_per_micro_batch=layout.rows_at_once,
        hierarchical_context_parallel_sizes=(),
        pad_multiple=None,
    )
    parallel = dataclasses.replace(
        config.parallel,
        ranks=layout.gpus,
        device="cuda",
        tensor_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        expert_parallel_size=layout.expert,
        comm="auto",
    )
    multiple = math.lcm(config.model.make_vocab_size_divisible_by, layout.tensor)
    model = dataclasses.replace(config.model, recompute=layout.recompute, make_vocab_size_divisible_by=multiple)
    if model.padded_vocab_size(config.vocab_size) != config.model.padded_vocab_size(config.vocab_size):
        model = dataclasses.replace(model, num_parameters=None)
    return dataclasses.replace(config, model=model, parallel=parallel, stages=(changed,))


def overrides(config: TrainingConfig, index: int, layout: Layout) -> list[str]:
    """Return the `field=value` that change a configuration to a layout of stages[index].

    Example:
        >>> from megatron_sb.planning.layouts import Layout, overrides
        >>> from megatron_sb.training.config import load_config
        >>> overrides(load_config("configs/dense_1b.yaml"), 0, Layout(context=2, data=4, rows_at_once=4))
        ['stages.0.context_parallel_size=2']
    """
    wanted = with_layout(config, config.stages[index], layout)
    stage = f"stages.{index}"
    fields = [
        *_changes("parallel", config.parallel, wanted.parallel, "ranks", "tensor_parallel_size", "sequence_parallel"),
        *_changes("parallel", config.parallel, wanted.parallel, "expert_parallel_size"),
        *_changes("model", config.model, wanted.model, "recompute", "make_vocab_size_divisible_by", "num_parameters"),
        *_changes(stage, config.stages[index], wanted.stages[0], "context_parallel_size", "rows_per_micro_batch"),
    ]
    return [f"{path}={json.dumps(new).strip(chr(34))}" for path, old, new in fields if old != new]


def _changes(path: str, old: Any, new: Any, *names: str) -> list[tuple[str, Any, Any]]:
    return [(f"{path}.{name}", getattr(old, name), getattr(new, name)) for name in names]


def _is_accepted(config: TrainingConfig, stage: StageConfig, layout: Layout) -> bool:
    try:
        check(with_layout(config, stage, layout))
    except ConfigError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _rows_at_once(rows: int) -> list[int]:
    """Return the sizes of micro-batches that divide the rows of a data-parallel rank."""
    return sorted({2**n for n in range(rows.bit_length()) if rows % 2**n == 0} | {rows})
