"""Tasks: the rows that a job trains on, and its evaluation.

`data.kind` names a task. The class of the `data` section says where its `Task` is; see `megatron_sb._tasks`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_sb._tasks import import_object
from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.training.data import PackedBatch, Row, RowSampler, require_a_row
from megatron_sb.training.documents import load_corpus
from megatron_sb.training.evaluate import UNWATCHED, Watch, choose_windows, evaluate
from megatron_sb.training.sentence_pairs import accuracy_on_pairs, load_pairs
from megatron_sb.validation import InputError


class Sampler(Protocol):
    """An endless series of rows that depends on its seed only. Its state is a few integers."""

    def state_dict(self) -> dict[str, int]:
        """Return the position in the series."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position that `state_dict` returned."""

    def next_rows(self, count: int) -> Sequence[Row]:
        """Return the next rows, before their tokens are read."""

    def read(self, row: Row) -> PackedBatch:
        """Return the tokens of a row."""


class Task(Protocol):
    """The data of a job. The constructor takes the whole configuration. It raises ValueError for unusable data.

    Attributes:
        vocab_size: tokens of the vocabulary, before padding.
    """

    vocab_size: int

    def fingerprint(self) -> dict[str, int]:
        """Return numbers that change with the data. A resumed run compares them."""

    def describe(self) -> str:
        """Describe the data in one sentence."""

    def sampler(self, stage: StageConfig, index: int) -> Sampler:
        """Return the sampler of a stage's training rows. index: the stage's index, from 0."""

    def evaluate(self, engine: Any, stage: StageConfig, scaling: str, watch: Watch = UNWATCHED) -> list[dict[str, Any]]:
        """Evaluate a model.

        Returns:
            One entry per context length: {"context", "nll" (nats per label), "standard_error", "windows"}, and the
            task's own measures. For the arguments, see `evaluate.evaluate`.
        """


class DocumentTask:
    """Prediction of the next token in documents, evaluated by context length."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._corpus = load_corpus(config)
        self._windows = choose_windows(self._corpus, config)
        self._pairs = load_pairs(config.evaluation.sentence_pairs)
        self.vocab_size = self._corpus.vocab_size
        for index, stage in enumerate(config.stages):  # fail before the first stage trains
            try:
                require_a_row(self._corpus.train, stage.context_length, config.pad_multiple(stage))
            except InputError as error:
                raise InputError(f"stages.{index}.context_length: {error}") from None

    def fingerprint(self) -> dict[str, int]:
        """See `Task.fingerprint`. Sentence pairs are data, too: evaluations of a run must have the same ones."""
        pairs = {"evaluation.sentence_pairs": zlib.crc32(json.dumps(self._pairs).encode())} if self._pairs else {}
        return self._corpus.fingerprint() | pairs

    def describe(self) -> str:
        """See `Task.describe`."""
        counts = self._corpus.fingerprint()
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in self._corpus.left_out.items())
        return (
            f"{counts['train_documents']} training documents ({counts['train_tokens']:,} tokens), "
            f"{counts['validation_documents']} held out{f'; left out: {left_out}' if left_out else ''}; "
            f"evaluation on {len(self._windows)} windows"
        )

    def sampler(self, stage: StageConfig, index: int) -> Sampler:
        """See `Task.sampler`. A stage continues in the order of documents where the stage before it ended."""
        start = (0, 0)
        for earlier in self._config.stages[:index]:
            start = self._rows(earlier, start).end()
        return self._rows(stage, start)

    def _rows(self, stage: StageConfig, start: tuple[int, int]) -> RowSampler:
        config, corpus = self._config, self._corpus
        return RowSampler(
            corpus.train,
            stage.context_length,
            config.pad_multiple(stage),
            corpus.end_of_document,
            (config.seed, 1),
            start,
            self._num_document_rows(stage),
        )

    def _num_document_rows(self, stage: StageConfig) -> int:
        """Return how many of a stage's rows hold documents: all."""
        return stage.steps * stage.rows_per_step

    def evaluate(self, engine: Any, stage: StageConfig, scaling: str, watch: Watch = UNWATCHED) -> list[dict[str, Any]]:
        """See `Task.evaluate`. With sentence pairs, the entry of the stage's own length has "sentence_pairs"."""
        results = evaluate(engine, self._corpus, self._windows, self._config, stage, scaling, watch)
        for entry in results if self._pairs else ():
            if entry["context"] == stage.context_length:
                entry["sentence_pairs"] = accuracy_on_pairs(engine, self._pairs, self._config, stage, watch)
        return results


def load_task(config: TrainingConfig) -> Task:
    """Return the task of config.data.

    Raises:
        ValueError: The data cannot be used.
    """
    return import_object(config.data.task)(config)
