"""Negative log-likelihood by context length: the same target tokens, seen with ever longer contexts.

A window is the last `target_tokens` of a stretch of a validation document as long as the job's longest context. For
every context length c the model sees the stretch's last c tokens and is scored on the targets alone (one of them has
between c - target_tokens and c tokens before it). So a difference between two lengths is the context's doing and not
the text's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.training.data import Corpus, PackedBatch, pack

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Watch:
    """Whom an evaluation tells how far it is, on every rank after as many lengths and batches; what they raise ends it
    on every rank that raises.
    """

    on_length: Callable[[dict[str, Any]], None] = lambda result: None
    on_batch: Callable[[], None] = lambda: None


UNWATCHED = Watch()


def result_path(out: Path, model: str, stage: StageConfig, scaling: str) -> Path:
    """Where the evaluation after a stage is kept; the file exists when it is done. No name has a dot in it."""
    suffix = "" if scaling == "none" else f".{scaling}"
    return out / "evaluation" / f"{model}.{stage.name}{suffix}.json"


def choose_windows(corpus: Corpus, config: TrainingConfig) -> list[np.ndarray]:
    """Up to config.evaluation.windows stretches of validation documents, (longest + 1,) tokens each: first the start
    of every document that is long enough, then what follows it, and so on.

    Raises ValueError when no validation document is long enough.
    """
    longest = max(config.evaluation_lengths(stage)[-1] for stage in config.stages)
    places = sorted(
        (start, index)
        for index, length in enumerate(corpus.validation.lengths)
        for start in range(0, int(length) - longest, longest)
    )
    if not places:
        raise ValueError(
            f"no validation document has the {longest + 1} tokens that evaluation.length_factor = "
            f"{config.evaluation.length_factor} and evaluation.longest = {config.evaluation.longest} ask for "
            f"(the longest has {corpus.validation.lengths.max()}): lower it or a stage's context_length, or "
            "give longer documents"
        )
    chosen = places[: config.evaluation.windows]
    return [corpus.validation.read(index, start, start + longest + 1) for start, index in chosen]


def evaluate(
    engine: Any,
    corpus: Corpus,
    windows: list[np.ndarray],
    config: TrainingConfig,
    stage: StageConfig,
    scaling: str = "none",
    watch: Watch = UNWATCHED,
) -> list[dict[str, Any]]:
    """One entry per context length: {"context", "nll" (nats per token), "standard_error" (over windows; None with
    one), "windows"}.

    scaling: how rotary positions are scaled, by as much as a context is longer than the stage's.
    """
    results = []
    num_targets = config.evaluation.target_tokens
    for context in config.evaluation_lengths(stage):
        engine.scale_positions(scaling, max(1.0, context / stage.context_length))

        def batch_of(indices: Sequence[int], context: int = context) -> PackedBatch:
            parts = [windows[index][-context - 1 :] for index in indices]
            return pack(parts, config.row_multiple(stage), corpus.end_of_document, num_targets)

        at_once = max(1, len(windows[0]) // context)
        (sums,) = score_windows(engine, [engine.window_losses], batch_of, len(windows), at_once, watch)
        nll, error = mean_and_error((sums / num_targets).tolist())
        results.append({"context": context, "nll": nll, "standard_error": error, "windows": len(windows)})
        watch.on_length(results[-1])
    engine.scale_positions("none", 1.0)
    return results


def score_windows(
    engine: Any,
    measures: Sequence[Callable[[PackedBatch, int], torch.Tensor]],
    batch_of: Callable[[Sequence[int]], PackedBatch],
    num_windows: int,
    at_once: int,
    watch: Watch = UNWATCHED,
) -> torch.Tensor:
    """Each measure of every window, summed over ranks: float64 (len(measures), num_windows); collective.

    measures: the engine's, of a batch and how many windows it holds: (n,). batch_of: the windows of these indices.
    at_once: windows in a batch, at most.
    Data-parallel groups share out the windows; ranks of one group share each sequence. Every group scores as many,
    some of them a window that another has too, which counts once: experts are spread over groups, which have to call
    them alike.
    """
    import torch

    num_groups = engine.data_parallel_size
    num_scored = -(-num_windows // num_groups) * num_groups
    sums = torch.zeros(len(measures), num_scored, dtype=torch.float64)
    mine = range(engine.data_parallel_rank, num_scored, num_groups)
    for start in range(0, len(mine), at_once):
        indices = list(mine[start : start + at_once])
        batch = batch_of([index % num_windows for index in indices])
        for row, measure in zip(sums, measures, strict=True):
            row[indices] = measure(batch, len(indices)).cpu()
        watch.on_batch()
    return engine.sum_over_ranks(sums)[:, :num_windows]


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error, None with one value."""
    mean = math.fsum(values) / len(values)
    return mean, float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
