"""What a job trains on and is measured by: rows with the labels whose loss counts, and an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_sb._tasks import import_object
from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.training.data import PackedBatch, Row, RowSampler, load_corpus, require_a_row
from megatron_sb.training.evaluate import UNWATCHED, Watch, choose_windows, evaluate


class Sampler(Protocol):
    """An endless series of rows, the same for the same seed; a position in it is a few integers."""

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...

    def next_rows(self, count: int) -> Sequence[Row]: ...

    def read(self, row: Row) -> PackedBatch: ...


class Task(Protocol):
    """vocab_size: before padding."""

    vocab_size: int

    def fingerprint(self) -> dict[str, int]:
        """Tells whether a resumed run sees the data it started with."""

    def describe(self) -> str:
        """The data, in one sentence."""

    def sampler(self, stage: StageConfig, index: int) -> Sampler:
        """The training rows of a stage. index: the stage's, from 0."""

    def evaluate(self, engine: Any, stage: StageConfig, scaling: str, watch: Watch = UNWATCHED) -> list[dict[str, Any]]:
        """One entry per context length: {"context", "nll" (nats per label), "standard_error", "windows"} and what else
        the task measures. scaling, watch: as in `evaluate.evaluate`.
        """


class DocumentTask:
    """Next tokens of documents; evaluated by context length. Raises ValueError where they fill no row of a stage."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._corpus = load_corpus(config)
        self._windows = choose_windows(self._corpus, config)
        self.vocab_size = self._corpus.vocab_size
        for index, stage in enumerate(config.stages):  # what fills no row is refused before anything is trained
            try:
                require_a_row(self._corpus.train, stage.context_length, config.pad_multiple(stage))
            except ValueError as error:
                raise ValueError(f"stages.{index}.context_length = {stage.context_length}: {error}") from None

    def fingerprint(self) -> dict[str, int]:
        """As `Task.fingerprint`."""
        return self._corpus.fingerprint()

    def describe(self) -> str:
        """As `Task.describe`."""
        counts = self._corpus.fingerprint()
        return (
            f"{counts['train_documents']} training documents ({counts['train_tokens']:,} tokens), "
            f"{counts['validation_documents']} held out; evaluation on {len(self._windows)} windows"
        )

    def sampler(self, stage: StageConfig, index: int) -> Sampler:
        """As `Task.sampler`."""
        config, corpus, seed = self._config, self._corpus, (self._config.seed, 1 + index)
        return RowSampler(corpus.train, stage.context_length, config.pad_multiple(stage), corpus.end_of_document, seed)

    def evaluate(self, engine: Any, stage: StageConfig, scaling: str, watch: Watch = UNWATCHED) -> list[dict[str, Any]]:
        """As `Task.evaluate`."""
        return evaluate(engine, self._corpus, self._windows, self._config, stage, scaling, watch)


def load_task(config: TrainingConfig) -> Task:
    """What config.data says. Raises ValueError when it cannot be had."""
    return import_object(config.data.task)(config)
