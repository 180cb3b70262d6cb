"""Training rows of RULER's tasks among rows of text.

In rows of tasks only the labels of questions and answers count in the loss. Those of the text before them do not.
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
from megatron_sb.validation import InputError

SAMPLES_PER_ROW = (4, 2, 1)  # several short samples per row speed up learning


def encode(sample: Sample, pad_multiple: int = 1, pad_token: int = 0) -> tuple[PackedBatch, list[tuple[int, int]]]:
    """Return a sample as a sequence of bytes, and the range of labels of each answer.

    Only the labels of question and answers count in the loss.
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
    """A generated row. `next_rows` generates it, because only then its number of counted labels is known."""

    batch: PackedBatch


class MixedSampler:
    """A `task.Sampler` of rows of text, with rows of RULER's tasks evenly distributed among them.

    A row of tasks is a pure function of the seed and the row's index. It holds one random task, with a random number of
    samples from SAMPLES_PER_ROW, all of equal length. It holds fewer samples if so many do not fit.

    Args:
        rows: sampler of the rows of text.
        fraction: share of rows of tasks, less than 1.
        texts: source of the tasks.
        row_length: length of a row in bytes.
        multiple: samples are padded to a multiple of this number of tokens.
        pad_token: fills the padding.
        seed: seed of the rows of tasks.
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
        """Return the state of the text rows and the number of rows taken, of both kinds."""
        return self._rows.state_dict() | {"mixed": self._mixed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a `state_dict`."""
        self._rows.load_state_dict(state)
        self._mixed = state["mixed"]

    def next_rows(self, count: int) -> list[Row]:
        """Return the next `count` rows."""
        rows: list[Row] = []
        for index in range(self._mixed, self._mixed + count):
            is_task_row = math.floor((index + 1) * self._fraction) > math.floor(index * self._fraction)
            rows.append(self._task_row(index) if is_task_row else self._rows.next_rows(1)[0])
        self._mixed += count
        return rows

    def read(self, row: Row) -> PackedBatch:
        """Return the tokens of a row."""
        return row.batch if isinstance(row, TaskRow) else self._rows.read(row)

    def _task_row(self, index: int) -> TaskRow:
        samples = [encode(sample, *self._padding)[0] for sample in self._samples([*self._seed, index])]
        batch = PackedBatch.concatenate(samples)
        return TaskRow([], int(batch.counted.sum()), batch.cu_seqlens, batch)

    def _samples(self, seed: Sequence[int]) -> list[Sample]:
        generator = np.random.default_rng(seed)
        task = list(TASKS.values())[generator.integers(len(TASKS))]
        for count in SAMPLES_PER_ROW[generator.integers(len(SAMPLES_PER_ROW)) :]:
            try:
                return [task(generator, self._row_length // count, self._texts) for _ in range(count)]
            except InputError as error:
                last_error = error
        raise InputError(f"context_length = {self._row_length} is too short for a row of RULER's tasks: {last_error}")
