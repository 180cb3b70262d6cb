"""Negative log-likelihood of the same target tokens, by context length.

A window is a part of a validation document, as long as the job's longest context. Its last `target_tokens` tokens are
the targets. For each context length c, the model sees the last c tokens of the window and is scored on the targets
only. A target then has between c - target_tokens and c tokens before it. All lengths score the same text; only the
context differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.training.data import PackedBatch, pack
from megatron_sb.training.documents import CHUNK, Corpus, chunks
from megatron_sb.validation import InputError, read_json_object

if TYPE_CHECKING:
    import torch


FIRST_POSITIONS = 16  # measured together, see `by_position`
# Bounds of a forward: tokens, and numbers in its logits, which are 1 GiB in fp32. A forward may always have as many
# tokens as the longest window, because that window needs the memory anyway.
TOKENS_PER_FORWARD = 2**16
LOGITS_PER_FORWARD = 2**28


@dataclasses.dataclass(frozen=True)
class Watch:
    """Callbacks of an evaluation. Every rank calls them equally often. An exception in one ends the evaluation.

    Attributes:
        on_length: called with the entry of each context length.
        on_batch: called after each batch.
    """

    on_length: Callable[[dict[str, Any]], None] = lambda result: None
    on_batch: Callable[[], None] = lambda: None


UNWATCHED = Watch()


def result_path(out: Path, model: str, stage: StageConfig, scaling: str, step: int | None = None) -> Path:
    """Return the file of the evaluation after a step of a stage, by default the last one.

    Names of models and stages contain no dot, so each file belongs to one evaluation.
    """
    suffix = "" if scaling == "none" else f".{scaling}"
    within = "" if step in (None, stage.steps) else f".{step:06d}"
    return out / "evaluation" / f"{model}.{stage.name}{within}{suffix}.json"


def read_result(
    out: Path, model: str, stage: StageConfig, scaling: str, step: int | None = None
) -> dict[str, Any] | None:
    """Return the evaluation after a step of a stage, by default the last one, or None if it is not done.

    A file that names another step does not count. Files of version 0.1.0 do not name the step; it was always the last
    one.
    """
    path, step = result_path(out, model, stage, scaling, step), step or stage.steps
    if not path.exists():
        return None
    entry = read_evaluation(path)
    return entry if entry.get("step", stage.steps) == step else None


def read_evaluation(path: Path) -> dict[str, Any]:
    """Return the evaluation in a file, which has null for a likelihood that is not a number: JSON has no NaN."""
    return _with_nan(read_json_object(path))


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: math.nan if name == "nll" and each is None else _with_nan(each) for name, each in value.items()}
    return [_with_nan(each) for each in value] if isinstance(value, list) else value


def remove_later_results(out: Path, model: str, stage: StageConfig, step: int) -> None:
    """Remove the evaluations after later steps of a stage. A run that continues from `step` computes them again."""
    for path in (out / "evaluation").glob(f"{model}.{stage.name}.*json"):
        if read_json_object(path).get("step", stage.steps) > step:
            path.unlink()


def choose_windows(corpus: Corpus, config: TrainingConfig) -> list[np.ndarray]:
    """Choose up to config.evaluation.windows windows, spread evenly over all validation documents that are long enough.

    Most data sets keep the documents of a project or an author together, so neighbours would be much alike.

    Returns:
        Windows of (longest + 1,) tokens.

    Raises:
        ValueError: No validation document is long enough.
    """
    longest = max(config.evaluation_lengths(stage)[-1] for stage in config.stages)
    places = _window_places(corpus.validation.lengths, longest, config.evaluation.windows)
    if not places:
        raise InputError(
            f"the longest validation document must have {longest + 1} tokens, got {corpus.validation.lengths.max()}. "
            f"Lower evaluation.longest = {config.evaluation.longest}, evaluation.length_factor = "
            f"{config.evaluation.length_factor} or a stage's context_length, or give longer documents."
        )
    return [corpus.validation.read(index, start, start + longest + 1) for start, index in places]


def _window_places(lengths: np.ndarray, longest: int, count: int) -> list[tuple[int, int]]:
    """Return (start, document) of up to `count` windows: first the starts of documents, then their later parts.

    Where not all documents are needed, the chosen ones are spread evenly over all that are long enough.
    """
    documents = _spread_documents(lengths, longest, count)
    places: list[tuple[int, int]] = []
    start = 0
    while len(documents) and len(places) < count:
        chosen = documents[_spread(len(documents), count - len(places))]
        places += [(start, document) for document in chosen.tolist()]
        start += longest
        documents = documents[lengths[documents] > start + longest]
    return places


def _spread_documents(lengths: np.ndarray, longest: int, count: int) -> np.ndarray:
    """Return up to `count` of the documents with more than `longest` tokens, evenly spaced.

    The memory does not grow with the number of documents.
    """
    ranks = _spread(sum(np.count_nonzero(some > longest) for some in chunks(lengths)), count)
    documents, before = [], 0
    for index, some in enumerate(chunks(lengths)):
        found = np.flatnonzero(some > longest)
        here = ranks[(ranks >= before) & (ranks < before + len(found))] - before
        documents.append(index * CHUNK + found[here])
        before += len(found)
    return np.concatenate(documents)


def _spread(total: int, count: int) -> np.ndarray:
    """Return up to `count` of the numbers below `total`, evenly spaced, from 0 on."""
    count = min(count, total)
    return np.arange(count) * total // max(1, count)


def evaluate(
    engine: Any,
    corpus: Corpus,
    windows: list[np.ndarray],
    config: TrainingConfig,
    stage: StageConfig,
    scaling: str = "none",
    watch: Watch = UNWATCHED,
) -> list[dict[str, Any]]:
    """Evaluate a model at every context length.

    Args:
        engine: the `Engine` with the model.
        corpus: the documents that the windows come from.
        windows: from `choose_windows`.
        config: the job's configuration.
        stage: the stage that the model was trained in.
        scaling: how rotary positions are scaled where a context is longer than the stage's. The factor is the ratio.
        watch: callbacks.

    Returns:
        One entry per context length: {"context", "nll" (nats per token), "standard_error" (over windows; None with one
        window), "windows"}. With config.evaluation.positions, the entry of the stage's own length has "by_position",
        see `by_position`.
    """
    results = []
    num_targets = config.evaluation.target_tokens
    for context in config.evaluation_lengths(stage):
        engine.scale_positions(scaling, max(1.0, context / stage.context_length))

        def batch_of(indices: Sequence[int], context: int = context) -> PackedBatch:
            parts = [windows[index][-context - 1 :] for index in indices]
            return pack(parts, config.row_multiple(stage), corpus.end_of_document, num_targets)

        at_once = windows_at_once(context, len(windows[0]) - 1, corpus.vocab_size)
        (sums,) = score_windows(engine, [engine.window_losses], batch_of, len(windows), at_once, watch)
        nll, error = mean_and_error((sums / num_targets).tolist())
        results.append({"context": context, "nll": nll, "standard_error": error, "windows": len(windows)})
        if config.evaluation.positions and context == stage.context_length:
            results[-1]["by_position"] = by_position(engine, corpus, windows, config, stage, watch)
        watch.on_length(results[-1])
    engine.scale_positions("none", 1.0)
    return results


def by_position(
    engine: Any,
    corpus: Corpus,
    windows: list[np.ndarray],
    config: TrainingConfig,
    stage: StageConfig,
    watch: Watch = UNWATCHED,
) -> list[dict[str, Any]]:
    """Compute the likelihood of the last tokens of each window, as many as the stage's context, by position.

    Args:
        engine: the `Engine` with the model.
        corpus: the documents that the windows come from.
        windows: from `choose_windows`.
        config: the job's configuration.
        stage: the stage that the model was trained in.
        watch: callbacks.

    Returns:
        One entry for the positions from 0 to FIRST_POSITIONS, then one for each doubling: {"begin", "end", "nll",
        "standard_error"}. A token at position i has i + 1 tokens before it.
    """
    context = stage.context_length
    ends = [min(FIRST_POSITIONS, context)]
    while ends[-1] < context:
        ends.append(min(2 * ends[-1], context))
    results, at_once = [], windows_at_once(context, len(windows[0]) - 1, corpus.vocab_size)
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):

        def batch_of(indices: Sequence[int], begin: int = begin, end: int = end) -> PackedBatch:
            parts = [windows[index][-context - 1 :] for index in indices]
            batch = pack(parts, config.row_multiple(stage), corpus.end_of_document)
            starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
            position = np.arange(len(batch.tokens)) - starts
            return dataclasses.replace(batch, counted=batch.counted & (position >= begin) & (position < end))

        (sums,) = score_windows(engine, [engine.window_losses], batch_of, len(windows), at_once, watch)
        nll, error = mean_and_error((sums / (end - begin)).tolist())
        results.append({"begin": begin, "end": end, "nll": nll, "standard_error": error})
    return results


def windows_at_once(context: int, longest: int, vocab_size: int) -> int:
    """Return how many windows of `context` tokens a forward computes at most.

    Args:
        context: tokens of a window.
        longest: tokens of the longest window of the evaluation.
        vocab_size: tokens of the vocabulary.

    Example:
        >>> windows_at_once(1024, 4096, vocab_size=257)  # 65,536 tokens
        64
        >>> windows_at_once(1024, 1024, vocab_size=100_000)  # 268 million logits
        2
        >>> windows_at_once(1024, 4096, vocab_size=100_000)  # the logits of the longest window
        4
    """
    tokens = max(longest, min(TOKENS_PER_FORWARD, LOGITS_PER_FORWARD // vocab_size))
    return max(1, tokens // context)


def score_windows(
    engine: Any,
    measures: Sequence[Callable[[PackedBatch, int], torch.Tensor]],
    batch_of: Callable[[Sequence[int]], PackedBatch],
    num_windows: int,
    at_once: int,
    watch: Watch = UNWATCHED,
) -> torch.Tensor:
    """Compute measures of every window, over all ranks. Collective.

    Each data-parallel group scores its share of the windows. All groups run the same number of forwards, because with
    expert parallelism the groups share the experts. To make the shares equal, some windows are scored a second time;
    the second scores are dropped.

    Args:
        engine: the `Engine` with the model.
        measures: methods of the engine that map (batch, n) to a tensor (n,), with a value for each of the n windows.
        batch_of: returns the batch of the windows with the given indices.
        num_windows: number of windows.
        at_once: largest number of windows in a batch.
        watch: callbacks.

    Returns:
        float64 (len(measures), num_windows).
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
    """Return the mean and its standard error, which is None for one value."""
    mean = math.fsum(values) / len(values)
    return mean, float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def error_of_mean(errors: Sequence[float | None]) -> float | None:
    """Return the standard error of a mean of independent values with these errors; None if one of them is unknown."""
    return None if None in errors else math.hypot(*errors) / len(errors)
