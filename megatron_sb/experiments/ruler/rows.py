"""RULER's tasks as rows to train on, among rows of text.

Questions and answers count there, and not the text before them: a question names what has to be found again twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from megatron_sb.experiments.ruler.sample import SEPARATOR, Sample
from megatron_sb.experiments.ruler.tasks import TASKS
from megatron_sb.experiments.ruler.texts import Texts
from megatron_sb.training.data import PackedBatch, Row, RowSampler, pack

SAMPLES_IN_A_ROW = (4, 2, 1)  # short texts teach what long ones take long to begin with


def encoded(sample: Sample, pad_multiple: int = 1, pad_token: int = 0) -> tuple[PackedBatch, list[tuple[int, int]]]:
    """The sequence of a sample in bytes, of which question and answers count, and where each answer's labels begin and
    end.
    """
    text, spans = sample.prompt.encode(), []
    for answer in sample.answers:
        text += SEPARATOR.encode() if spans else b""
        first = len(text) - 1  # the label of a token is the one after it
        text += answer.encode()
        spans.append((first, len(text) - 1))
    batch = pack([np.frombuffer(text, dtype=np.uint8).astype(np.int64)], pad_multiple, pad_token)
    counted = batch.counted.copy()
    counted[: max(0, len(sample.text.encode()) - 1)] = False
    return dataclasses.replace(batch, counted=counted), spans


@dataclasses.dataclass(frozen=True)
class TaskRow(Row):
    """A row that is made already: how many of its labels count is not known before. batch: its tokens."""

    batch: PackedBatch


class MixedSampler:
    """Rows of text and, evenly among them, a share of rows of RULER's tasks: `task.Sampler`.

    fraction: the share of tasks, less than 1. multiple: what a sample is padded to. A row of tasks is a pure function
    of (seed, which row it is): one task, and as many of its samples as SAMPLES_IN_A_ROW says, by chance, of equal
    length, fewer where one would not fit.
    """

    def __init__(
        self,
        rows: RowSampler,
        fraction: float,
        texts: Texts,
        row_length: int,
        multiple: int,
        pad_token: int,
        seed: Sequence[int],
    ) -> None:
        self._rows = rows
        self._fraction = fraction
        self._texts = texts
        self._row_length = row_length
        self._padding = multiple, pad_token
        self._seed = list(seed)
        self._mixed = 0

    def state_dict(self) -> dict[str, int]:
        """That of the rows of text, and how many rows of both kinds have been taken."""
        return self._rows.state_dict() | {"mixed": self._mixed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self._rows.load_state_dict(state)
        self._mixed = state["mixed"]

    def next_rows(self, count: int) -> list[Row]:
        """The next `count` rows."""
        rows: list[Row] = []
        for index in range(self._mixed, self._mixed + count):
            of_tasks = math.floor((index + 1) * self._fraction) > math.floor(index * self._fraction)
            rows.append(self._task_row(index) if of_tasks else self._rows.next_rows(1)[0])
        self._mixed += count
        return rows

    def read(self, row: Row) -> PackedBatch:
        """A row's tokens."""
        return row.batch if isinstance(row, TaskRow) else self._rows.read(row)

    def _task_row(self, index: int) -> TaskRow:
        samples = [encoded(sample, *self._padding)[0] for sample in self._samples([*self._seed, index])]
        batch = PackedBatch.concatenate(samples)
        return TaskRow([], int(batch.counted.sum()), batch.cu_seqlens, batch)

    def _samples(self, seed: Sequence[int]) -> list[Sample]:
        generator = np.random.default_rng(seed)
        task = list(TASKS.values())[generator.integers(len(TASKS))]
        for count in SAMPLES_IN_A_ROW[generator.integers(len(SAMPLES_IN_A_ROW)) :]:
            try:
                return [task(generator, self._row_length // count, self._texts) for _ in range(count)]
            except ValueError as error:
                refused = error
        raise ValueError(f"a row of {self._row_length} bytes is too short for RULER's tasks: {refused}")
