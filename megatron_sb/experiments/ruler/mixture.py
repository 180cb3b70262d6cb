"""Mix rows of RULER's tasks into the rows of documents, with the share `data.ruler_fraction`, and measure the tasks.

The documents are bytes: those of `data.kind: text`, or data sets of `data.kind: indexed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

from megatron_sb.experiments.ruler.rows import MixedSampler
from megatron_sb.experiments.ruler.tasks import TASKS
from megatron_sb.experiments.ruler.texts import load_texts
from megatron_sb.training.config import (
    DocumentDataConfig,
    IndexedDataConfig,
    StageConfig,
    TextDataConfig,
    TrainingConfig,
)
from megatron_sb.training.config.types import BelowOne, NonNegativeInt, PositiveInt, section
from megatron_sb.training.evaluate import UNWATCHED, Watch
from megatron_sb.training.task import DocumentTask

MIN_ROW_LENGTH = 1024  # bytes; a row of this length fits every task


@section
class RulerFields(DocumentDataConfig):
    """The fields of documents with RULER's tasks.

    Attributes:
        ruler_fraction: share of the training rows that hold RULER's tasks, at least 0 and less than 1. Default 0.
        ruler_samples: samples of each task and length in an evaluation. Default 0: the tasks are not measured. The
            lengths are the evaluated ones from the stage's context on.
        ruler_length_factor: the longest measured text, as a multiple of the stage's context. Default 16.
    """

    task: ClassVar[str] = "megatron_sb.experiments.ruler.mixture:RulerMixtureTask"
    ruler_fraction: BelowOne = 0.0
    ruler_samples: NonNegativeInt = 0
    ruler_length_factor: PositiveInt = 16

    def problems(self, config: TrainingConfig) -> Iterator[str]:
        """See `DataConfig.problems`."""
        yield from super().problems(config)
        yield from self.problems_of_bytes("RULER's tasks")
        ranks = config.parallel.ranks
        if self.ruler_samples and ranks > 1:
            yield f"parallel.ranks must be 1 with data.ruler_samples = {self.ruler_samples}, got {ranks}"
        evaluated = config.stages[-1:] if config.evaluation.last_stage_only else config.stages
        if self.ruler_samples and not any(self.ruler_lengths(config, stage) for stage in evaluated):
            index, last = len(config.stages) - 1, config.stages[-1]
            longest = self.ruler_length_factor * last.context_length
            yield (
                f"data.ruler_samples = {self.ruler_samples} needs an evaluated length from stages.{index}."
                f"context_length = {last.context_length} to data.ruler_length_factor times as many tokens, {longest}, "
                f"got {config.evaluation_lengths(last)}, which follow from evaluation"
            )

    def ruler_lengths(self, config: TrainingConfig, stage: StageConfig) -> list[int]:
        """Return the evaluated contexts from the stage's own on that RULER's tasks are measured at."""
        longest = self.ruler_length_factor * stage.context_length
        return [length for length in config.evaluation_lengths(stage) if stage.context_length <= length <= longest]

    def stage_problems(self, config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
        """See `DataConfig.stage_problems`."""
        yield from super().stage_problems(config, stage, path)
        if (self.ruler_fraction or self.ruler_samples) and stage.context_length < MIN_ROW_LENGTH:
            yield (
                f"{path}.context_length must be at least {MIN_ROW_LENGTH} for RULER's tasks (data.ruler_fraction = "
                f"{self.ruler_fraction}, data.ruler_samples = {self.ruler_samples}), got {stage.context_length}"
            )


@section
class RulerMixtureDataConfig(TextDataConfig, RulerFields):
    """The `data` section of kind "text" with RULER's tasks."""


@section
class RulerMixtureIndexedDataConfig(IndexedDataConfig, RulerFields):
    """The `data` section of kind "indexed" with RULER's tasks."""


class RulerMixtureTask(DocumentTask):
    """Documents mixed with rows of RULER's tasks. Evaluation uses documents, and the tasks if ruler_samples is set."""

    def describe(self) -> str:
        """See `Task.describe`."""
        return f"{self._config.data.ruler_fraction:.0%} of the rows hold RULER's tasks; {super().describe()}"

    def _num_document_rows(self, stage: StageConfig) -> int:
        """Return how many of a stage's rows hold documents; see `MixedSampler.next_rows`."""
        num_rows = super()._num_document_rows(stage)
        return num_rows - math.floor(num_rows * self._config.data.ruler_fraction)

    def sampler(self, stage: StageConfig, index: int) -> MixedSampler:
        """See `Task.sampler`."""
        config, end = self._config, self._corpus.end_of_document
        multiple = math.lcm(config.pad_multiple(stage), config.row_multiple(stage))
        return MixedSampler(
            super().sampler(stage, index),
            config.data.ruler_fraction,
            load_texts().select_questions(held_out=False),
            stage.context_length,
            multiple,
            end,
            (config.seed, 1 + index),
        )

    def evaluate(self, engine: Any, stage: StageConfig, scaling: str, watch: Watch = UNWATCHED) -> list[dict[str, Any]]:
        """See `Task.evaluate`. Entries of measured lengths also have "ruler": task -> what `scoring.scores` returns."""
        from megatron_sb.experiments.ruler.scoring import samples_of, scores

        results = super().evaluate(engine, stage, scaling, watch)
        data, lengths = self._config.data, self._config.data.ruler_lengths(self._config, stage)
        for entry in (entry for entry in results if data.ruler_samples and entry["context"] in lengths):
            length = entry["context"]
            engine.scale_positions(scaling, length / stage.context_length)
            entry["ruler"] = {
                task: scores(engine, samples_of(task, length, data.ruler_samples), length, watch.on_batch)
                for task in TASKS
            }
        engine.scale_positions("none", 1.0)
        return results
