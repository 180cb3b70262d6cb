"""`megatron-sb plan`: a table of parallel layouts with their predicted memory and speed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
from typing import Any

from megatron_sb.planning.layouts import (
    GPUS_OF_A_HOST,
    Layout,
    changes_of_other_stages,
    find_layouts,
    model_in_layout,
    overrides,
    why_rejected,
)
from megatron_sb.planning.memory import Memory, predict_memory
from megatron_sb.planning.throughput import ALIGNMENT, StepTime, can_predict, predict_step
from megatron_sb.training.config import StageConfig, TrainingConfig, load_config
from megatron_sb.validation import InputError, check_integer, check_number

GIB = 2**30
MARGIN = 0.9  # share of a GPU's memory that a prediction may fill: the allocator, CUDA and NCCL need the rest
CLASS = 1.02  # ratio of speeds that count as equal
MOST_SKIPPED = 0.999  # a share of 1 would leave no work
MOST_GPUS = 2**20  # every divisor is tried


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout with its predictions.

    Attributes:
        layout: the layout.
        memory: bytes of a GPU.
        fits: whether the memory fits.
        time: seconds of a step. None if it does not fit, or there is no recorded rate.
        tokens_per_second: over all GPUs, None without a time.
    """

    layout: Layout
    memory: Memory
    fits: bool
    time: StepTime | None
    tokens_per_second: float | None


def choose_stage(config: TrainingConfig, name: str | None) -> int:
    """Return the index of a stage, by default of the one with the longest context. Raise ValueError if none has it."""
    names = [stage.name for stage in config.stages]
    if name is None:
        return max(range(len(names)), key=lambda index: config.stages[index].context_length)
    if name not in names:
        raise InputError(f"--stage must be one of {', '.join(map(repr, names))}, got {name!r}.")
    return names.index(name)


def choose_model(config: TrainingConfig, name: str | None) -> str:
    """Return a stick-breaking model of config.compare; by default the first. Raise ValueError if there is none."""
    models = [model for model in config.compare if config.breaks_sticks(model)]
    if name is None and models:
        return models[0]
    if name not in models:
        expected = (
            f"one of {', '.join(map(repr, models))}" if models else "a stick-breaking model, and compare has none"
        )
        raise InputError(f"--model must be {expected}, got {name!r}.")
    return name


def make_plans(
    config: TrainingConfig, model: str, stage: StageConfig, gpus: int, memory_gib: float = 140.0, skipped: float = 0.0
) -> list[Plan]:
    """Predict every layout of a stage, the best first: those that fit by tokens/s, in classes of 2%, and by memory.

    Args:
        config: the job's configuration, with model.precision "bf16".
        model: a stick-breaking model of config.attention.
        stage: one of config.stages.
        gpus: number of GPUs.
        memory_gib: memory of a GPU in GiB. A prediction fits if it fills at most 90% of it.
        skipped: share of the attention's work that is saved, from 0 to less than 1.

    Raises:
        TypeError: A number is of another type.
        ValueError: A number is out of range, the model is not a stick-breaking model, the stage is not in the
            configuration, the precision is not "bf16", the stage needs a teacher, or no layout for this number of GPUs
            is valid.

    Example:
        >>> from megatron_sb.planning.command import make_plans
        >>> from megatron_sb.training.config import load_config
        >>> config = load_config("configs/dense_1b.yaml")
        >>> best = make_plans(config, "stick_breaking", config.stages[0], gpus=1)[0]
        >>> best.fits, best.layout.recompute
        (True, 'none')
    """
    check_numbers(gpus, memory_gib, skipped)
    models = [name for name in config.attention if config.breaks_sticks(name)]
    if model not in models:
        raise InputError(f"model must be a stick-breaking model of config.attention, one of {models}, got {model!r}.")
    if stage not in config.stages:
        names = [each.name for each in config.stages]
        raise InputError(f"stage must be one of config.stages, with the names {names}, got {stage!r}.")
    if config.model.precision != "bf16":
        device = " --set parallel.device=cuda" if config.parallel.device == "cpu" else ""  # which bf16 contradicts
        raise InputError(
            f"model.precision must be 'bf16' for a plan, got {config.model.precision!r}. "
            f"Add --set model.precision=bf16{device}."
        )
    if stage.loss != "tokens":
        raise InputError(
            f"the loss of stage {stage.name!r} must be 'tokens' for a plan, got {stage.loss!r}. The memory and the "
            "time of the teacher are not predicted."
        )
    plans = []
    for layout in find_layouts(config, stage, gpus):
        sizes = model_in_layout(config, layout), config.attention[model], config.vocab_size
        memory = predict_memory(*sizes, stage, layout)
        fits = memory.total <= MARGIN * memory_gib * GIB
        time = predict_step(*sizes, stage, layout, skipped) if fits and can_predict(config.model) is None else None
        tokens = stage.rows_per_step * stage.context_length
        plans.append(Plan(layout, memory, fits, time, tokens / time.total if time else None))
    if not plans:
        raise InputError(
            f"--gpus must be a number of GPUs with a layout that the trainer accepts for stage {stage.name!r}, with "
            f"rows of {stage.context_length} tokens and {stage.rows_per_step} rows in a step, got {gpus}. With "
            f"data parallelism alone it says: {why_rejected(config, stage, Layout(data=gpus)).splitlines()[0]}."
        )
    return sorted(plans, key=_rank)


def _rank(plan: Plan) -> tuple:
    """Sort plans that fit by speed, in classes of 2%, then by memory.

    Without a speed, less recomputation and fewer GPUs for a row come first.
    """
    layout, total = plan.layout, plan.memory.total
    if not plan.fits:
        return 1, total
    if plan.tokens_per_second is None:
        return 0, layout.recompute != "none", layout.tensor * layout.context, total
    return 0, -round(math.log(plan.tokens_per_second) / math.log(CLASS)), total


def best_of_each(plans: list[Plan]) -> list[Plan]:
    """Return the first plan of each parallel layout: one size of micro-batches, with or without recomputation."""
    first: dict[tuple, Plan] = {}
    for plan in plans:
        layout = plan.layout
        first.setdefault((layout.tensor, layout.context, layout.data, layout.expert), plan)
    return list(first.values())


def table(plans: list[Plan]) -> str:
    """Return the plans as lines of text."""
    head = ("TP", "CP", "DP", "EP", "rows", "recompute", "weights", "optimizer", "activations", "GiB", "fits")
    rows = [(*head, "s/step", "tokens/s")]
    for plan in plans:
        layout, memory = plan.layout, plan.memory
        gib = [memory.weights + memory.gradients, memory.optimizer, memory.activations + memory.temporary, memory.total]
        time = ("-", "-") if plan.time is None else (f"{plan.time.total:.3g}", f"{plan.tokens_per_second:,.0f}")
        sizes = (layout.tensor, layout.context, layout.data, layout.expert, layout.rows_at_once, layout.recompute)
        shown = (*sizes, *(f"{x / GIB:.1f}" for x in gib), "yes" if plan.fits else "no", *time)
        rows.append(tuple(map(str, shown)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def notes(config: TrainingConfig, plans: list[Plan], gpus: int, skipped: float) -> list[str]:
    """Return sentences about what the prediction assumes."""
    model = config.model
    found = [f"Predicted for H200s with NVLink, one document in each row, {skipped:.0%} of the attention skipped."]
    if (reason := can_predict(model)) is not None:
        found.append(f"No tokens/s: {reason}.")
    if gpus > GPUS_OF_A_HOST:
        found.append(f"More than {GPUS_OF_A_HOST} GPUs: links between hosts are slower, so tokens/s is an upper bound.")
    if model.ffn_hidden_size % ALIGNMENT:
        found.append(
            f"model.ffn_hidden_size = {model.ffn_hidden_size} is not a multiple of {ALIGNMENT}: the matrix products of "
            "the MLPs run at a third of their rate."
        )
    if plans[0].time is not None and plans[0].time.host > plans[0].time.total - plans[0].time.waiting - 1e-9:
        found.append("In the first layout the GPUs wait for the host: use larger micro-batches or fewer GPUs.")
    return found


def as_json(plans: list[Plan]) -> list[dict[str, Any]]:
    """Return the plans as values that JSON can hold. Memory is in bytes, times are in seconds."""
    return [
        {
            **dataclasses.asdict(plan),
            "memory": {**dataclasses.asdict(plan.memory), "total": plan.memory.total},
            "time": plan.time and {**dataclasses.asdict(plan.time), "total": plan.time.total},
        }
        for plan in plans
    ]


def check_numbers(
    gpus: int, memory: float, skipped: float, names: tuple[str, str, str] = ("gpus", "memory_gib", "skipped")
) -> None:
    """Raise TypeError or ValueError for a number that cannot be used. names: those of the three arguments."""
    check_integer(names[0], gpus)
    if not 1 <= gpus <= MOST_GPUS:
        raise InputError(f"{names[0]} must be from 1 to {MOST_GPUS}, got {gpus}.")
    check_number(names[1], memory, "a number of GiB above 0")
    if not 0 < memory < math.inf:
        raise InputError(f"{names[1]} must be a number of GiB above 0, got {memory}.")
    check_number(names[2], skipped)
    if not 0 <= skipped <= MOST_SKIPPED:
        raise InputError(f"{names[2]} must be from 0 to {MOST_SKIPPED}, got {skipped}.")


def main(arguments: argparse.Namespace) -> int:
    """Print the plans and the command that starts the first one. Return the exit status: 1 if no layout fits."""
    check_numbers(arguments.gpus, arguments.memory, arguments.skipped, ("--gpus", "--memory", "--skipped"))
    config = load_config(arguments.config, arguments.set, any_layout=True)
    index, model = choose_stage(config, arguments.stage), choose_model(config, arguments.model)
    stage = config.stages[index]
    plans = make_plans(config, model, stage, arguments.gpus, arguments.memory, arguments.skipped)
    if not arguments.all:
        plans = best_of_each(plans)
    fitting = plans[0].fits
    if arguments.json:
        print(json.dumps(as_json(plans), indent=1))
        return 0 if fitting else 1
    print(
        f"{config.name}, {model}, stage {stage.name}: {stage.rows_per_step} rows of {stage.context_length:,} tokens a "
        f"step, {arguments.gpus} GPUs of {arguments.memory:g} GiB"
    )
    print(table(plans))
    for sentence in notes(config, plans, arguments.gpus, arguments.skipped):
        print(sentence)
    if not fitting:
        print(f"No layout fits: each needs more than {MARGIN:.0%} of the memory of a GPU.")
        return 1
    for name, changes in changes_of_other_stages(config, index, plans[0].layout).items():
        print(f"The first layout also changes stage {name}, which is not predicted here: {', '.join(changes)}.")
    words = [f"--set={override}" for override in (*arguments.set, *overrides(config, index, plans[0].layout))]
    print(f"The first layout: {shlex.join(['megatron-sb', 'train', arguments.config, *words])}")
    return 0
