"""Mix rows of RULER's tasks into the rows of `data.kind: text`, with the share `data.ruler_fraction`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from megatron_sb.experiments.ruler.rows import MixedSampler
from megatron_sb.experiments.ruler.texts import load_texts
from megatron_sb.training.config import StageConfig, TextDataConfig, TrainingConfig
from megatron_sb.training.config.types import BelowOne, section
from megatron_sb.training.task import DocumentTask

MIN_ROW_LENGTH = 1024  # bytes; a row of this length fits every task


@section
class RulerMixtureDataConfig(TextDataConfig):
    """The `data` section of kind "text" with RULER's tasks.

    Attributes:
        ruler_fraction: share of the training rows that hold RULER's tasks, at least 0 and less than 1.
    """

    task: ClassVar[str] = "megatron_sb.experiments.ruler.mixture:RulerMixtureTask"
    ruler_fraction: BelowOne = 0.0

    def stage_problems(self, config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
        """See `DataConfig.stage_problems`."""
        yield from super().stage_problems(config, stage, path)
        if self.ruler_fraction and stage.context_length < MIN_ROW_LENGTH:
            yield (
                f"{path}.context_length must be at least {MIN_ROW_LENGTH} for RULER's tasks "
                f"(data.ruler_fraction = {self.ruler_fraction}), got {stage.context_length}"
            )


class RulerMixtureTask(DocumentTask):
    """Documents mixed with rows of RULER's tasks. Evaluation uses documents only."""

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
